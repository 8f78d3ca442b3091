"""From a model and a machine to a plan: profile, solve, and more microbatches where nothing fits."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from lazytrain.base import Batch, count_rows
from lazytrain.errors import MemoryBudgetError
from lazytrain.profiler import Profiler
from lazytrain.slabs import available_host_bytes
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.memory import account, find_shortage, largest_tensor_bytes
from lazytrain.solver.plan import Plan
from lazytrain.solver.planning import Result, solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate

# Enough to keep a GPU's matrix units busy; more only costs memory.
CHUNK_TOKENS_CUDA = 16384
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.92, 0.9, 0.9
# What the allocator may lose of a given limit to rounding and fragments.
LIMIT_SHARE = 0.985
# Room for the allocator's fragments, in tensors as large as a step's largest. With less it gives all free memory back
# and takes it anew, up to four times a step, and the device and the next loads wait for that. On an H200 12 of 15 plans
# with 1.5 never did so, three of 14B 0.6 to 1.2 times a step; with 1 to 1.2 it took 30 to 70 ms a step, with next to
# nothing 75 to 160 (tensors of 2.2 and 3.1 GB).
ROOM_TENSORS = 1.5
REFILL_MS_PER_GB = 33.0  # of that room which is missing


class Planned(NamedTuple):
    """A plan, the measured problem it answers, and the solver's account."""

    plan: Plan
    problem: Problem
    result: Result


