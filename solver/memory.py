"""How many bytes a plan needs in each tier, at every position of a step: one function for planner, report and tests.

Every tensor and buffer is rounded up to 512 bytes. M is the number of microbatches (chunks), P the prefetch depth, B
`chunks_behind`.

    device, always    resident weights and states + min(P, streamed blocks) weight slots + one slot for embed and head,
                      where one is streamed + min(2, visiting) update buffers + 2 fetch buffers (of one chunk's)
                      + what libraries hold
    device, embed     + grads that wait for their update + what the last step's stores still read: 2 grad buffers and
                      the fp32 sum of the embed's grads, where they go to the host
    device, forward   + kept boundaries so far + kept residuals so far + own input and output of all chunks
                      + own residuals (one chunk's where they leave) + B chunks' offloads in flight, its own or those of
                      the last block before that sent any
                      + grads that wait for their turn to be updated + workspace
    device, again     + kept and regained boundaries + cotangents of all chunks + grads that wait + 2 grad buffers
                      + workspace
    device, backward  + kept boundaries and residuals not yet consumed + cotangents of all chunks and one more
                      + grads that wait for the norm + the sum over chunks where M > 1 + 2 grad buffers + workspace;
                      in the first block's no sum and no buffer of a block before it, and the less, the more have passed
    embed and head    + an fp32 sum of their grads, but for an embed's that is made some columns at a time
    host              weights, states, grads, offloaded things; staging buffers for what lives on NVMe
    nvme              weights and states, each behind a head; spilled things, a file for each chunk
                      + two files for new versions per size of weights, per size of states, of the largest spilled
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from lazytrain.solver.plan import CPU, DEVICE, HOST, NONE, NVME, Plan, UnitPlan
from lazytrain.solver.problem import Problem, UnitCost
from lazytrain.solver.visits import backward_visits

ALIGN_BYTES = 512
FP32_BYTES = 4
NUM_RING_BUFFERS = 2  # update, grad, fetch and staging buffers
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


def first_sums_bytes(problem: Problem, unit: UnitCost) -> tuple[int, ...]:
    """Return what the sum takes in the block whose backward comes first, while its first, second and third chunk pass.

    No sum of a block before it is there; each chunk that has passed has left its residuals.
    """
    sums = (0, align(unit.grad_bytes), chunk_sum_bytes(problem, unit))
    return sums[: problem.num_microbatches]


def embed_sum_bytes(problem: Problem) -> tuple[int, int]:
    """Return what the sum of the embed's grads takes where they leave for the host, and beside those that stay."""
    dense = sum_bytes(problem.embed)
    return (dense, dense) if problem.embed_sums_densely else (align(problem.embed.grad_bytes), 0)


def largest_tensor_bytes(problem: Problem) -> int:
    """Return the bytes of the largest tensor that a step makes on the device: a sum of grads, or grads."""
    blocks = (sum_bytes(b) if problem.num_microbatches > 2 else align(b.grad_bytes) for b in problem.blocks)
    return max(sum_bytes(problem.head), embed_sum_bytes(problem)[0], *blocks)


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
    return Accountant(problem).account(plan)


