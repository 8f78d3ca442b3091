"""The field's fixed heuristic: every block streams, every few boundaries are kept, the rest is computed twice more.

In backward each run of blocks is computed again from its kept boundary, to regain the boundaries between, and then each
block once more for its gradient. No search proposes such a plan; it is there to measure what planning gains.
"""

from collections.abc import Iterator
from itertools import product

from lazytrain.solver.choices import list_lanes, make_unit_plan
from lazytrain.solver.memory import Accountant
from lazytrain.solver.plan import DEVICE, NONE, Plan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate_step_ms


def make_fixed_interval_plan(problem: Problem, interval: int) -> Plan | None:
    """Return the fastest plan by the heuristic, None where none fits; what it leaves open is tried.

    Open are where the update runs (for all blocks alike), where embed and head live, and the prefetch depth.

    Args:
        interval: every so many blocks the boundary is kept, on the device.
    """
    fits = Accountant(problem).fits
    plans = [plan for plan in _list_plans(problem, interval) if fits(plan)]
    return min(plans, key=lambda plan: simulate_step_ms(problem, plan), default=None)


def fits_fixed_interval(problem: Problem, interval: int) -> bool:
    """Return whether a plan by the heuristic fits."""
    return any(map(Accountant(problem).fits, _list_plans(problem, interval)))


def _list_plans(problem: Problem, interval: int) -> Iterator[Plan]:
    last = len(problem.units) - 1
    blocks = [u for u in range(1, last) if problem.units[u].num_params]
    lanes = [lane for lane in list_lanes(problem, blocks[0] if blocks else 1) if lane.is_streamed or not blocks]
    for lane, embed, head in product(lanes, list_lanes(problem, 0), list_lanes(problem, last)):
        units = [make_unit_plan(lane, boundary=NONE if i % interval else DEVICE) for i in range(len(problem.blocks))]
        for depth in problem.prefetch_depths:
            yield make_plan(problem, [make_unit_plan(embed), *units, make_unit_plan(head)], depth)
