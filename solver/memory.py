"""How many bytes a plan needs in each tier, at every position of a step: one function for planner, report and tests.

Every tensor and buffer is rounded up to 512 bytes. M is the number of microbatches (chunks), P the prefetch depth.

    device, always    resident weights and states + min(P, streamed) weight slots + min(2, visiting) update buffers
                      + 2 fetch buffers + 2 grad buffers + grads of embed and head that go to the host
    device, forward   + kept boundaries so far + kept residuals so far + own input and output of all chunks
                      + own residuals + one offload in flight + grads that wait for their update + workspace
    device, backward  + kept boundaries and residuals not yet consumed + cotangents of all chunks and one more
                      + grads that wait for the norm + the sum over chunks where M > 1 + workspace
    host              weights, states, grads, offloaded things; staging buffers for what lives on NVMe
    nvme              weights, states and spilled things, and two files more: a new version is another file
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, Plan, UnitPlan
from lazytrain.solver.problem import Problem, UnitCost

ALIGN_BYTES = 512
FP32_BYTES = 4
NUM_RING_BUFFERS = 2  # update, grad, fetch and staging buffers; offloads in flight
NUM_WRITERS = 2  # threads that write to NVMe: the updater's and the writer's
GIB = 1 << 30


class Usage(NamedTuple):
    """What a plan needs. `device` holds (position, bytes) in the order of a step; its largest is the peak."""

    device: tuple[tuple[str, int], ...]
    host_bytes: int
    nvme_bytes: int

    @property
    def device_peak_bytes(self) -> int:
        """Return the largest need of any position."""
        return max(num_bytes for _, num_bytes in self.device)

    @property
    def device_peak_at(self) -> str:
        """Return the name of the position with the largest need."""
        return max(self.device, key=lambda item: item[1])[0]


def align(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of 512."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def sum_bytes(unit: UnitCost) -> int:
    """Return the bytes of a unit's grads in fp32, as microbatches are summed."""
    return align(FP32_BYTES * unit.num_params)


def chunk_sum_bytes(problem: Problem, unit: UnitCost) -> int:
    """Return what the sum of a block's grads takes while another chunk's are computed.

    The first chunk's are kept as they are; from the third on there is an fp32 sum, which that of 16-bit grads is new.
    """
    if problem.num_microbatches == 1:
        return 0
    is_fp32 = unit.grad_bytes >= FP32_BYTES * unit.num_params
    if problem.num_microbatches == 2 or is_fp32:
        return align(unit.grad_bytes)
    return sum_bytes(unit) + align(unit.grad_bytes)


def boundary_bytes(problem: Problem, unit: UnitCost) -> int:
    """Return the bytes of a unit's input, all chunks."""
    return problem.num_microbatches * align(unit.boundary_bytes)


def residual_bytes(problem: Problem, unit: UnitCost, point: int) -> int:
    """Return the bytes of a unit's residuals at a point of its curve, all chunks."""
    return problem.num_microbatches * align(unit.points[point].residual_bytes)


def buffer_bytes(unit: UnitCost, plan: UnitPlan) -> int:
    """Return the bytes of the update buffer that a unit needs: its states, and its grads where they come with them."""
    return align(unit.state_bytes) + (align(unit.grad_bytes) if plan.grads == HOST else 0)


def moved_bytes(problem: Problem, unit: UnitCost, plan: UnitPlan, places: tuple[str, ...]) -> list[int]:
    """Return the sizes of boundary and residuals (those of the two that wait in one of `places`), all chunks."""
    sizes = []
    if plan.boundary in places:
        sizes.append(boundary_bytes(problem, unit))
    if plan.residuals in places:
        sizes.append(residual_bytes(problem, unit, plan.residual_point))
    return sizes


def account(problem: Problem, plan: Plan) -> Usage:
    """Return the bytes that a plan needs in each tier (the head of this file has the formula)."""
    always = _device_always(problem, plan)
    device = tuple((name, always + num_bytes) for name, num_bytes in _device_positions(problem, plan))
    nvme = _nvme_files(problem, plan)
    return Usage(device, _host(problem, plan), sum(nvme) + NUM_WRITERS * max(nvme, default=0))


def find_shortage(problem: Problem, usage: Usage) -> dict[str, int]:
    """Return tier -> missing bytes for every tier that is too small; empty when the plan fits.

    Where the device is the host's own RAM, its peak counts in the host's budget too.
    """
    hardware = problem.hardware
    host = usage.host_bytes + (usage.device_peak_bytes if problem.device_is_host else 0)
    missing = {
        "device": usage.device_peak_bytes - hardware.device_memory_bytes,
        "host": host - hardware.host_memory_bytes,
        "nvme": usage.nvme_bytes - (hardware.nvme_bytes if problem.allow_nvme else 0),
    }
    return {tier: num_bytes for tier, num_bytes in missing.items() if num_bytes > 0}


def _pairs(problem: Problem, plan: Plan) -> list[tuple[UnitCost, UnitPlan]]:
    return list(zip(problem.units, plan.units, strict=True))


