"""Many plans of one problem as vectors: what each unit's decisions mean in ms and bytes, and who shares a buffer.

A row is a unit, a column a plan. Where a plan has no buffer for a unit, the buffer's index is a spare one that nobody
waits for.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lazytrain.solver.machine import NUM_BUFFERS
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, UnitPlan
from lazytrain.solver.problem import Problem
from lazytrain.solver.rates import copy_ms, dram_ms, read_ms, update_dram_ms, write_ms

Decisions = tuple[int, tuple[UnitPlan, ...]]  # prefetch depth, all units
FLAGS = (
    *("streamed", "visits", "weights_nvme", "states_nvme", "on_cpu", "on_device", "to_host", "is_early"),
    *("moves", "moves_boundary", "moves_residuals", "spills_boundary", "spills_residuals"),
)
TIMES = (
    *("visit", "cpu_reads", "cpu_writes", "forward", "backward", "offload_boundary", "offload_residuals", "fetch"),
    *("spill_boundary", "spill_residuals", "unspill_boundary", "unspill_residuals"),
)
NAMES = (*FLAGS, *TIMES, "cpu_dram_ms", "sweep_ms", "dram_ms")


class Lookup:
    """A function of a unit and its decisions, worked out once for each, for many plans."""

    def __init__(self, num_units: int, describe: Callable[[int, UnitPlan], Sequence[float]]) -> None:
        self._describe = describe
        # By identity: hashing decisions would take longer than all else. They are kept, so that none is another's.
        self._rows: list[dict[int, int]] = [{} for _ in range(num_units)]
        self._values: list[list[Sequence[float]]] = [[] for _ in range(num_units)]
        self._kept: list[UnitPlan] = []
        self._arrays: list[np.ndarray | None] = [None] * num_units

    def look_up(self, many: Sequence[Decisions]) -> np.ndarray:
        """Return what was described: [number, unit, plan]."""
        found = []
        for u, column in enumerate(zip(*(units for _, units in many), strict=True)):
            rows = self._rows[u]
            picks = [rows.get(id(decisions), -1) for decisions in column]
            if -1 in picks:
                picks = [self._find(u, decisions) for decisions in column]
            array = self._arrays[u]
            if array is None:
                array = self._arrays[u] = np.array(self._values[u]).T
            found.append(array[:, picks])
        return np.stack(found, axis=1)

    def _find(self, u: int, decisions: UnitPlan) -> int:
        rows = self._rows[u]
        if id(decisions) not in rows:
            rows[id(decisions)] = len(rows)
            self._kept.append(decisions)
            self._values[u].append(self._describe(u, decisions))
            self._arrays[u] = None
        return rows[id(decisions)]


class Tables:
    """What each unit's decisions mean in time, worked out once per problem and unit."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.units = problem, problem.units
        self._lookup = Lookup(len(self.units), self._describe)

    def look_up(self, many: Sequence[Decisions]) -> dict[str, np.ndarray]:
        """Return name -> a row per unit, a column per plan; flags are booleans."""
        named = dict(zip(NAMES, self._lookup.look_up(many), strict=True))
        return {name: values > 0 if name in FLAGS else values for name, values in named.items()}

    def _describe(self, u: int, plan: UnitPlan) -> list[float]:
        problem, unit, last = self.problem, self.units[u], len(self.units) - 1
        num, has, point = problem.num_microbatches, unit.num_params > 0, unit.points[plan.residual_point]
        on_cpu, to_host = has and plan.update == CPU, has and plan.grads == HOST
        visits, streamed = has and plan.moves_states, has and plan.is_streamed
        boundary = num * unit.boundary_bytes if 0 < u < last and plan.boundary != DEVICE else 0
        residuals = num * point.residual_bytes if 0 < u < last and plan.residuals in (HOST, NVME) else 0
        moves = 0 < u < last and plan.boundary != DEVICE, 0 < u < last and plan.residuals in (HOST, NVME)
        packs = boundary * moves[0] + residuals * moves[1]
        spilled = boundary * (plan.boundary == NVME), residuals * (plan.residuals == NVME)
        on_nvme = unit.weight_bytes * (plan.weights == NVME) + unit.state_bytes * (plan.states == NVME)

        def copy(num_bytes: int, *, to_device: bool = False, num_copies: int = num, in_backward: bool = False) -> float:
            if not num_copies:
                return 0.0
            return copy_ms(problem, num_bytes, to_device=to_device, num_copies=num_copies, in_backward=in_backward)

        # What keeps DRAM busy in every step, whatever the other units do; loads of weights come on top.
        sweep_bytes = packs + sum(spilled) + on_cpu * 2 * on_nvme
        sweep_bytes += visits * (2 * unit.state_bytes + unit.grad_bytes * to_host)
        sweep_bytes += 2 * visits * unit.state_bytes * (plan.states == NVME)
        if has and plan.update == DEVICE and streamed:
            sweep_bytes += unit.weight_bytes * (2 if plan.weights == NVME else 1)
        backward_bytes = packs + sum(spilled) + unit.grad_bytes * to_host
        update_ms = on_cpu * update_dram_ms(problem, unit)
        values: dict[str, float] = {
            "streamed": streamed,
            "visits": visits,
            "weights_nvme": has and plan.weights == NVME,
            "states_nvme": has and plan.states == NVME,
            "on_cpu": on_cpu,
            "on_device": has and plan.update == DEVICE,
            "to_host": to_host,
            "is_early": not has or (plan.update == DEVICE and NVME not in (plan.weights, plan.states)),
            "moves": any(moves),
            "moves_boundary": moves[0],
            "moves_residuals": moves[1],
            "spills_boundary": moves[0] and plan.boundary == NVME,
            "spills_residuals": moves[1] and plan.residuals == NVME,
            "visit": copy(unit.state_bytes + unit.grad_bytes * to_host, to_device=True, num_copies=1 + to_host),
            "cpu_reads": read_ms(problem, on_nvme) * on_cpu,
            "cpu_writes": write_ms(problem, on_nvme) * on_cpu,
            "forward": num * (point.forward_ms + point.backward_ms * (u == last)),
            "backward": num * point.backward_ms * (u != last),
            "offload_boundary": copy(boundary, num_copies=num * moves[0]),
            "offload_residuals": copy(residuals, num_copies=num * moves[1]),
            "fetch": copy(packs, to_device=True, num_copies=num * sum(moves), in_backward=True),
            "spill_boundary": write_ms(problem, spilled[0]),
            "spill_residuals": write_ms(problem, spilled[1]),
            "unspill_boundary": read_ms(problem, spilled[0]),
            "unspill_residuals": read_ms(problem, spilled[1]),
            "cpu_dram_ms": update_ms + dram_ms(problem, on_cpu * 2 * on_nvme),
            "sweep_ms": update_ms + dram_ms(problem, sweep_bytes),
            "dram_ms": update_ms + dram_ms(problem, sweep_bytes + backward_bytes),
        }
        return [float(values[name]) for name in NAMES]


