"""Where each unit's working weights, states and grads live between their uses, as the plan says.

A home is host RAM (a pinned slab of exact size), the device (resident) or NVMe (a file written anew by every update).
Nothing here moves data on its own but `load_unit` at the start and the readers at the end: the sweep does.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lazytrain.base import Model, ParamSpec, Unit
from lazytrain.lanes import NVME_READ, NVME_WRITE, Lanes, Ticket, Worker
from lazytrain.layout import UnitLayout
from lazytrain.optimizer import AdamWSettings
from lazytrain.slabs import allocate_slab
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.spill import SpillStore
from lazytrain.store_slots import count_slots
from lazytrain.store_units import (
    head_room,
    packed_bytes,
    packed_weights,
    states_header,
    unpack_weights_into,
    weights_header,
)
from lazytrain.tensorwriter import FileRecord

TensorSource = Callable[[str], Tensor]


@dataclass(kw_only=True)
class UnitHome:
    """One unit's memory. `*_host` and `*_device` are None where the plan puts that thing elsewhere."""

    index: int
    unit: Unit
    layout: UnitLayout
    plan: UnitPlan
    # What stands before each in the file of a checkpoint, and so before the blob on NVMe: "weights", "state".
    headers: Mapping[str, bytes]
    weights_host: Tensor | None = None
    weights_device: Tensor | None = None
    state_host: Tensor | None = None
    state_device: Tensor | None = None
    grads_host: Tensor | None = None
    grads_device: Tensor | None = None
    weights_write: Future[Any] | None = None  # of the newest generation on NVMe; readers wait for it
    state_write: Future[Any] | None = None
    weights_out: Ticket | None = None  # the d2h copy that last wrote `weights_host`
    grads_out: Ticket | None = None
    cpu_update: Future[Any] | None = None  # the running update of this unit on the CPU

    @property
    def has_params(self) -> bool:
        """Return whether there is anything to move or update."""
        return self.layout.numel > 0


# Writes a unit's initial weight slab and state slab, both on the host.
FillUnit = Callable[[UnitHome, Tensor, Tensor], None]


@dataclass(kw_only=True)
class Homes:
    """All units' homes in forward order: embed, blocks, head."""

    units: list[UnitHome]
    spill: SpillStore | None
    lanes: Lanes
    dtype: torch.dtype
    shares_files: bool = False  # checkpoints may link what is on NVMe: there is room for it
    _staging: dict[str, Tensor] = field(default_factory=dict)

    def weights_slab(self, home: UnitHome, staging: str = "") -> Tensor:
        """Return the current working weights as a flat CPU tensor: the slab itself, or NVMe bytes read to staging.

        Args:
            staging: names a reusable buffer for what comes from NVMe; empty = a new tensor, the caller's own.
        """
        if home.weights_host is not None:
            return home.weights_host
        if home.weights_device is not None:
            return home.weights_device.cpu()
        slab = self._read_target(home, "weights", home.layout.weight_bytes, staging).view(home.layout.dtype)
        unpack_weights_into(home.layout, partial(self._read_into, home, "weights"), slab)
        return slab

    def state_slab(self, home: UnitHome, staging: str = "") -> Tensor:
        """Return the current optimizer states as a CPU byte tensor (see `weights_slab`)."""
        if home.state_host is not None:
            return home.state_host
        if home.state_device is not None:
            return home.state_device.cpu()
        slab = self._read_target(home, "state", home.layout.state_bytes, staging)
        self._read_into(home, "state", slab)
        return slab

    def write(self, home: UnitHome, what: str, slab: Tensor) -> None:
        """Write a new generation of `what` ("weights" or "state") to NVMe."""
        assert self.spill is not None
        data = packed_weights(home.layout, slab.view(home.layout.dtype)) if what == "weights" else slab
        with self.lanes.span(NVME_WRITE, what, home.unit.name):
            self.spill.write(file_name(home, what), data, head_bytes=len(home.headers[what]))
        self.lanes.count(NVME_WRITE, data.numel())

    def link(self, home: UnitHome, what: str, target: Path) -> FileRecord | None:
        """Give `what` on NVMe a name in a checkpoint; return its record, or None where the file system can't do that.

        Raises:
            OSError: the disk doesn't take what was written.
        """
        assert self.spill is not None
        header = home.headers[what]
        checksums = self.spill.link(file_name(home, what), target, header)
        if checksums is None:
            return None
        return FileRecord(len(header) + blob_bytes(home, what), zlib.crc32(header), {}, checksums)

    def staging(self, key: str, what: str, num_bytes: int) -> Tensor:
        """Return a reusable pinned byte buffer named `key`, large enough for any unit's weights or state on NVMe.

        Args:
            what: "weights" or "state".
        """
        buffer = self._staging.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            if what == "weights":
                sizes = [h.layout.weight_bytes for h in self.units if h.plan.weights == "nvme"]
            else:
                sizes = [h.layout.state_bytes for h in self.units if h.plan.states == "nvme"]
            size = max(num_bytes, *sizes)
            buffer = self._staging[key] = allocate_slab(size, pin=self.lanes.is_cuda, name=f"staging {key}")
        return buffer[:num_bytes]

    def _read_target(self, home: UnitHome, what: str, num_bytes: int, staging: str) -> Tensor:
        pending = home.weights_write if what == "weights" else home.state_write
        if pending is not None:
            pending.result()
        return self.staging(staging, what, num_bytes) if staging else torch.empty(num_bytes, dtype=torch.uint8)

    def _read_into(self, home: UnitHome, what: str, out: Tensor) -> None:
        assert self.spill is not None
        with self.lanes.span(NVME_READ, what, home.unit.name):
            self.spill.read_into(file_name(home, what), out)
        self.lanes.count(NVME_READ, out.numel())