def default_limits(
    device: torch.device,
    *,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    spill_dir: Path | None = None,
    shared_checkpoints: int = 0,
) -> dict[str, int]:
    """Return the bytes a plan may fill per tier: the given limits, or most of what is free now.

    Args:
        spill_dir: an existing directory on NVMe that the plan may use.
        shared_checkpoints: how many will hold older versions of what is there, on the same disk.
    """
    host = host_memory or int(available_host_bytes() * HOST_SHARE)
    if spill_dir is not None:
        room = int(shutil.disk_usage(spill_dir).free * DISK_SHARE) // (1 + shared_checkpoints)
        return default_limits(device, gpu_memory=gpu_memory, host_memory=host) | {"nvme": room}
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limit = free if gpu_memory is None else int(gpu_memory * LIMIT_SHARE)
        return {"device": min(limit, int(free * DEVICE_SHARE)), "host": host}
    return {"device": gpu_memory or host // 2, "host": host}


def default_microbatches(batch: Batch, device: torch.device) -> int:
    """Return into how many chunks to cut a batch at first: one on a CPU, about 16k tokens each on a GPU."""
    first = next(iter(batch.values()))
    if device.type != "cuda":
        return 1
    num_rows, num_tokens = len(first), first.numel()
    return max(1, min(num_rows, math.ceil(num_tokens / CHUNK_TOKENS_CUDA)))


def plan_from_file(path: Path, profiler: Profiler) -> Planned:
    """Read a plan that was saved, perhaps edited; check it against this model and machine and predict it anew.

    Raises:
        PlannerError: the file is no plan, or it contradicts itself or the model.
        MemoryBudgetError: it does not fit; says what is missing per tier.
    """
    plan = Plan.load(path)
    problem = profiler.problem(plan.num_microbatches)
    plan.validate(problem)
    shortage = find_shortage(problem, account(problem, plan))
    if shortage:
        missing = ", ".join(f"{tier}: {num_bytes / 2**30:.2f} GiB more" for tier, num_bytes in shortage.items())
        raise MemoryBudgetError(f"{path} does not fit this machine's budgets ({missing}). Edit it, or plan anew.")
    plan = plan.with_prediction(simulate(problem, plan).predicted)
    return Planned(plan, problem, Result(plan=plan, code="feasible", message=f"read from {path}", statistics={}))


def solve_problem(*problems: Problem | None, time_limit_s: float = PLAN_SECONDS) -> Planned | None:
    """Return the fastest of the solved plans of some problems, variants of one; None where nothing fits any.

    Plans that leave room on the device for the allocator's fragments are preferred, see `ROOM_TENSORS`.

    Args:
        time_limit_s: for each problem; half as much again to fill the device where a plan that leaves room is known,
            and to fill half of that room, where that may be best.
    """
    given = [problem for problem in problems if problem is not None]
    best: Planned | None = None
    best_ms = math.inf
    full_ms = [math.inf] * len(given)
    for filled in (0.0, 1.0, 0.5):  # of the room
        for i, problem in enumerate(given):
            leaves, tried = _with_room(problem), _with_room(problem, filled)
            room_bytes = tried.hardware.device_memory_bytes - leaves.hardware.device_memory_bytes
            # A plan that fills half of it is hardly faster than one that fills all.
            if (filled and not room_bytes) or (filled == 0.5 and full_ms[i] + _refills_ms(room_bytes) >= best_ms):
                continue
            limit_s = time_limit_s / 2 if filled and best is not None else time_limit_s
            result = solve(tried, time_limit_s=limit_s, rival_ms=best_ms)
            if result.plan is None:
                continue
            assert result.plan.predicted is not None
            if filled == 1.0:
                full_ms[i] = result.plan.predicted.step_ms
            missing_bytes = result.plan.predicted.device_peak_bytes - leaves.hardware.device_memory_bytes
            step_ms = result.plan.predicted.step_ms + _refills_ms(missing_bytes)
            if step_ms < best_ms:
                plan = replace(result.plan, problem_digest=problem.digest)
                best, best_ms = Planned(plan, problem, replace(result, plan=plan)), step_ms
    return best


def _refills_ms(missing_bytes: int) -> float:
    """Return how much longer a step is where so much of the room is missing."""
    return REFILL_MS_PER_GB * max(0, missing_bytes) / 1e9


def _with_room(problem: Problem, filled: float = 0.0) -> Problem:
    """Return the problem with less of the device's memory: what is left has room for the allocator's fragments.

    What a limit loses to fragments anyway counts. The problem itself, where that is enough, and where the device is the
    host's own RAM, which is not cut up.

    Args:
        filled: how much of that room is not left.
    """
    limit = problem.hardware.device_memory_bytes
    roomy = max(1, int(limit / LIMIT_SHARE) - int(ROOM_TENSORS * largest_tensor_bytes(problem)))
    if problem.device_is_host or roomy >= limit or filled == 1.0:
        return problem
    roomy += int(filled * (limit - roomy))
    return replace(problem, hardware=replace(problem.hardware, device_memory_bytes=roomy))


def choose_plan(
    profiler: Profiler,
    *,
    num_microbatches: int | None = None,
    time_limit_s: float = PLAN_SECONDS,
    report: Callable[[str], None] = lambda line: None,
) -> Planned:
    """Profile the model, solve for a plan, and cut the step in more microbatches as long as nothing fits.

    Where nothing fits in the end, a plan may compute boundaries again.

    Args:
        num_microbatches: None = `default_microbatches`, doubled until a plan fits.
        time_limit_s: of the solver, for each problem that it is given.
        report: called with one line per try.

    Raises:
        MemoryBudgetError: no plan fits, even with one row a microbatch; says what is missing per tier.
    """
    count = num_microbatches or default_microbatches(profiler.batch, profiler.device)
    num_rows = count_rows(profiler.batch)
    while True:
        problem = profiler.problem(count, report)
        planned = solve_problem(problem, problem.without_cpu_updates(), time_limit_s=time_limit_s)
        if planned is not None:
            return planned
        if num_microbatches is not None or count >= num_rows:
            break
        report(f"nothing fits with {count} microbatches: trying {min(2 * count, num_rows)}")
        count = min(2 * count, num_rows)
    result = solve(problem, time_limit_s=time_limit_s, may_drop=True)
    if result.plan is None:
        raise MemoryBudgetError(result.message)
    if result.plan.drops_boundaries:
        report("only a plan fits that computes boundaries again: a step takes longer")
    return Planned(result.plan, problem, result)
