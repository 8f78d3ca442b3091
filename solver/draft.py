"""A MILP under construction: what timing, spilling and budget rows share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lazytrain.solver.choices import Lane
from lazytrain.solver.decisions import UnitChoice, add_choices
from lazytrain.solver.linear import Affine, LinearModel, total
from lazytrain.solver.memory import NUM_RING_BUFFERS
from lazytrain.solver.plan import DEVICE, HOST, NVME
from lazytrain.solver.problem import Problem
from lazytrain.solver.rings import add_both, add_counters, add_counts, add_product


class Scale(NamedTuple):
    """The model's units: the bytes and the ms that count as 1."""

    size_bytes: float = float(1 << 30)
    time_ms: float = 1.0


class Edges(NamedTuple):
    """Embed and head where they are streamed, each through the slot in which it may find the other.

    Attributes:
        embed, head: its weights come through the slot; both: both do.
        load_embed, load_head: it is updated on the device, and the other one has overwritten it.
        early: the embed's weights are loaded before the norm, with what its update needs.
    """

    embed: Affine
    head: Affine
    both: Affine
    load_embed: Affine
    load_head: Affine
    early: Affine

    def with_loads(self, loads: Sequence[Affine]) -> tuple[Affine, ...]:
        """Return the first loads of all units."""
        return (self.load_embed, *loads[1:-1], self.load_head)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The parts' common ground. Lists are per unit, in forward order; an entry is 1 where its name says so.

    Attributes:
        horizon: an upper bound of the period, in the model's unit of time.
        period: T, what is minimised.
        streamed, visiting: weights come through the ring of slots (0 for embed and head); states visit the device.
        edges: embed and head, which share a slot.
        num_slots, num_buffers: entry m - 1 is 1 where the plan has at least m weight slots, m update buffers.
        first_load: weights of a streamed unit that is updated on the device must come: a block isn't among the first P,
            or embed and head share their slot.
        second_load: a streamed block isn't among the last P: its weights must come again for backward.
        nvme_loads: the same two, where the weights come from NVMe.
        early: what an update needs is loaded before the norm, without and with the unit's grads.
    """

    problem: Problem
    prefetch_depth: int
    scale: Scale
    horizon: float
    model: LinearModel
    choices: tuple[UnitChoice, ...]
    period: Affine
    streamed: tuple[Affine, ...]
    visiting: tuple[Affine, ...]
    edges: Edges
    num_slots: tuple[Affine, ...]
    num_buffers: tuple[Affine, ...]
    first_load: tuple[Affine, ...]
    second_load: tuple[Affine, ...]
    nvme_loads: tuple[tuple[Affine, Affine], ...]
    early: tuple[tuple[Affine, Affine], ...]

    def ms(self, value: float) -> float:
        """Return a time in the model's unit."""
        return value / self.scale.time_ms

    def size(self, num_bytes: float) -> float:
        """Return a size in the model's unit."""
        return num_bytes / self.scale.size_bytes


def start_draft(
    problem: Problem, *, prefetch_depth: int, horizon_ms: float, period: int | None, scale: Scale | None
) -> Draft:
    """Add binaries, T, and who is streamed first and last (see `milp.build_milp` for the arguments)."""
    scale = scale or Scale()
    model = LinearModel()
    horizon = horizon_ms / scale.time_ms
    period_var = model.add_var(upper=horizon)
    model.objective = next(iter(period_var.terms))
    choices = add_choices(model, problem, period=period)
    has_params = [unit.num_params > 0 for unit in problem.units]
    streamed = pick_ring(choices, lambda lane: lane.is_streamed)
    visiting = tuple(c.lane(lambda lane: lane.moves_states) for c in choices)
    assert all(has or (s.is_zero and v.is_zero) for has, s, v in zip(has_params, streamed, visiting))
    before = add_counters(model, streamed, prefetch_depth)
    after = add_counters(model, streamed[::-1], prefetch_depth)[::-1]
    visits = add_counters(model, visiting, NUM_RING_BUFFERS)[-1]
    last_before = [counts[-1] for counts in before[:-1]]
    last_after = [counts[-1] for counts in after[1:]]
    device_streamed = pick_ring(choices, lambda lane: lane.is_streamed and lane.update == DEVICE)
    device_nvme = pick_ring(choices, lambda lane: lane.weights == NVME and lane.update == DEVICE)
    any_nvme = pick_ring(choices, lambda lane: lane.weights == NVME)
    edges = add_edges(model, choices)
    return Draft(
        problem=problem,
        prefetch_depth=prefetch_depth,
        scale=scale,
        horizon=horizon,
        model=model,
        choices=choices,
        period=period_var,
        streamed=streamed,
        visiting=visiting,
        num_slots=tuple(add_counts(model, streamed, before[-1])),
        num_buffers=tuple(add_counts(model, visiting, visits)),
        edges=edges,
        first_load=edges.with_loads(_add_loads(model, device_streamed, last_before)),
        second_load=_add_loads(model, streamed, last_after),
        nvme_loads=tuple(
            zip(_add_loads(model, device_nvme, last_before), _add_loads(model, any_nvme, last_after), strict=True)
        ),
        early=_add_early(model, choices, edges),
    )