def _device_always(problem: Problem, plan: Plan) -> int:
    pairs = _pairs(problem, plan)
    resident = sum(align(u.weight_bytes) for u, p in pairs if p.weights == DEVICE)
    resident += sum(align(u.state_bytes) for u, p in pairs if p.states == DEVICE)
    streamed = [align(u.weight_bytes) for u, p in pairs if p.is_streamed and u.num_params]
    visiting = [buffer_bytes(u, p) for u, p in pairs if p.moves_states and u.num_params]
    fetched = [sum(moved_bytes(problem, u, p, (HOST, NVME))) for u, p in pairs]
    grads = [align(u.grad_bytes) for u, p in pairs[1:-1] if p.grads == HOST]
    edge_grads = sum(align(u.grad_bytes) for u, p in (pairs[0], pairs[-1]) if p.grads == HOST)
    return (
        resident
        + min(plan.prefetch_depth, len(streamed)) * max(streamed, default=0)
        + min(NUM_RING_BUFFERS, len(visiting)) * max(visiting, default=0)
        + NUM_RING_BUFFERS * (max(fetched) + max(grads, default=0))
        + edge_grads
    )


def _device_positions(problem: Problem, plan: Plan) -> Iterator[tuple[str, int]]:
    pairs = _pairs(problem, plan)
    blocks, (head, _) = pairs[1:-1], pairs[-1]
    num = problem.num_microbatches
    waiting = sum(align(u.grad_bytes) for u, p in pairs if p.grads == DEVICE)
    offload = max((sum(moved_bytes(problem, u, p, (HOST, NVME))) for u, p in blocks), default=0)
    kept = 0

    yield "embed", waiting + boundary_bytes(problem, pairs[1][0]) + problem.embed.points[0].workspace_bytes
    waiting -= _kept_grads(pairs[0])
    for i, (unit, plan_i) in enumerate(blocks):
        own = boundary_bytes(problem, unit) + boundary_bytes(problem, problem.units[i + 2])
        own += residual_bytes(problem, unit, plan_i.residual_point) + unit.points[plan_i.residual_point].workspace_bytes
        yield f"forward {unit.name}", waiting + kept + own + offload
        waiting -= _kept_grads((unit, plan_i))
        kept += _kept_bytes(problem, unit, plan_i)

    edge = _kept_grads(pairs[-1])  # the old ones until their update, then the new ones
    waiting -= edge
    tied = sum_bytes(problem.embed) if problem.tied else 0
    one_more = align(head.boundary_bytes)
    own = boundary_bytes(problem, head) + one_more + head.points[0].workspace_bytes + sum_bytes(head)
    yield "head", kept + own + edge + tied + NUM_RING_BUFFERS * offload

    for i, (unit, plan_i) in reversed(list(enumerate(blocks))):
        waiting += _kept_grads((unit, plan_i))
        cotangent = max(align(unit.boundary_bytes), align(problem.units[i + 2].boundary_bytes))
        own = num * cotangent + align(unit.boundary_bytes) + unit.points[plan_i.residual_point].workspace_bytes
        yield f"backward {unit.name}", waiting + kept + own + chunk_sum_bytes(problem, unit) + edge + tied
        kept -= _kept_bytes(problem, unit, plan_i)

    embed, embed_plan = pairs[0]
    own = boundary_bytes(problem, pairs[1][0]) + embed.points[0].workspace_bytes + _kept_grads((embed, embed_plan))
    yield "embed backward", waiting + own + edge + sum_bytes(embed)


def _kept_grads(pair: tuple[UnitCost, UnitPlan]) -> int:
    return align(pair[0].grad_bytes) if pair[1].grads == DEVICE else 0


def _kept_bytes(problem: Problem, unit: UnitCost, plan: UnitPlan) -> int:
    return sum(moved_bytes(problem, unit, plan, (DEVICE,)))


def _host(problem: Problem, plan: Plan) -> int:
    total = 0
    for unit, decisions in _pairs(problem, plan):
        if decisions.weights == HOST or (decisions.weights == DEVICE and decisions.update == CPU):
            total += align(unit.weight_bytes)
        if decisions.states == HOST:
            total += align(unit.state_bytes)
        if decisions.grads == HOST:
            total += align(unit.grad_bytes)
        total += sum(moved_bytes(problem, unit, decisions, (HOST,)))
    return total + _nvme_staging(problem, plan)


def _nvme_staging(problem: Problem, plan: Plan) -> int:
    pairs = _pairs(problem, plan)

    def largest(size: Callable[[UnitCost], int], wanted: Callable[[UnitPlan], bool]) -> int:
        return max((align(size(u)) for u, p in pairs if wanted(p)), default=0)

    weights: Callable[[UnitCost], int] = lambda u: u.weight_bytes  # noqa: E731
    states: Callable[[UnitCost], int] = lambda u: u.state_bytes  # noqa: E731
    packs = [max(moved_bytes(problem, u, p, (NVME,)), default=0) for u, p in pairs]
    return (
        plan.prefetch_depth * largest(weights, lambda p: p.weights == NVME)
        + largest(weights, lambda p: p.weights == NVME and p.update == CPU)
        + largest(states, lambda p: p.states == NVME and p.update == CPU)
        + NUM_RING_BUFFERS * largest(weights, lambda p: p.weights == NVME and p.update == DEVICE)
        + 2 * NUM_RING_BUFFERS * largest(states, lambda p: p.states == NVME and p.update == DEVICE)
        + 2 * NUM_RING_BUFFERS * max(packs)
    )


def _nvme_files(problem: Problem, plan: Plan) -> list[int]:
    sizes = []
    for unit, decisions in _pairs(problem, plan):
        if decisions.weights == NVME:
            sizes.append(align(unit.weight_bytes))
        if decisions.states == NVME:
            sizes.append(align(unit.state_bytes))
        sizes += moved_bytes(problem, unit, decisions, (NVME,))
    return sizes
