"""The memory account of many plans at once: `memory.account`'s numbers (tests hold it to equality) in vectors.

Where boundaries are computed again, the position of a block that only runs forward again is left out: the backward of
the block behind it, which comes later, needs more, unless that one is of a smaller kind.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lazytrain.solver.memory import (
    NUM_RING_BUFFERS,
    NUM_WRITERS,
    align,
    boundary_bytes,
    chunk_sum_bytes,
    embed_sum_bytes,
    first_sums_bytes,
    moved_bytes,
    sum_bytes,
    work_out,
)
from lazytrain.solver.plan import CPU, NONE, NVME, UnitPlan, least_chunks_behind
from lazytrain.solver.problem import Problem
from lazytrain.solver.vectors import Decisions, Lookup

NVME_FIELDS = ("nvme_weights", "nvme_states", "cpu_weights", "cpu_states", "spill", "packs", "nvme")
PART_FIELDS = (
    "resident",
    "slot",
    "visit",
    "moved",
    "host_grads",
    "waiting",
    "later",
    "kept",
    "residuals",
    "workspace",
    "host",
)
FIELDS = (*PART_FIELDS, "again", *NVME_FIELDS)


class Fitter:
    """Peaks and shortages of many plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._units, self._last = problem, problem.units, len(problem.units) - 1
        self._lookup = Lookup(len(self._units), self._describe)
        inputs = [boundary_bytes(problem, unit) for unit in self._units]
        edges = (0, self._last)
        sums = [sum_bytes(unit) if u in edges else chunk_sum_bytes(problem, unit) for u, unit in enumerate(self._units)]
        tied = sum_bytes(problem.embed) if problem.tied else 0
        sizes = [align(unit.boundary_bytes) for unit in self._units]
        num, blocks = problem.num_microbatches, range(1, self._last)
        self._sharing: tuple[dict[tuple[str, int], list[int]], ...] = (defaultdict(list), defaultdict(list))
        for u, unit in enumerate(self._units):  # whose weights, and whose states, share spare files on NVMe
            for users, size in zip(self._sharing, (unit.weight_bytes, unit.state_bytes), strict=True):
                users[unit.kind, align(size)].append(u)
        work = problem.embed.points[0].workspace_bytes
        self._embed, self._embed_sums = inputs[1] + work, embed_sum_bytes(problem)
        self._head, self._head_work = inputs[-1] + sizes[-1] + sums[-1] + tied, problem.head.points[0].workspace_bytes
        self._forward = np.array([inputs[u] + inputs[u + 1] for u in blocks])[:, None]
        self._backward = np.array([num * max(sizes[u], sizes[u + 1]) + sizes[u] + tied for u in blocks])[:, None]
        self._sums = np.array([sums[u] for u in blocks])[:, None]
        self._first_sums = np.array(first_sums_bytes(problem, self._units[-2]))[:, None]

    def measure(self, many: Sequence[Decisions]) -> tuple[np.ndarray, np.ndarray]:
        """Return the peak of the device's memory and the bytes that are missing over all tiers, per plan."""
        parts = dict(zip(FIELDS, self._lookup.look_up(many), strict=True))
        depths = np.array([depth for depth, _ in many])
        inner = slice(1, self._last)
        slots, visits = parts["slot"][inner], parts["visit"]
        always = parts["resident"].sum(axis=0) + align(self._problem.library_bytes)
        always += np.minimum(depths, (slots > 0).sum(axis=0)) * slots.max(axis=0)
        always += np.maximum(parts["slot"][0], parts["slot"][-1])
        always += np.minimum(NUM_RING_BUFFERS, (visits > 0).sum(axis=0)) * visits.max(axis=0)
        in_flight, moved = self._list_in_flight(parts["moved"][inner])
        always += NUM_RING_BUFFERS * parts["moved"].max(axis=0)
        ring = NUM_RING_BUFFERS * parts["host_grads"][inner].max(axis=0)
        leaves = parts["host_grads"][0] > 0
        embed_sum = np.where(leaves, *self._embed_sums)
        stored = ring + embed_sum * leaves
        waiting, edge, kept = parts["waiting"], parts["waiting"][-1], parts["kept"][inner].cumsum(axis=0)
        ahead, later = (parts[name][::-1].cumsum(axis=0)[::-1] for name in ("waiting", "later"))  # it and all behind it
        before = kept - parts["kept"][inner]
        forward = later[inner] + before + self._forward + parts["residuals"][inner] + parts["workspace"][inner]
        behind = ahead[inner] - edge
        again = parts["again"][inner].cumsum(axis=0)  # since the last boundary that was kept
        again = again - np.maximum.accumulate(np.where(parts["again"][inner] > 0, 0, again), axis=0)
        summed = self._sums + ring
        own_kept = parts["kept"][-2] + parts["again"][-2]  # of the block whose backward comes first
        passed = np.arange(len(self._first_sums))[:, None] * own_kept // self._problem.num_microbatches
        summed[-1] = (self._first_sums - passed).max(axis=0) + parts["host_grads"][-2]
        backward = behind + kept + again + self._backward + parts["workspace"][inner] + summed + edge
        positions = [
            later[0] + stored + self._embed,
            (forward + in_flight).max(axis=0),
            kept[-1] + self._head + np.maximum(self._head_work, edge) + moved,
            backward.max(axis=0),
            ahead[1] - edge + self._embed + waiting[0] + ring + edge + embed_sum,
        ]
        peak = always + np.maximum.reduce(positions)
        hardware, host = self._problem.hardware, parts["host"].sum(axis=0)
        nvme, staging = self._sum_nvme(parts, depths)
        host = host + staging + (peak if self._problem.device_is_host else 0)
        limit = hardware.nvme_bytes if self._problem.allow_nvme else 0
        missing = np.maximum(peak - hardware.device_memory_bytes, 0) + np.maximum(host - hardware.host_memory_bytes, 0)
        missing = missing + np.maximum(nvme - limit, 0)
        return peak, missing

    def fits(self, many: Sequence[Decisions]) -> np.ndarray:
        """Return which plans fit in every tier."""
        return self.measure(many)[1] == 0

    def _list_in_flight(self, moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what offloads in flight take at each block's forward, and at the head; [block, plan] and [plan]."""
        behind, last, rows = least_chunks_behind(self._problem.num_microbatches), np.zeros_like(moved[0]), []
        for row in moved:
            rows.append(behind * np.maximum(last, row))
            last = np.where(row > 0, row, last)
        return np.stack(rows), behind * last

    def _describe(self, u: int, plan: UnitPlan) -> list[int]:
        problem, unit = self._problem, self._units[u]
        part, spilled = work_out(problem, unit, plan), moved_bytes(problem, unit, plan, (NVME,))
        values = [getattr(part, name) for name in PART_FIELDS]
        again = boundary_bytes(problem, unit) if plan.boundary == NONE else 0
        lives = align(unit.weight_bytes) * (plan.weights == NVME), align(unit.state_bytes) * (plan.states == NVME)
        on_cpu = [size * (plan.update == CPU) for size in lives]
        return [*values, again, *lives, *on_cpu, part.spill, sum(spilled) // problem.num_microbatches, part.nvme]

    def _sum_nvme(self, parts: dict[str, np.ndarray], depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of files on NVMe, those for new versions included, and of staging buffers in the host."""
        weights, states, spill, packs, files = (parts[name] for name in NVME_FIELDS if not name.startswith("cpu"))
        on_cpu = parts["cpu_weights"], parts["cpu_states"]
        spare, head_bytes = spill.max(axis=0), align(self._problem.file_head_bytes)
        for lives, sharing in zip((weights, states), self._sharing, strict=True):
            for users in sharing.values():
                largest = lives[users].max(axis=0)
                spare = spare + largest + head_bytes * (largest > 0)
        num_bytes = files.sum(axis=0) + NUM_WRITERS * spare
        on_device = (weights - on_cpu[0]).max(axis=0), (states - on_cpu[1]).max(axis=0)
        staging = depths * weights.max(axis=0) + on_cpu[0].max(axis=0) + on_cpu[1].max(axis=0)
        staging += NUM_RING_BUFFERS * (on_device[0] + 2 * on_device[1] + spill.max(axis=0) + packs.max(axis=0))
        return num_bytes, staging
