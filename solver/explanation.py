"""A plan as text: one row per run of equal blocks, use per tier, speed, and the baselines beside it."""

from collections.abc import Iterator, Mapping, Sequence

from lazytrain.solver.baselines import Baseline
from lazytrain.solver.capacity import LargestBatch
from lazytrain.solver.memory import account
from lazytrain.solver.plan import Plan, UnitPlan, find_runs
from lazytrain.solver.problem import Problem, UnitCost
from lazytrain.solver.simulator import Simulation, simulate
from lazytrain.solver.sizes import format_size

COLUMNS = ("unit", "weights", "states", "update", "grads", "keeps", "residuals", "boundary")
NUM_FULLEST = 3


def format_plan(problem: Problem, plan: Plan) -> str:
    """Return the plan as a table, one row per run of equal neighbours, with a line of totals above it."""
    head = (
        f"plan for {problem.model} on {problem.hardware.name}"
        f"{' (estimated)' if problem.hardware.is_estimate else ''}: {plan.num_microbatches} microbatch(es), "
        f"{plan.prefetch_depth} weight slots; {_origin(plan)}"
    )
    return "\n".join([head, *_table([COLUMNS, *_rows(problem, plan)])])


def format_prediction(problem: Problem, plan: Plan, simulation: Simulation | None = None) -> str:
    """Return expected speed, use per tier and what binds."""
    played = simulation or simulate(problem, plan)
    seconds = played.step_ms / 1e3
    usage = account(problem, plan)
    hardware = problem.hardware
    speed = f"expected step: {played.step_ms:.1f} ms, {problem.tokens_per_step / seconds:,.0f} tokens/s"
    if problem.train_flops:
        speed += f", {problem.train_flops / seconds / 1e12:.1f} TFLOP/s"
    tiers = [
        f"device {_of(played.device_peak_bytes, hardware.device_memory_bytes)} (peak at {usage.device_peak_at})",
        f"host {_of(played.host_bytes, hardware.host_memory_bytes)}",
    ]
    if problem.allow_nvme:
        tiers.append(f"NVMe {_of(played.nvme_bytes, hardware.nvme_bytes)}")
    return f"{speed}\nuse: {', '.join(tiers)}\nbound by: {played.bound_by}"


def format_baselines(baselines: Sequence[Baseline], step_ms: float) -> str:
    """Return the baselines' simulated steps beside the plan's, the fastest first."""
    rows = [("plan", "step ms", "against this plan"), ("this plan", f"{step_ms:.1f}", "1.00")]
    rows += [(b.name, f"{b.step_ms:.1f}", f"{b.step_ms / step_ms:.2f}") for b in baselines]
    return "\n".join(_table(rows))


def format_screening(screened: Mapping[int, float | None]) -> str:
    """Return the numbers of microbatches that were looked at, and the step of the best simple baseline with each."""
    steps = (f"{count}: {'does not fit' if ms is None else f'{ms:.1f} ms'}" for count, ms in screened.items())
    return f"microbatches, best simple baseline with each: {', '.join(steps)}"


def format_largest_batch(largest: LargestBatch) -> str:
    """Return the largest batch that fits beside those of the fixed strategies."""
    rows = [("plan", "largest batch"), ("solved", str(largest.batch))]
    rows += sorted(((name, str(size)) for name, size in largest.strategies.items()), key=lambda row: -int(row[1]))
    proof = "proven: no larger one fits" if largest.bound == largest.batch else f"none above {largest.bound} can fit"
    return "\n".join([*_table(rows), proof])


def format_load(problem: Problem, plan: Plan, simulation: Simulation) -> str:
    """Return how much of a step each queue is busy, and the positions at which the device is fullest."""
    shares = [(ms / simulation.step_ms, queue) for queue, ms in simulation.busy_ms.items() if ms]
    busy = ", ".join(f"{queue} {share:.0%}" for share, queue in sorted(shares, reverse=True))
    fullest = sorted(account(problem, plan).device, key=lambda item: -item[1])[:NUM_FULLEST]
    places = ", ".join(f"{name} {format_size(num_bytes)}" for name, num_bytes in fullest)
    return f"busy: {busy}\nfullest: {places}"


def format_gains(gains_ms: Mapping[str, float]) -> str:
    """Return what one more GiB would bring on each tier."""
    return "one more GiB: " + ", ".join(f"{tier} {-gain_ms:+.1f} ms" for tier, gain_ms in gains_ms.items())


def _rows(problem: Problem, plan: Plan) -> Iterator[tuple[str, ...]]:
    yield _row("embed", problem.embed, plan.embed)
    for first, last, decisions in find_runs(plan.blocks):
        name = f"block {first}" if first == last else f"blocks {first}-{last}"
        yield _row(name, problem.blocks[first], decisions)
    yield _row("head", problem.head, plan.head)


def _row(name: str, cost: UnitCost, unit: UnitPlan) -> tuple[str, ...]:
    kept = cost.points[unit.residual_point].residual_bytes
    keeps = f"{format_size(kept)} a chunk" if unit.residual_point else "recompute"
    return name, unit.weights, unit.states, unit.update, unit.grads, keeps, unit.residuals, unit.boundary


def _origin(plan: Plan) -> str:
    source = plan.solver.get("source", "given")
    gap = plan.solver.get("gap")
    return f"{source}, no plan can be more than {gap:.1%} faster" if isinstance(gap, float) else str(source)


def _of(used: int, budget: int) -> str:
    return f"{format_size(used)} of {format_size(budget)}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