def owned_params(model: Model, unit: Unit) -> dict[str, ParamSpec]:
    """Return a unit's parameters without those that the head shares with the embed, which owns them."""
    return {n: s for n, s in unit.params.items() if not (unit is model.head and n in model.tied)}


def list_layouts(model: Model, settings: AdamWSettings, dtype: torch.dtype) -> list[UnitLayout]:
    """Return the layout of every unit's own parameters, in forward order."""
    return [settings.layout(owned_params(model, unit), dtype) for unit in model.units]


def file_name(home: UnitHome, what: str) -> str:
    """Return the name under which a unit's slab is spilled."""
    return f"{home.index:04d}.{what}"


def build_homes(
    model: Model,
    plan: Plan,
    settings: AdamWSettings,
    *,
    fill: FillUnit,
    dtype: torch.dtype,
    lanes: Lanes,
    spill: SpillStore | None,
    writer: Worker,
    shared_checkpoints: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Homes:
    """Allocate every unit's home and write its initial weights and states there, one unit at a time.

    Args:
        writer: writes to NVMe while the next unit is filled.
        shared_checkpoints: room to take for so many checkpoints that link what is on NVMe; None = they are copies.
    """
    units = _make_units(model, plan, settings, dtype)
    homes = Homes(units=units, spill=spill, lanes=lanes, dtype=dtype, shares_files=shared_checkpoints is not None)
    if spill is not None:
        spill.reserve_lasting(_spill_sizes(units), shared_checkpoints or 0)
    writes: dict[str, Future[Any]] = {}
    for home in units:
        if home.has_params:
            load_unit(homes, home, fill, writer, writes)
        if progress is not None:
            progress(home.unit.name)
    for write in writes.values():
        write.result()
    return homes


def spill_room(
    model: Model, plan: Plan, settings: AdamWSettings, dtype: torch.dtype, shared_checkpoints: int | None
) -> tuple[int, int]:
    """Return the bytes that `build_homes` takes on NVMe: for what lives there, and for the checkpoints that link it."""
    sizes = _spill_sizes(_make_units(model, plan, settings, dtype))
    own_bytes = sum(size * count for size, count in count_slots(sizes, 0).items())
    return own_bytes, sum(sizes) * (shared_checkpoints or 0)


def blob_bytes(home: UnitHome, what: str) -> int:
    """Return the size of "weights" or "state" on NVMe, without the room before it."""
    return packed_bytes(home.layout) if what == "weights" else home.layout.state_bytes


def _make_units(model: Model, plan: Plan, settings: AdamWSettings, dtype: torch.dtype) -> list[UnitHome]:
    units = []
    layouts = list_layouts(model, settings, dtype)
    room = head_room(layouts)
    for index, (unit, unit_plan, layout) in enumerate(zip(model.units, plan.units, layouts, strict=True)):
        headers = {"weights": weights_header(layout, room), "state": states_header(layout, room)}
        units.append(UnitHome(index=index, unit=unit, layout=layout, plan=unit_plan, headers=headers))
    return units


def _spill_sizes(units: Sequence[UnitHome]) -> list[int]:
    """Return the file sizes of what lives on NVMe."""
    places = [(home, what, place) for home in units for what, place in _places(home)]
    return [len(h.headers[what]) + blob_bytes(h, what) for h, what, place in places if place == "nvme" and h.has_params]


def _places(home: UnitHome) -> tuple[tuple[str, str], ...]:
    return ("weights", home.plan.weights), ("state", home.plan.states)


def load_unit(homes: Homes, home: UnitHome, fill: FillUnit, writer: Worker, writes: dict[str, Future[Any]]) -> None:
    """Allocate a unit's home and let `fill(home, weights, state)` write both slabs, on the host.

    Args:
        writes: the last write from each staging buffer; what goes to NVMe is filled in those that updates use.
    """
    plan, layout, device = home.plan, home.layout, homes.lanes.device
    pin = homes.lanes.is_cuda
    places = dict(_places(home))
    staged: dict[str, str] = {}

    def host_slab(what: str, num_bytes: int) -> Tensor:
        if places[what] != "nvme":
            return torch.empty(num_bytes, dtype=torch.uint8)
        key = staged[what] = staging_key(home, what)
        if key in writes:
            writes[key].result()
        return homes.staging(key, what, num_bytes)

    keeps_host_weights = plan.weights == "host" or (plan.weights == "device" and plan.update == "cpu")
    if keeps_host_weights:
        home.weights_host = allocate_slab(layout.weight_bytes, pin=pin, name=f"{home.unit.name} weights").view(
            layout.dtype
        )
    if plan.states == "host":
        home.state_host = allocate_slab(layout.state_bytes, pin=pin, name=f"{home.unit.name} states")
    if plan.grads == "host":
        home.grads_host = allocate_slab(layout.weight_bytes, pin=pin, name=f"{home.unit.name} grads").view(layout.dtype)
    weights = home.weights_host
    if weights is None:
        weights = host_slab("weights", layout.weight_bytes).view(layout.dtype)
    state = home.state_host if home.state_host is not None else host_slab("state", layout.state_bytes)
    fill(home, weights, state)
    if plan.weights == "device":
        home.weights_device = weights.to(device, copy=True)
    if plan.states == "device":
        home.state_device = state.to(device, copy=True)
    for what, slab in (("weights", weights), ("state", state)):
        if what in staged:
            writes[staged[what]] = writer.submit(homes.write, home, what, slab)


def staging_key(home: UnitHome, what: str) -> str:
    """Return the name of the staging buffer from which a unit's "weights" or "state" go to NVMe."""
    return f"update {what}" if home.plan.update == "cpu" else f"out {what} {home.index % 2}"