class Layout:
    """Which buffer every unit uses, and who had it before.

    Attributes:
        slots: [unit, plan]; the spare one is `spare_slot`. buffers: of updates; turns: fetch buffers; the spare one of
            both is `NUM_BUFFERS`.
        needs, backward_needs: [unit, plan]; the last unit before, in that order, that had the same slot or buffer; the
            number of units where there is none.
        early: what is loaded before the norm.
    """

    def __init__(self, depths: np.ndarray, has: dict[str, np.ndarray]) -> None:
        num_units = len(has["streamed"])
        last, blocks = num_units - 1, slice(num_units - 2, 0, -1)
        ring = has["streamed"].copy()
        ring[[0, last]] = False
        edge_slot = int(depths.max())
        self.spare_slot = edge_slot + 1
        self.slots = _take_turns(ring, np.maximum(np.minimum(depths, ring.sum(axis=0)), 1), self.spare_slot)
        self.slots[[0, last]] = np.where(has["streamed"][[0, last]], edge_slot, self.spare_slot)
        self.buffers = _take_turns(has["visits"], NUM_BUFFERS, NUM_BUFFERS)
        self.turns = np.full_like(self.slots, NUM_BUFFERS)
        self.turns[blocks] = _take_turns(has["moves"][blocks], NUM_BUFFERS, NUM_BUFFERS)
        needs = np.maximum(_last_users(self.slots, self.spare_slot), _last_users(self.buffers, NUM_BUFFERS))
        self.needs = np.where(needs < 0, num_units, needs)
        self.backward_needs = np.full_like(needs, num_units)
        slots, turns = self.slots[blocks], self.turns[blocks]
        positions = np.maximum(_last_users(slots, self.spare_slot), _last_users(turns, NUM_BUFFERS))
        self.backward_needs[blocks] = np.where(positions < 0, num_units, last - 1 - positions)
        self.early = np.logical_and.accumulate(has["is_early"] & (needs < 0), axis=0)


def _take_turns(users: np.ndarray, num_buffers: int | np.ndarray, spare: int) -> np.ndarray:
    return np.where(users, (np.cumsum(users, axis=0) - 1) % num_buffers, spare)


def _last_users(keys: np.ndarray, spare: int) -> np.ndarray:
    """Return, per row and plan, the row before that has the same key; -1 = none."""
    seen, found = np.full((spare + 1, keys.shape[1]), -1), np.full(keys.shape, -1)
    plans = np.arange(keys.shape[1])
    for row, key in enumerate(keys):
        found[row] = seen[key, plans]
        seen[key, plans] = row
        seen[spare] = -1
    return found


class InFlight:
    """The two latest copies that are still in flight, per plan."""

    def __init__(self, num_plans: int) -> None:
        self._older, self._newer = np.zeros((2, num_plans))
        self._count = np.zeros(num_plans, dtype=np.int8)

    def push(self, mask: np.ndarray, end: np.ndarray) -> None:
        """Add one where `mask` says so; there is room."""
        self._older = np.where(mask & (self._count == 0), end, self._older)
        self._newer = np.where(mask, end, self._newer)
        self._count = self._count + mask

    def pop_if_full(self, mask: np.ndarray) -> np.ndarray:
        """Take the older one where there are two; 0 elsewhere."""
        full = mask & (self._count == NUM_BUFFERS)
        oldest = np.where(full, self._older, 0.0)
        self._older = np.where(full, self._newer, self._older)
        self._count = self._count - full
        return oldest

    def latest(self) -> np.ndarray:
        """Return when all in flight are over; 0 where nothing is."""
        return np.where(self._count > 0, np.maximum(self._older, self._newer), 0.0)
