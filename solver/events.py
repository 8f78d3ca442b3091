"""The operations of a step in the MILP: for each a finish time and a duration.

A variable is an operation's finish; 0 is when the norm of the step before is known, T when this step's is. An operation
that a plan does without takes 0 ms. `early` is what this step loads for the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lazytrain.solver.choices import Keep
from lazytrain.solver.draft import Draft
from lazytrain.solver.linear import Affine
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME
from lazytrain.solver.rates import copy_ms, read_ms, write_ms
from lazytrain.solver.traffic import slowed_updates

AWAY = (HOST, NVME)


class Op(NamedTuple):
    """An operation: when it ends, and what it takes, in the model's unit of time."""

    finish: Affine
    ms: Affine


@dataclass(frozen=True, kw_only=True)
class Events:
    """All operations but NVMe's, one per unit in each list; embed and head lack some, which are constant 0.

    `forward` of the head is all its compute; `backward` of the embed is its own. `cpu` is the CPU's update with all its
    thread reads from NVMe and writes there; `slowed`, when copies have let it end.
    """

    cpu: list[Op]
    slowed: list[Affine]
    load: list[Op]
    update: list[Op]
    store_weights: list[Op]
    store_states: list[Op]
    forward: list[Op]
    offload_boundary: list[Op]
    offload_residuals: list[Op]
    reload: list[Op]
    fetch: list[Op]
    backward: list[Op]
    store_grads: list[Op]
    early: list[Op]


def add_events(draft: Draft) -> Events:
    """Add a finish time for every operation."""
    last = len(draft.choices) - 1
    units = [Durations(draft, u) for u in range(last + 1)]

    everywhere, blocks = range(last + 1), range(1, last)

    def ops(times: Sequence[Affine], where: range = everywhere) -> list[Op]:
        nothing = Op(Affine(), Affine())
        return [Op(draft.model.add_var(), ms) if u in where else nothing for u, ms in enumerate(times)]

    boundaries = [unit.move_boundary(to_device=False) for unit in units]
    residuals = [unit.move_residuals(to_device=False) for unit in units]
    if not draft.problem.allow_nvme:
        # Nothing comes between the two copies: they are one operation.
        residuals = [a + b for a, b in zip(boundaries, residuals)]
    returns = [unit.move_boundary(to_device=True) + unit.move_residuals(to_device=True) for unit in units]
    return Events(
        cpu=ops([unit.update_on_cpu() for unit in units]),
        slowed=slowed_updates(draft),
        load=ops([unit.load() for unit in units]),
        update=ops([unit.update_on_device() for unit in units]),
        store_weights=ops([unit.store_weights() for unit in units]),
        store_states=ops([unit.store_states() for unit in units]),
        forward=ops([unit.forward(with_backward=u == last) for u, unit in enumerate(units)]),
        offload_boundary=ops(boundaries, blocks if draft.problem.allow_nvme else range(0)),
        offload_residuals=ops(residuals, blocks),
        reload=ops([unit.reload() for unit in units], blocks),
        fetch=ops(returns, blocks),
        backward=ops([unit.backward() for unit in units], range(last)),
        store_grads=ops([unit.store_grads() for unit in units]),
        early=ops([unit.load_early() for unit in units]),
    )