class Accountant:
    """`account` for many plans of one problem: what a unit's decisions need by themselves is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._units = problem, problem.units
        self._parts: list[dict[UnitPlan, Part]] = [{} for _ in self._units]
        self._inputs = [boundary_bytes(problem, unit) for unit in self._units]
        edges = (0, len(self._units) - 1)
        self._embed_sums = embed_sum_bytes(problem)
        self._sums = [
            sum_bytes(unit) if u in edges else chunk_sum_bytes(problem, unit) for u, unit in enumerate(self._units)
        ]
        self._tied = sum_bytes(problem.embed) if problem.tied else 0
        blocks = range(1, len(self._units) - 1)
        self._forward_at = [f"forward {self._units[u].name}" for u in blocks]
        self._backward_at = [f"backward {self._units[u].name}" for u in blocks]

    def account(self, plan: Plan) -> Usage:
        """Return the bytes that a plan needs in each tier."""
        parts = []
        for u, decisions in enumerate(plan.units):
            part = self._parts[u].get(decisions)
            if part is None:
                part = self._parts[u][decisions] = work_out(self._problem, self._units[u], decisions)
            parts.append(part)
        always = _device_always(plan, parts) + align(self._problem.library_bytes)
        device = tuple((name, always + num_bytes) for name, num_bytes in self._list_positions(plan, parts))
        host, nvme = sum(part.host for part in parts), sum(part.nvme for part in parts)
        if nvme:
            host += _nvme_staging(self._problem, plan)
            sizes = {file for part in parts for file in part.lasting}
            nvme += NUM_WRITERS * (sum(file.num_bytes for file in sizes) + max(part.spill for part in parts))
        return Usage(device, host, nvme)

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan fits in every tier."""
        return not find_shortage(self._problem, self.account(plan))

    def _list_positions(self, plan: Plan, parts: "list[Part]") -> Iterator[tuple[str, int]]:
        plans, problem, inputs, sums, tied = plan.units, self._problem, self._inputs, self._sums, self._tied
        num, blocks, head = problem.num_microbatches, parts[1:-1], problem.head
        waiting = sum(part.later for part in parts)
        ring = NUM_RING_BUFFERS * max(part.host_grads for part in blocks)
        embed_sum = self._embed_sums[0 if parts[0].host_grads else 1]
        stored = ring + (embed_sum if parts[0].host_grads else 0)  # of the last step, until the first block
        kept = moved = 0  # moved: a chunk's, by the last block that sent any away

        yield "embed", waiting + stored + inputs[1] + problem.embed.points[0].workspace_bytes
        waiting -= parts[0].later
        for i, part in enumerate(blocks):
            own = inputs[i + 1] + inputs[i + 2] + part.residuals + part.workspace
            yield self._forward_at[i], waiting + kept + own + plan.chunks_behind * max(moved, part.moved)
            waiting -= part.later
            kept += part.kept
            moved = part.moved or moved

        edge = parts[-1].waiting
        waiting -= parts[-1].later
        # The grads of the step before went with their update, the new ones are rounded when the workspace is free.
        own = inputs[-1] + align(head.boundary_bytes) + max(head.points[0].workspace_bytes, edge) + sums[-1]
        yield "head", kept + own + tied + plan.chunks_behind * moved

        for i, is_again in backward_visits(plans[1:-1]):
            part, unit = blocks[i], self._units[i + 1]
            if is_again:
                kept += inputs[i + 2]
                own = num * align(unit.boundary_bytes) + part.workspace  # as many cotangents
                yield f"forward again {unit.name}", waiting + kept + own + ring + edge + tied
                continue
            waiting += part.waiting
            cotangent = max(align(unit.boundary_bytes), align(self._units[i + 2].boundary_bytes))
            own = num * cotangent + align(unit.boundary_bytes) + part.workspace
            own_kept = part.kept or (inputs[i + 1] if plans[i + 1].boundary == NONE else 0)
            summed = sums[i + 1] + ring
            if i == len(blocks) - 1:
                # The first: only its own grads leave, and chunks that have passed are kept no more.
                chunks = enumerate(first_sums_bytes(problem, unit))
                summed = max(num_bytes - c * own_kept // num for c, num_bytes in chunks) + part.host_grads
            yield self._backward_at[i], waiting + kept + own + summed + edge + tied
            kept -= own_kept

        own = inputs[1] + problem.embed.points[0].workspace_bytes + parts[0].waiting
        yield "embed backward", waiting + own + ring + edge + embed_sum


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


class LastingFile(NamedTuple):
    """What a file on NVMe serves: "weights" or "states" of one kind of unit, of which any may use it, and no other."""

    kind: str
    what: str
    num_bytes: int  # head included


class Part(NamedTuple):
    """What one unit's decisions need, in bytes: in the rings or always, while something waits, far from the device."""

    resident: int
    slot: int  # 0 where the weights stay
    visit: int  # 0 where no states come
    moved: int  # boundary and residuals of one chunk that leave the device
    host_grads: int
    waiting: int  # grads on the device
    later: int  # those that wait for the unit's turn in the next step; the others go as soon as the norm is known
    kept: int  # boundary and residuals that stay there
    residuals: int  # of all chunks, or of one where they leave
    workspace: int
    host: int
    nvme: int
    lasting: tuple[LastingFile, ...]  # weights and states among it
    spill: int  # the largest file of boundary or residuals: one chunk's


def work_out(problem: Problem, unit: UnitCost, plan: UnitPlan) -> Part:
    """Return what one unit's decisions need."""
    num = problem.num_microbatches
    weights, states, grads = align(unit.weight_bytes), align(unit.state_bytes), align(unit.grad_bytes)
    host = weights * (plan.weights == HOST or (plan.weights == DEVICE and plan.update == CPU))
    host += states * (plan.states == HOST) + grads * (plan.grads == HOST)
    lasting = tuple(
        LastingFile(unit.kind, what, align(problem.file_head_bytes) + num_bytes)
        for what, num_bytes, place in (("weights", weights, plan.weights), ("states", states, plan.states))
        if place == NVME and num_bytes
    )
    spilled = moved_bytes(problem, unit, plan, (NVME,))
    return Part(
        resident=weights * (plan.weights == DEVICE) + states * (plan.states == DEVICE),
        slot=weights if plan.is_streamed and unit.num_params else 0,
        visit=buffer_bytes(unit, plan) if plan.moves_states and unit.num_params else 0,
        moved=sum(moved_bytes(problem, unit, plan, (HOST, NVME))) // num,
        host_grads=grads * (plan.grads == HOST),
        waiting=grads * (plan.grads == DEVICE),
        later=grads * (plan.grads == DEVICE and not plan.updates_in_place),
        kept=sum(moved_bytes(problem, unit, plan, (DEVICE,))),
        residuals=residual_bytes(problem, unit, plan.residual_point) // (num if plan.residuals in (HOST, NVME) else 1),
        workspace=unit.points[plan.residual_point].workspace_bytes,
        host=host + sum(moved_bytes(problem, unit, plan, (HOST,))),
        nvme=sum(file.num_bytes for file in lasting) + sum(spilled),
        lasting=lasting,
        spill=max(spilled, default=0) // num,
    )


def _device_always(plan: Plan, parts: list[Part]) -> int:
    slots = [part.slot for part in parts[1:-1] if part.slot]
    visits = [part.visit for part in parts if part.visit]
    return (
        sum(part.resident for part in parts)
        + min(plan.prefetch_depth, len(slots)) * max(slots, default=0)
        + max(parts[0].slot, parts[-1].slot)
        + min(NUM_RING_BUFFERS, len(visits)) * max(visits, default=0)
        + NUM_RING_BUFFERS * max(part.moved for part in parts)
    )


def _nvme_staging(problem: Problem, plan: Plan) -> int:
    pairs = list(zip(problem.units, plan.units, strict=True))

    def largest(size: Callable[[UnitCost], int], wanted: Callable[[UnitPlan], bool]) -> int:
        return max((align(size(u)) for u, p in pairs if wanted(p)), default=0)

    weights: Callable[[UnitCost], int] = lambda u: u.weight_bytes  # noqa: E731
    states: Callable[[UnitCost], int] = lambda u: u.state_bytes  # noqa: E731
    packs = [[size // problem.num_microbatches for size in moved_bytes(problem, u, p, (NVME,))] for u, p in pairs]
    return (
        plan.prefetch_depth * largest(weights, lambda p: p.weights == NVME)
        + largest(weights, lambda p: p.weights == NVME and p.update == CPU)
        + largest(states, lambda p: p.states == NVME and p.update == CPU)
        + NUM_RING_BUFFERS * largest(weights, lambda p: p.weights == NVME and p.update == DEVICE)
        + 2 * NUM_RING_BUFFERS * largest(states, lambda p: p.states == NVME and p.update == DEVICE)
        + NUM_RING_BUFFERS * max(max(sizes, default=0) for sizes in packs)  # one chunk's is written at a time
        + NUM_RING_BUFFERS * max(sum(sizes) for sizes in packs)  # a block's are read together, one chunk's
    )
