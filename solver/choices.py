"""The decisions that a plan may take for one unit, as lists to choose one of each from.

A *lane* says where weights, states and grads live and where the update runs; a *keep* says what forward keeps and
where; the third choice is the boundary's place. The three are independent of each other but for the budgets.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from lazytrain.solver.plan import CPU, DEVICE, HOST, NONE, NVME, UnitPlan, list_weight_places
from lazytrain.solver.problem import Problem, UnitCost


class Lane(NamedTuple):
    """Where weights, states and grads live, and where the update runs."""

    weights: str
    states: str
    update: str
    grads: str

    @property
    def is_streamed(self) -> bool:
        """Return whether the weights come through slots."""
        return self.weights != DEVICE

    @property
    def moves_states(self) -> bool:
        """Return whether states visit the device for the update."""
        return self.update == DEVICE and self.states != DEVICE


class Keep(NamedTuple):
    """A point of the residual curve, and where its residuals wait."""

    point: int
    place: str


RESIDENT = Lane(DEVICE, DEVICE, DEVICE, DEVICE)
RECOMPUTE = Keep(0, NONE)


def list_lanes(problem: Problem, u: int) -> tuple[Lane, ...]:
    """Return every consistent lane of unit u, counted in forward order."""
    if problem.units[u].num_params == 0:
        return (RESIDENT,)
    far = (HOST, NVME) if problem.allow_nvme else (HOST,)
    choices = product(list_weight_places(problem, u), (DEVICE, *far), (DEVICE, CPU), (DEVICE, HOST))
    lanes = []
    for lane in (Lane(*parts) for parts in choices):
        allowed = problem.allow_cpu_update if lane.update == CPU else problem.allow_device_update
        # Weights are read more often than states and are smaller: they are never the ones to go to NVMe alone.
        odd = lane.weights == NVME and lane.states == HOST
        if allowed and not odd and UnitPlan(**lane._asdict()).contradiction() is None:
            lanes.append(lane)
    return tuple(lanes)


def list_keeps(problem: Problem, unit: UnitCost) -> tuple[Keep, ...]:
    """Return recompute, and every point that no other beats in bytes, times and workspace, at every place."""
    keeps = [RECOMPUTE]
    if problem.allow_residuals:
        for point in range(1, len(unit.points)):
            if not _is_beaten(unit, point):
                keeps += [Keep(point, place) for place in _places(problem)]
    return tuple(keeps)


def list_hull_keeps(problem: Problem, unit: UnitCost) -> tuple[Keep, ...]:
    """Return the keeps whose points lie on the lower hull of (bytes, forward + backward time).

    A point above the line between two others is about as good as a mix of those two over a few blocks.
    """

    def at(index: int) -> tuple[int, float]:
        point = unit.points[index]
        return point.residual_bytes, point.forward_ms + point.backward_ms

    hull: list[int] = []
    for index in sorted({keep.point for keep in list_keeps(problem, unit)}, key=at):
        while len(hull) > 1 and _is_above(at(hull[-2]), at(hull[-1]), at(index)):
            hull.pop()
        hull.append(index)
    return tuple(keep for keep in list_keeps(problem, unit) if keep.point in hull or keep == RECOMPUTE)


def list_boundaries(problem: Problem) -> tuple[str, ...]:
    """Return where a block's input may wait."""
    return _places(problem)


def list_block_plans(problem: Problem, block_idx: int) -> Iterator[UnitPlan]:
    """Yield every combination of decisions for one block."""
    lanes, keeps = list_lanes(problem, block_idx + 1), list_keeps(problem, problem.blocks[block_idx])
    for lane, keep, boundary in product(lanes, keeps, list_boundaries(problem)):
        yield make_unit_plan(lane, keep, boundary)


class Options(NamedTuple):
    """The choices of one unit; no keeps and boundaries for embed and head."""

    lanes: tuple[Lane, ...]
    keeps: tuple[Keep, ...]
    boundaries: tuple[str, ...]


def list_options(problem: Problem, u: int, *, wide: bool = False) -> Options:
    """Return what a search tries for unit u: every lane, and keeps on the hull; `wide`: all keeps."""
    lanes = list_lanes(problem, u)
    if u in (0, len(problem.units) - 1):
        return Options(lanes, (), ())
    list_some = list_keeps if wide else list_hull_keeps
    return Options(lanes, list_some(problem, problem.units[u]), list_boundaries(problem))


def list_neighbours(options: Options, before: UnitPlan) -> Iterator[UnitPlan]:
    """Yield the decisions that differ from `before` in one choice."""
    lane = Lane(before.weights, before.states, before.update, before.grads)
    keep = Keep(before.residual_point, before.residuals)
    for other in options.lanes:
        if other != lane:
            yield make_unit_plan(other, keep, before.boundary)
    for other_keep in options.keeps:
        if other_keep != keep:
            yield make_unit_plan(lane, other_keep, before.boundary)
    for place in options.boundaries:
        if place != before.boundary:
            yield make_unit_plan(lane, keep, place)


@cache  # equal decisions are then one object, which is quick to compare
def make_unit_plan(lane: Lane, keep: Keep = RECOMPUTE, boundary: str = DEVICE) -> UnitPlan:
    """Return the three choices as a unit's decisions."""
    return UnitPlan(**lane._asdict(), residual_point=keep.point, residuals=keep.place, boundary=boundary)


def intern_units(units: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
    """Return the same decisions as the objects that `make_unit_plan` gives for them."""
    return tuple(
        make_unit_plan(
            Lane(unit.weights, unit.states, unit.update, unit.grads),
            Keep(unit.residual_point, unit.residuals),
            unit.boundary,
        )
        for unit in units
    )


def _places(problem: Problem) -> tuple[str, ...]:
    return (DEVICE, HOST, NVME) if problem.allow_nvme else (DEVICE, HOST)


def _is_above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Return whether b lies on or above the line from a to c (x grows from a to c)."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _is_beaten(unit: UnitCost, index: int) -> bool:
    def key(i: int) -> tuple[float, ...]:
        point = unit.points[i]
        return point.residual_bytes, point.forward_ms, point.backward_ms, point.workspace_bytes

    mine = key(index)
    others = ((i, key(i)) for i in range(len(unit.points)) if i != index)
    return any(all(a <= b for a, b in zip(other, mine)) and (other != mine or i < index) for i, other in others)