class Durations:
    """What each operation of a unit takes, as expressions of the binaries."""

    def __init__(self, draft: Draft, u: int) -> None:
        self._draft, self._u = draft, u
        self._unit, self._choice = draft.problem.units[u], draft.choices[u]
        self._num = draft.problem.num_microbatches

    def update_on_cpu(self) -> Affine:
        unit, problem = self._unit, self._draft.problem
        if not unit.num_params:
            return Affine()

        def ms(on_nvme: int) -> float:
            return self._draft.ms(unit.cpu_update_ms + read_ms(problem, on_nvme) + write_ms(problem, on_nvme))

        bytes_of = {"weights": unit.weight_bytes, "states": unit.state_bytes}
        return self._choice.lane(
            lambda lane: (
                ms(sum(size for what, size in bytes_of.items() if getattr(lane, what) == NVME))
                if lane.update == CPU
                else 0.0
            )
        )

    def load(self) -> Affine:
        """Weights where the device lacks them, and what an update there needs, if it wasn't loaded early."""
        if not self._unit.num_params:
            return Affine()
        weights, states, grads = self._load_ms()
        lanes = self._choice.lane(
            lambda lane: (
                (weights if lane.update == CPU else 0.0)
                + (states + (grads if lane.grads == HOST else 0.0) if lane.moves_states else 0.0)
            )
        )
        return lanes + self._draft.first_load[self._u] * weights - self.load_early()

    def load_early(self) -> Affine:
        """What is loaded for the next step's update before the norm is known; the embed's weights, too."""
        weights, states, grads = self._load_ms()
        without, with_grads = self._draft.early[self._u]
        early = without * states + with_grads * (states + grads)
        return early + self._draft.edges.early * weights if self._u == 0 else early

    def _load_ms(self) -> tuple[float, float, float]:
        unit = self._unit
        weights, states, grads = (
            self._copy(num_bytes, to_device=True)
            for num_bytes in (unit.weight_bytes, unit.state_bytes, unit.grad_bytes)
        )
        return weights, states, grads

    def update_on_device(self) -> Affine:
        ms = self._draft.ms(self._unit.device_update_ms) if self._unit.num_params else 0.0
        return self._choice.lane(lambda lane: ms if lane.update == DEVICE else 0.0)

    def store_weights(self) -> Affine:
        ms = self._copy(self._unit.weight_bytes, to_device=False)
        return self._choice.lane(lambda lane: ms if lane.is_streamed and lane.update == DEVICE else 0.0)

    def store_states(self) -> Affine:
        ms = self._copy(self._unit.state_bytes, to_device=False)
        return self._choice.lane(lambda lane: ms if lane.moves_states else 0.0)

    def store_grads(self) -> Affine:
        ms = self._copy(self._unit.grad_bytes, to_device=False)
        return self._choice.lane(lambda lane: ms if lane.grads == HOST else 0.0)

    def forward(self, *, with_backward: bool) -> Affine:
        """All chunks' forward; the head's is its loss and gradients too."""
        points = self._unit.points
        ms = [p.forward_ms + (p.backward_ms if with_backward else 0.0) for p in points]
        return self._choice.keep(lambda keep: self._draft.ms(self._num * ms[keep.point]))

    def backward(self) -> Affine:
        points = self._unit.points
        return self._choice.keep(lambda keep: self._draft.ms(self._num * points[keep.point].backward_ms))

    def reload(self) -> Affine:
        """The second load of weights, for backward."""
        ms = self._copy(self._unit.weight_bytes, to_device=True, in_backward=True)
        return self._draft.second_load[self._u] * ms

    def move_boundary(self, *, to_device: bool) -> Affine:
        ms = self._copy(
            self._num * self._unit.boundary_bytes, to_device=to_device, num_copies=self._num, in_backward=to_device
        )
        return self._choice.boundary(lambda place: ms if place in AWAY else 0.0)

    def move_residuals(self, *, to_device: bool) -> Affine:
        def ms(keep: Keep) -> float:
            num_bytes = self._num * self._unit.points[keep.point].residual_bytes
            if keep.place not in AWAY:
                return 0.0
            return self._copy(num_bytes, to_device=to_device, num_copies=self._num, in_backward=to_device)

        return self._choice.keep(ms)

    def _copy(self, num_bytes: int, *, to_device: bool, num_copies: int = 1, in_backward: bool = False) -> float:
        ms = copy_ms(
            self._draft.problem, num_bytes, to_device=to_device, num_copies=num_copies, in_backward=in_backward
        )
        return self._draft.ms(ms)


def follow(draft: Draft, op: Op, waits: Sequence[Affine]) -> None:
    """Add the rows finish >= wait + ms for every wait (0 where there is none)."""
    for wait in waits or (Affine(),):
        draft.model.add_at_least(op.finish, wait + op.ms)


def follow_if(draft: Draft, user: Affine, op: Op, wait: Affine, horizon: float) -> None:
    """Add the row finish >= wait + ms - M·(1 - user)."""
    if not user.is_zero and not wait.is_zero:
        draft.model.add_at_least(op.finish, wait + op.ms - (1.0 - user) * horizon)


def relax(draft: Draft, wait: Affine, user: Affine) -> Affine:
    """Return a time to wait for where `user` is 1, and one before any other where it is 0."""
    return Affine() if user.is_zero else wait - (1.0 - user) * (2 * draft.horizon)