def pick_ring(choices: Sequence[UnitChoice], wanted: Callable[[Lane], float]) -> tuple[Affine, ...]:
    """Return, per unit, the sum of `wanted(lane)` over the lane that is picked; 0 for embed and head."""
    return (Affine(), *(choice.lane(wanted) for choice in choices[1:-1]), Affine())


def add_edges(model: LinearModel, choices: Sequence[UnitChoice]) -> Edges:
    """Add who of embed and head is streamed, and what that makes the other one load."""
    embed, head = (choices[u].lane(lambda lane: lane.is_streamed) for u in (0, -1))

    def updated(u: int, *states: str) -> Affine:
        return choices[u].lane(lambda lane: lane.is_streamed and lane.update == DEVICE and lane.states in states)

    early = add_product(model, updated(0, HOST), head)
    return Edges(
        embed=embed,
        head=head,
        both=add_product(model, embed, head),
        load_embed=early + add_product(model, updated(0, NVME), head),
        load_head=add_product(model, updated(-1, HOST, NVME), embed),
        early=early,
    )


def pick_lane(draft: Draft, u: int, **wanted: str | tuple[str, ...]) -> Affine:
    """Return 1 where unit u's lane has the wanted values, for example `weights=NVME, update=CPU`."""

    def matches(lane: Lane) -> bool:
        return all(getattr(lane, name) in (v if isinstance(v, tuple) else (v,)) for name, v in wanted.items())

    return draft.choices[u].lane(matches)


def _add_early(model: LinearModel, choices: Sequence[UnitChoice], edges: Edges) -> tuple[tuple[Affine, Affine], ...]:
    """Add who is loaded early: of a first run of units that are updated on the device, the two whose states come.

    A head that takes the embed's slot must wait for it.
    """
    early = []
    nobody, somebody = Affine(constant=1.0), Affine()  # so far none, or one, came and nothing ended the run
    for u, choice in enumerate(choices):

        def come(place: str, is_streamed: bool, choice: UnitChoice = choice) -> Affine:
            wanted = is_streamed, HOST, DEVICE, place
            return choice.lane(lambda lane: (lane.is_streamed, lane.states, lane.update, lane.grads) == wanted)

        is_free = 1.0 - edges.embed if u == len(choices) - 1 else Affine(constant=1.0)
        comes = [come(place, False) + add_product(model, come(place, True), is_free) for place in (DEVICE, HOST)]
        stays = choice.lane(lambda lane: lane.states == DEVICE)
        early.append(tuple(add_product(model, nobody + somebody, user) for user in comes))
        first = add_product(model, nobody, total(comes))
        nobody, somebody = add_product(model, nobody, stays), first + add_product(model, somebody, stays)
    return tuple((without, with_grads) for without, with_grads in early)


def _add_loads(model: LinearModel, users: Sequence[Affine], counters: Sequence[Affine]) -> tuple[Affine, ...]:
    return tuple(add_both(model, user, counter) for user, counter in zip(users, counters, strict=True))
