"""What must not change an answer does not: units, names, order of seeds; and what is better never makes it worse.

`LAZYTRAIN_INSTANCES=240` tries that many instances instead of the few that are fast.
"""

import os
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Hardware, Problem, ResidualPoint, UnitCost
from lazytrain.solver.simulator import simulate_step_ms
from lazytrain.solver.toys import make_toy_problem

AGREEMENT = 1e-6  # relative, of one plan's step
SEARCH_NOISE = 0.01  # relative, of an answer that is not proven to be the best
NUM_INSTANCES = int(os.environ.get("LAZYTRAIN_INSTANCES", "20"))
NUM_SEARCHED = max(5, NUM_INSTANCES // 10)
FIRST_SEED = 9000
GENEROUS_S = 60.0
ALIGN_BYTES = 512
BYTES_OF_UNIT = ("num_params", "weight_bytes", "state_bytes", "grad_bytes", "boundary_bytes")
BYTES_OF_POINT = ("residual_bytes", "workspace_bytes")
BYTES_OF_HARDWARE = ("device_memory_bytes", "host_memory_bytes", "nvme_bytes")
LINK = ("h2d_gbs", "d2h_gbs", "quiet_link_gbs")
NVME_RATES = ("nvme_read_gbs", "nvme_write_gbs")
RATES = (*LINK, *NVME_RATES, "dram_gbs")
Change = Callable[[Problem], Problem]


def make_small(seed: int) -> Problem:
    """Return a problem whose event times are solved for."""
    return _align(make_toy_problem(FIRST_SEED + seed, num_blocks=1 + seed % 2, allow_nvme=seed % 8 == 5))


def make_searched(seed: int) -> Problem:
    """Return a problem with so many blocks that the answer is searched for."""
    return _align(make_toy_problem(FIRST_SEED + seed, num_blocks=10 + seed % 3, num_points=3))


def _align(problem: Problem) -> Problem:
    """Return a problem whose sizes are multiples of what they are rounded up to."""
    return _map_sizes(problem, lambda size: -(-size // ALIGN_BYTES) * ALIGN_BYTES)


def _map_sizes(problem: Problem, change: Callable[[int], int]) -> Problem:
    def point(old: ResidualPoint) -> ResidualPoint:
        return replace(old, **{name: change(getattr(old, name)) for name in BYTES_OF_POINT})

    def unit(old: UnitCost) -> UnitCost:
        sizes = {name: change(getattr(old, name)) for name in BYTES_OF_UNIT}
        return replace(old, points=tuple(map(point, old.points)), **sizes)

    return _map_units(problem, unit)


def _map_units(problem: Problem, change: Callable[[UnitCost], UnitCost]) -> Problem:
    blocks = tuple(map(change, problem.blocks))
    return replace(problem, embed=change(problem.embed), blocks=blocks, head=change(problem.head))


def _scale_hardware(problem: Problem, factor: float, *names: str) -> Problem:
    hardware = problem.hardware
    scaled = {name: type(getattr(hardware, name))(getattr(hardware, name) * factor) for name in names}
    return replace(problem, hardware=replace(hardware, **scaled))


def scale_bytes(problem: Problem, factor: int) -> Problem:
    """Return the same problem with every size and every rate that many times as large."""
    return _scale_hardware(_map_sizes(problem, lambda size: factor * size), factor, *BYTES_OF_HARDWARE, *RATES)


def scale_times(problem: Problem, factor: float) -> Problem:
    """Return the same problem with everything that many times as slow."""
    slow = scale_compute(problem, factor)
    return _scale_hardware(_scale_hardware(slow, 1 / factor, *RATES), factor, "copy_latency_ms")


def scale_compute(problem: Problem, factor: float) -> Problem:
    """Return the problem with other times of compute and updates."""

    def unit(old: UnitCost) -> UnitCost:
        points = tuple(
            replace(p, forward_ms=factor * p.forward_ms, backward_ms=factor * p.backward_ms) for p in old.points
        )
        times = {name: factor * getattr(old, name) for name in ("cpu_update_ms", "device_update_ms")}
        return replace(old, points=points, **times)

    return _map_units(problem, unit)


def rename(problem: Problem) -> Problem:
    """Return the problem with other names of model, machine and blocks."""
    count = len(problem.blocks)
    blocks = tuple(replace(block, name=f"{count - i}-th") for i, block in enumerate(problem.blocks))
    return replace(problem, model="other", blocks=blocks, hardware=replace(problem.hardware, name="other"))


RESCALED: dict[str, tuple[Change, float]] = {
    "names": (rename, 1.0),
    "bytes x 4": (lambda problem: scale_bytes(problem, 4), 1.0),
    "bytes x 3": (lambda problem: scale_bytes(problem, 3), 1.0),
    "times x 8": (lambda problem: scale_times(problem, 8.0), 8.0),
    "times x 0.1": (lambda problem: scale_times(problem, 0.1), 0.1),
}
BETTER: dict[str, Change] = {
    "device memory": lambda problem: _scale_hardware(problem, 1.2, "device_memory_bytes"),
    "host memory": lambda problem: _scale_hardware(problem, 1.5, "host_memory_bytes"),
    "link": lambda problem: _scale_hardware(problem, 1.5, *LINK),
    "compute": lambda problem: scale_compute(problem, 0.8),
    "DRAM": lambda problem: _scale_hardware(problem, 2.0, "dram_gbs"),
}


def solve_ms(problem: Problem) -> float | None:
    plan = solve(problem, gap=0.0, time_limit_s=GENEROUS_S).plan
    assert plan is None or plan.predicted is not None
    return None if plan is None else plan.predicted.step_ms  # type: ignore[union-attr]


def check_rescaled(problem: Problem, what: str, tolerance: float) -> None:
    change, factor = RESCALED[what]
    changed = change(problem)
    for baseline in list_baselines(problem, num_random=2, with_greedy=False):
        step_ms = simulate_step_ms(changed, replace(baseline.plan, problem_digest=changed.digest))
        assert step_ms == pytest.approx(factor * baseline.step_ms, rel=AGREEMENT)
    before_ms, after_ms = solve_ms(problem), solve_ms(changed)
    if before_ms is None:
        assert after_ms is None
    else:
        assert after_ms == pytest.approx(factor * before_ms, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_units_and_names_change_nothing(seed: int) -> None:
    check_rescaled(make_small(seed), list(RESCALED)[seed % len(RESCALED)], AGREEMENT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEARCHED))
def test_units_and_names_change_a_search_by_no_more_than_its_noise(seed: int) -> None:
    check_rescaled(make_searched(seed), list(RESCALED)[seed % len(RESCALED)], SEARCH_NOISE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_a_better_machine_is_never_slower(seed: int) -> None:
    check_better(make_small(seed), list(BETTER)[seed % len(BETTER)], AGREEMENT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEARCHED))
def test_a_better_machine_is_never_slower_beyond_the_noise_of_a_search(seed: int) -> None:
    check_better(make_searched(seed), list(BETTER)[seed % len(BETTER)], SEARCH_NOISE)


def check_better(problem: Problem, what: str, tolerance: float) -> None:
    before_ms, after_ms = solve_ms(problem), solve_ms(BETTER[what](problem))
    if before_ms is not None:
        assert after_ms is not None
        assert after_ms <= before_ms * (1 + tolerance)


def test_every_size_and_rate_is_scaled() -> None:
    sizes = {f.name for f in fields(Hardware) if f.name.endswith("_bytes")}
    rates = {f.name for f in fields(Hardware) if f.name.endswith("_gbs")} - {"device_memory_gbs"}  # not in the model
    assert sizes == set(BYTES_OF_HARDWARE)
    assert rates == set(RATES)
    assert {f.name for f in fields(UnitCost) if f.name.endswith("_bytes")} <= set(BYTES_OF_UNIT)
    assert {f.name for f in fields(ResidualPoint) if f.name.endswith("_bytes")} == set(BYTES_OF_POINT)
