"""Where each unit's working weights, states and grads live between their uses, as the plan says.

A home is host RAM (a pinned slab of exact size), the device (resident) or NVMe (a file written anew by every update).
Nothing here moves data on its own but `load_unit` at the start and the readers at the end: the sweep does.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lazytrain.base import Model, ParamSpec, Unit
from lazytrain.lanes import NVME_READ, NVME_WRITE, Lanes, Ticket
from lazytrain.layout import UnitLayout
from lazytrain.optimizer import AdamWSettings
from lazytrain.slabs import allocate_slab
from lazytrain.solver.plan import Plan, UnitPlan
from lazytrain.spill import SpillStore

TensorSource = Callable[[str], Tensor]


@dataclass(kw_only=True)
class UnitHome:
    """One unit's memory. `*_host` and `*_device` are None where the plan puts that thing elsewhere."""

    index: int
    unit: Unit
    layout: UnitLayout
    plan: UnitPlan
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
        return self._read(home, "weights", home.layout.weight_bytes, staging).view(home.layout.dtype)

    def state_slab(self, home: UnitHome, staging: str = "") -> Tensor:
        """Return the current optimizer states as a CPU byte tensor (see `weights_slab`)."""
        if home.state_host is not None:
            return home.state_host
        if home.state_device is not None:
            return home.state_device.cpu()
        return self._read(home, "state", home.layout.state_bytes, staging)

    def write(self, home: UnitHome, what: str, slab: Tensor) -> None:
        """Write a new generation of `what` ("weights" or "state") to NVMe."""
        assert self.spill is not None
        data = slab.view(torch.uint8)
        with self.lanes.span(NVME_WRITE, what, home.unit.name):
            self.spill.write(file_name(home, what), data)
        self.lanes.count(NVME_WRITE, data.numel())

    def staging(self, key: str, num_bytes: int) -> Tensor:
        """Return a reusable pinned byte buffer named `key`, of at least `num_bytes`."""
        buffer = self._staging.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, *(max(h.layout.weight_bytes, h.layout.state_bytes) for h in self.units))
            buffer = self._staging[key] = allocate_slab(size, pin=self.lanes.is_cuda, name=f"staging {key}")
        return buffer[:num_bytes]

    def _read(self, home: UnitHome, what: str, num_bytes: int, staging: str) -> Tensor:
        pending = home.weights_write if what == "weights" else home.state_write
        if pending is not None:
            pending.result()
        assert self.spill is not None
        target = self.staging(staging, num_bytes) if staging else torch.empty(num_bytes, dtype=torch.uint8)
        with self.lanes.span(NVME_READ, what, home.unit.name):
            self.spill.read_into(file_name(home, what), target)
        self.lanes.count(NVME_READ, num_bytes)
        return target


def owned_params(model: Model, unit: Unit) -> dict[str, ParamSpec]:
    """Return a unit's parameters without those that the head shares with the embed, which owns them."""
    return {n: s for n, s in unit.params.items() if not (unit is model.head and n in model.tied)}


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
    progress: Callable[[str], None] | None = None,
) -> Homes:
    """Allocate every unit's home and write its initial weights and states there, one unit at a time."""
    layouts = [settings.layout(owned_params(model, unit), dtype) for unit in model.units]
    units = [
        UnitHome(index=index, unit=unit, layout=layout, plan=unit_plan)
        for index, (unit, layout, unit_plan) in enumerate(zip(model.units, layouts, plan.units, strict=True))
    ]
    homes = Homes(units=units, spill=spill, lanes=lanes, dtype=dtype)
    if spill is not None:
        spill.reserve(_spill_sizes(units))
    for home in units:
        if home.has_params:
            load_unit(homes, home, fill)
        if progress is not None:
            progress(home.unit.name)
    return homes


def _spill_sizes(units: Sequence[UnitHome]) -> list[int]:
    """Return the file sizes of what lives on NVMe, and room for the two that may be written anew at once."""
    sizes = [home.layout.weight_bytes for home in units if home.plan.weights == "nvme"]
    sizes += [home.layout.state_bytes for home in units if home.plan.states == "nvme"]
    return sizes + [max(sizes, default=0)] * (2 if sizes else 0)


def load_unit(homes: Homes, home: UnitHome, fill: FillUnit) -> None:
    """Allocate a unit's home and let `fill(home, weights, state)` write both slabs, on the host."""
    plan, layout, device = home.plan, home.layout, homes.lanes.device
    pin = homes.lanes.is_cuda
    keeps_host_weights = plan.weights == "host" or (plan.weights == "device" and plan.update == "cpu")
    if keeps_host_weights:
        home.weights_host = allocate_slab(layout.weight_bytes, pin=pin, name=f"{home.unit.name} weights").view(
            layout.dtype
        )
    if plan.states == "host":
        home.state_host = allocate_slab(layout.state_bytes, pin=pin, name=f"{home.unit.name} states")
    if plan.grads == "host":
        home.grads_host = allocate_slab(layout.weight_bytes, pin=pin, name=f"{home.unit.name} grads").view(layout.dtype)
    weights = home.weights_host if home.weights_host is not None else torch.empty(layout.numel, dtype=layout.dtype)
    state = home.state_host if home.state_host is not None else torch.empty(layout.state_bytes, dtype=torch.uint8)
    fill(home, weights, state)
    if plan.weights == "device":
        home.weights_device = weights.to(device, copy=True)
    if plan.states == "device":
        home.state_device = state.to(device, copy=True)
    if plan.weights == "nvme":
        homes.write(home, "weights", weights)
    if plan.states == "nvme":
        homes.write(home, "state", state)
