"""What forward leaves for backward: boundary activations and residuals, kept, offloaded or spilled.

Offload: the d2h copy reads the live tensors; they are held until it ended. Fetch: into one of two device buffers. Both
move one microbatch's at a time, so that what is on its way takes little of the device's memory. Tensors keep their
strides, so that backward computes the same bits wherever they were.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazytrain.homes import Homes
from lazytrain.lanes import D2H, H2D, NVME_READ, NVME_WRITE, Lanes, Ticket, Worker
from lazytrain.layout import ALIGN_BYTES, round_up
from lazytrain.slabs import allocate_slab

NUM_FETCH_BUFFERS = 2
# Scalars (a random state, a sum) are not worth a copy of their own.
MIN_MOVED_BYTES = 1024


class Parcel(NamedTuple):
    """A tensor's place in a byte slab, strides kept; or the tensor itself, where it stays on the device."""

    kept: Tensor | None
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, slab: Tensor) -> Tensor:
        """Return the tensor as it lies in `slab`."""
        numel = 1
        for size in self.shape:
            numel *= size
        flat = slab[self.offset_bytes : self.offset_bytes + numel * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Packed(NamedTuple):
    """Tensors that left the device together."""

    parcels: list[Parcel]
    num_bytes: int
    key: str
    offset_bytes: int  # in the host's slab of that key
    place: str
    ticket: Ticket
    write: Future[Any] | None


class Activations:
    """The traffic of one trainer's boundary activations and residuals (see the head of this file)."""

    def __init__(self, homes: Homes, lanes: Lanes, writer: Worker) -> None:
        self._homes, self._lanes, self._writer = homes, lanes, writer
        self._host: dict[str, Tensor] = {}
        self._stride: dict[str, int] = {}
        self._fetch_buffers: list[Tensor] = []
        self._staging_write: dict[str, Future[Any]] = {}
        self._turn = 0
        self._reserved: Ticket | None = None
        self._fetched: dict[int, Ticket] = {}  # by turn of the fetch buffers: their last copy in

    def offload(
        self,
        key: str,
        tensors: Sequence[Tensor],
        place: str,
        unit: str,
        after: Ticket,
        *,
        part: int = 0,
        num_parts: int = 1,
    ) -> Packed:
        """Copy tensors to host RAM or NVMe once `after` is due. The caller holds them until the result's ticket is.

        Args:
            part, num_parts: the parts of one key come in order; where none is larger than the first, they share a slab.
        """
        parcels, num_bytes = _pack(tensors)
        if part == 0:
            self._stride[key] = round_up(num_bytes, ALIGN_BYTES)
        offset = 0
        if place == "nvme":
            key = f"{key}.{part}"
            staging = f"spill staging {self._turn}"
            self._turn ^= 1
            slab = self._host_slab(staging, num_bytes)[:num_bytes]
        else:
            stride = self._stride.get(key, 0)
            if num_bytes <= stride:
                offset, room = part * stride, num_parts * stride
            else:  # larger than the first: a slab of its own
                key, room = f"{key}.{part}", num_bytes
            staging = key
            slab = self._host_slab(key, room)[offset : offset + num_bytes]
        with self._lanes.span(D2H, "offload", unit, [after]) as ticket:
            for parcel, tensor in zip(parcels, tensors):
                if parcel.kept is None:
                    self._lanes.copy_into(parcel.view(slab), tensor, D2H)
        write = None
        if place == "nvme":
            write = self._writer.submit(self._spill, key, slab, unit, ticket)
            self._staging_write[staging] = write
        return Packed(parcels, num_bytes, key, offset, place, ticket, write)

    def fetch(
        self, packs: Sequence[Packed], turn: int, unit: str, free: Ticket | None
    ) -> tuple[list[list[Tensor]], Ticket]:
        """Bring packs back into fetch buffer `turn % 2` once `free` is due; blocks while NVMe is read."""
        sources = [self._source(pack, turn, index) for index, pack in enumerate(packs)]
        buffer = self._fetch_buffer(turn, sum(round_up(pack.num_bytes, ALIGN_BYTES) for pack in packs))
        results, start = [], 0
        after = [free, self._reserved, *(pack.ticket for pack in packs)]
        with self._lanes.span(H2D, "fetch", unit, after) as ticket:
            for pack, source in zip(packs, sources):
                target = buffer[start : start + pack.num_bytes]
                for parcel in pack.parcels:
                    if parcel.kept is None:
                        self._lanes.copy_into(parcel.view(target), parcel.view(source), H2D)
                results.append([p.view(target) if p.kept is None else p.kept for p in pack.parcels])
                start += round_up(pack.num_bytes, ALIGN_BYTES)
        self._fetched[turn % NUM_FETCH_BUFFERS] = ticket
        return results, ticket

    def reserve(self, fetch_bytes: int) -> None:
        """Make the fetch buffers at least this large; called between the sweeps, when none is in use."""
        if fetch_bytes and (not self._fetch_buffers or self._fetch_buffers[0].numel() < fetch_bytes):
            self._fetch_buffers = []
            made = self._lanes.make_copy_buffers(NUM_FETCH_BUFFERS, fetch_bytes, torch.uint8)
            self._fetch_buffers, self._reserved = made

    def _fetch_buffer(self, turn: int, num_bytes: int) -> Tensor:
        assert num_bytes <= self._fetch_buffers[0].numel(), "reserve() was called for less"
        return self._fetch_buffers[turn % NUM_FETCH_BUFFERS]

    def _host_slab(self, key: str, num_bytes: int) -> Tensor:
        if key in self._staging_write:
            self._staging_write[key].result()
        slab = self._host.get(key)
        if slab is None or slab.numel() < num_bytes:
            slab = self._host[key] = allocate_slab(max(1, num_bytes), pin=self._lanes.is_cuda, name=f"offload {key}")
        return slab

    def _spill(self, key: str, slab: Tensor, unit: str, ticket: Ticket) -> None:
        ticket.synchronize()
        assert self._homes.spill is not None
        with self._lanes.span(NVME_WRITE, "spill", unit):
            self._homes.spill.write(key, slab)
        self._lanes.count(NVME_WRITE, slab.numel())

    def _source(self, pack: Packed, turn: int, index: int) -> Tensor:
        """Return the host's copy of a pack; what was spilled is read to one of the pinned buffers of this turn."""
        if pack.place != "nvme":
            return self._host[pack.key][pack.offset_bytes : pack.offset_bytes + pack.num_bytes]
        copied = self._fetched.get(turn % NUM_FETCH_BUFFERS)
        if copied is not None:
            copied.synchronize()  # the last copy out of these buffers
        assert pack.write is not None
        assert self._homes.spill is not None
        pack.write.result()
        slab = self._host_slab(f"unspill {turn % NUM_FETCH_BUFFERS} {index}", pack.num_bytes)
        with self._lanes.span(NVME_READ, "unspill", pack.key):
            self._homes.spill.read_into(pack.key, slab[: pack.num_bytes])
        self._lanes.count(NVME_READ, pack.num_bytes)
        return slab


def _pack(tensors: Sequence[Tensor]) -> tuple[list[Parcel], int]:
    parcels, position = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        kept = tensor if size < MIN_MOVED_BYTES else None
        stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
        parcels.append(Parcel(kept, position, tuple(tensor.shape), tuple(stride), tensor.dtype))
        if kept is None:
            position += round_up(size, ALIGN_BYTES)
    return parcels, position


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
