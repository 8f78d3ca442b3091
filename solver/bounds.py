"""What no plan can beat, and about how the best plans are mixed: sums over all blocks, without the order of events.

Blocks of equal costs are counted, not told apart: an integer says how many of them take each option. A step then is at
least as long as each queue is busy, and as its two phases are (A: from the norm to the head; B: head and backward):

    T >= each queue, DRAM, NVMe       T >= A + B
    A >= forward and device updates, after what they wait for;  all CPU updates, and the last one's load and forward;
         forward's loads but the early ones;  its copies out but a few;  DRAM, with what moves in it
    B >= head and backward;  reloads and fetches but two;  head and stores of grads but two

Memory is counted at the positions where most is kept or most grads wait. Every row is a relaxation of one that the
simulator, or `memory.account`, obeys, so that the optimum bounds all plans of a prefetch depth; tests hold that.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lazytrain.solver.backends import Limits, solve_model
from lazytrain.solver.bound_memory import Group, add_memory
from lazytrain.solver.bound_times import add_times
from lazytrain.solver.choices import RECOMPUTE, Keep, Lane, list_boundaries, list_keeps, list_lanes
from lazytrain.solver.decisions import UnitChoice
from lazytrain.solver.draft import Draft, Scale, add_edges, pick_ring
from lazytrain.solver.linear import Affine, LinearModel, total
from lazytrain.solver.plan import DEVICE, NONE, NVME
from lazytrain.solver.problem import Problem
from lazytrain.solver.traffic import add_traffic

LEAST_S = 0.05  # solvers want some
LIMITS = Limits(time_s=5.0, gap=5e-4, num_nodes=1000)
ANY_GAP = 1e9  # the first point will do


class Kind(NamedTuple):
    """Units of equal costs: their positions, and how many of them take each option (0 is left out)."""

    members: tuple[int, ...]
    lanes: tuple[tuple[Lane, int], ...]
    keeps: tuple[tuple[Keep, int], ...]
    boundaries: tuple[tuple[str, int], ...]


class Bound(NamedTuple):
    """A lower bound of the step of every plan with a prefetch depth, and the mix of decisions that attains it.

    bound_ms: infinite where nothing fits. mix: embed, kinds of blocks, head; empty without a solution. The mix need not
    fit in any order, since positions were left out.
    """

    bound_ms: float
    mix: tuple[Kind, ...]


def bound_step(problem: Problem, prefetch_depth: int, *, solver: str = "scip", time_s: float = LIMITS.time_s) -> Bound:
    """Return the bound for one prefetch depth, with the mix that was best after `time_s` at most.

    Raises:
        SolverUnavailableError: the solver is not installed or broke down.
    """
    kinds = _group_units(problem)
    draft = _start(problem, kinds, prefetch_depth)
    add_times(draft, kinds)
    add_traffic(draft)
    add_memory(draft, kinds)
    limits = LIMITS._replace(time_s=max(min(time_s, LIMITS.time_s), LEAST_S))
    outcome = solve_model(draft.model, limits, solver=solver)
    if outcome.status == "infeasible":
        return Bound(float("inf"), ())
    x = outcome.x
    if x is None:
        return Bound(max(0.0, outcome.bound), ())

    def read(options: tuple) -> tuple:  # type: ignore[type-arg]
        counts = [(option, round(count.value(x))) for option, count in options]
        return tuple((option, count) for option, count in counts if count)

    mix = tuple(
        Kind(kind.members, read(choice.lanes), read(choice.keeps), read(choice.boundaries))
        for kind, choice in zip(kinds, draft.choices, strict=True)
    )
    return Bound(max(0.0, outcome.bound), mix)


def may_fit(problem: Problem, prefetch_depth: int, *, solver: str = "scip", time_s: float = LIMITS.time_s) -> bool:
    """Return whether the rows of memory leave any mix of decisions, boundaries that are computed again among them.

    A mix that they leave need not fit in any order.

    Raises:
        SolverUnavailableError: the solver is not installed or broke down.
    """
    kinds = _group_units(problem)
    draft = _start(problem, kinds, prefetch_depth, may_drop=True)
    add_memory(draft, kinds)
    limits = LIMITS._replace(time_s=time_s, gap=ANY_GAP)
    return solve_model(draft.model, limits, solver=solver).status != "infeasible"


def _group_units(problem: Problem) -> list[Group]:
    """Return embed, the kinds of blocks and head."""
    members: dict[Hashable, list[int]] = {}
    last = len(problem.units) - 1
    for u, unit in enumerate(problem.units):
        costs = tuple(getattr(unit, name) for name in unit.__dataclass_fields__ if name != "name")
        members.setdefault(u if u in (0, last) else costs, []).append(u)
    kinds = sorted(members.values(), key=lambda where: (where[0] == last, where[0]))
    return [Group(problem.units[where[0]], tuple(where)) for where in kinds]


def _start(problem: Problem, kinds: Sequence[Group], depth: int, *, may_drop: bool = False) -> Draft:
    model, last = LinearModel(), len(kinds) - 1
    period = model.add_var()
    model.objective = next(iter(period.terms))
    choices = []
    for k, kind in enumerate(kinds):
        is_edge, count = k in (0, last), len(kind.members)

        def pick(options: tuple, count: int = count) -> tuple:  # type: ignore[type-arg]
            if len(options) == 1:
                return ((options[0], Affine(constant=float(count))),)
            picks = tuple((option, model.add_var(upper=float(count), integer=True)) for option in options)
            model.add_equal(total(var for _, var in picks), float(count))
            return picks

        lanes = pick(list_lanes(problem, kind.members[0]))
        keeps = pick((RECOMPUTE,) if is_edge else list_keeps(problem, kind.unit))
        places = (*list_boundaries(problem), NONE) if may_drop else list_boundaries(problem)
        choices.append(UnitChoice(lanes, keeps, pick((DEVICE,) if is_edge else places)))
    edges = add_edges(model, choices)
    streamed = pick_ring(choices, lambda lane: lane.is_streamed)
    on_device = pick_ring(choices, lambda lane: lane.is_streamed and lane.update == DEVICE)
    nvme = pick_ring(choices, lambda lane: lane.weights == NVME)
    nvme_on_device = pick_ring(choices, lambda lane: lane.weights == NVME and lane.update == DEVICE)

    def beyond(users: Sequence[Affine]) -> tuple[Affine, ...]:
        """Add how many users of each kind are not among the `depth` that slots hold already."""
        counts = tuple(Affine() if user.is_zero else model.add_var() for user in users)
        if any(count.terms for count in counts):
            model.add_at_least(total(counts), total(users) - float(depth))
        return counts

    return Draft(
        problem=replace(problem, blocks=tuple(kind.unit for kind in kinds[1:-1])),
        prefetch_depth=depth,
        scale=Scale(),
        horizon=0.0,
        model=model,
        choices=tuple(choices),
        period=period,
        streamed=streamed,
        visiting=tuple(c.lane(lambda lane: lane.moves_states) for c in choices),
        num_slots=(),
        num_buffers=(),
        edges=edges._replace(early=Affine()),  # all loads count, whenever they are
        first_load=edges.with_loads(beyond(on_device)),
        second_load=beyond(streamed),
        nvme_loads=tuple(zip(beyond(nvme_on_device), beyond(nvme), strict=True)),
        early=((Affine(), Affine()),) * (last + 1),
    )
