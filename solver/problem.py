"""What the planner is asked: a model's costs unit by unit, and a machine.

Sizes are bytes, times ms, rates GB/s (1e9 bytes per second). Everything that depends on the batch is **per chunk**
(one microbatch); `Problem.num_microbatches` chunks make a step. A `Problem` is plain data: it comes from measuring
(the trainer's profile) or from arithmetic (`costs.problem_from_config`), and goes to JSON and back without loss.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lazytrain.solver.errors import PlannerError

T = TypeVar("T")
VERSION = 1
MAX_BYTES = 1 << 50  # 1 PiB: beyond it a size is a mistake of units
MAX_MS = 1e9  # eleven days
MAX_RATE = 1e6  # GB/s, TFLOP/s or Gparam/s
MAX_BLOCKS = 1024
MAX_MICROBATCHES = 65536


def load_json(path: str | Path, what: str, parse: Callable[[object], T]) -> T:
    """Return what `parse` makes of a JSON file, a plan or a problem; raises `PlannerError` with the file's name."""
    try:
        return parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise PlannerError(f"{path} can't be read as a {what}: {error}") from error
    except PlannerError as error:
        raise PlannerError(f"{path}: {error}") from error


def check_number(value: object, where: str, *, low: float, high: float, integer: bool = False) -> None:
    """Raise `PlannerError` unless `value` is a finite number in [low, high] (and integral where asked)."""
    kind = "a whole number" if integer else "a number"
    is_number = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise PlannerError(f"{where} is {value!r}; it must be {kind} from {low:g} to {high:g}")
    if not low <= value <= high:  # type: ignore[operator]
        raise PlannerError(f"{where} is {value!r}; it must lie between {low:g} and {high:g} (check its unit)")


def _take(cls: type, data: object, where: str) -> dict[str, Any]:
    """Return `data` as keyword arguments of the dataclass `cls`, or name the first unknown or missing field."""
    if not isinstance(data, Mapping):
        raise PlannerError(f"{where} is {type(data).__name__}; it must be an object")
    known = {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            raise PlannerError(f"{where} has the unknown field {key!r}; known are {', '.join(known)}")
    optional = {f.name for f in known.values() if f.default is not f.default_factory}
    for name in known:
        if name not in data and name not in optional:
            raise PlannerError(f"{where} lacks the field {name!r}")
    return dict(data)


@dataclass(frozen=True, kw_only=True)
class ResidualPoint:
    """One point of a unit's measured curve: what forward keeps, and what that makes of the times. All per chunk.

    Point 0 keeps nothing: `residual_bytes` is 0 and `backward_ms` includes the recompute.
    `workspace_bytes` is what forward or backward needs beside inputs and outputs, the larger of the two.
    `forward_ms` is beside updates on the CPU, which may make launches late; `quiet_forward_ms` without; 0 = the same.
    """

    residual_bytes: int
    forward_ms: float
    backward_ms: float
    workspace_bytes: int
    quiet_forward_ms: float = 0.0

    @property
    def forward_alone_ms(self) -> float:
        """Return forward's time where the CPU updates nothing meanwhile."""
        return self.quiet_forward_ms or self.forward_ms

    def validate(self, where: str) -> None:
        """Raise `PlannerError` for a number that can't be."""
        for name in ("residual_bytes", "workspace_bytes"):
            check_number(getattr(self, name), f"{where}.{name}", low=0, high=MAX_BYTES, integer=True)
        for name in ("forward_ms", "backward_ms", "quiet_forward_ms"):
            check_number(getattr(self, name), f"{where}.{name}", low=0, high=MAX_MS)


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """The costs of embed, of one block, or of head.

    Attributes:
        num_params: owned by the unit; a tied head's matrix belongs to the embed.
        weight_bytes, state_bytes, grad_bytes: working weights; moments, scales and master correction; grads in the
            working dtype.
        boundary_bytes: the unit's input, per chunk.
        points: the residual curve, at least one point, the first of which keeps nothing. Embed and head have one;
            head's `forward_ms` is 0 and its `backward_ms` is loss and gradients.
        cpu_update_ms, device_update_ms: one AdamW update of the whole unit.
    """

    name: str
    kind: str
    num_params: int
    weight_bytes: int
    state_bytes: int
    grad_bytes: int
    boundary_bytes: int
    points: tuple[ResidualPoint, ...]
    cpu_update_ms: float
    device_update_ms: float

    def validate(self, where: str) -> None:
        """Raise `PlannerError` for a number that can't be, or a curve without a first point of 0 bytes."""
        for name in ("num_params", "weight_bytes", "state_bytes", "grad_bytes", "boundary_bytes"):
            check_number(getattr(self, name), f"{where}.{name}", low=0, high=MAX_BYTES, integer=True)
        for name in ("cpu_update_ms", "device_update_ms"):
            check_number(getattr(self, name), f"{where}.{name}", low=0, high=MAX_MS)
        if not self.points:
            raise PlannerError(f"{where}.points is empty; a unit needs at least the point that keeps nothing")
        for index, point in enumerate(self.points):
            point.validate(f"{where}.points[{index}]")
        if self.points[0].residual_bytes != 0:
            raise PlannerError(f"{where}.points[0].residual_bytes is {self.points[0].residual_bytes}; it must be 0")

    def without_cpu_updates(self) -> "UnitCost":
        """Return the unit's costs where the CPU updates nothing meanwhile."""
        points = (replace(point, forward_ms=point.forward_alone_ms) for point in self.points)
        return replace(self, points=tuple(points))

    @classmethod
    def from_dict(cls, data: object, where: str) -> "UnitCost":
        """Return the unit that `to_dict` wrote."""
        values = _take(cls, data, where)
        points = values["points"]
        if not isinstance(points, list | tuple):
            raise PlannerError(f"{where}.points is {type(points).__name__}; it must be a list")
        taken = (_take(ResidualPoint, p, f"{where}.points[{i}]") for i, p in enumerate(points))
        return cls(**{**values, "points": tuple(ResidualPoint(**p) for p in taken)})


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine: budgets that a plan may use, and rates.

    Attributes:
        device_memory_bytes, host_memory_bytes, nvme_bytes: what the plan may fill (context, fragmentation and other
            programs already taken off).
        h2d_gbs, d2h_gbs: pinned copies beside updates on the CPU, the other direction busy most of the time.
        quiet_link_gbs: with both busy all the time where the CPU updates nothing, as in backward; 0 = no faster.
        dram_gbs: how fast copies use up the time of the host's DRAM, which updates on the CPU keep busy; where the
            device is the host's own RAM, the rate of its copies, reads and writes together.
        copy_latency_ms: fixed cost of one copy.
        matmul_tflops: achievable by large bf16 matrix products, for analytic costs only.
        is_estimate: data sheet, not measured.
    """

    name: str
    device_memory_bytes: int
    host_memory_bytes: int
    nvme_bytes: int
    h2d_gbs: float
    d2h_gbs: float
    nvme_read_gbs: float
    nvme_write_gbs: float
    dram_gbs: float
    copy_latency_ms: float
    matmul_tflops: float
    device_memory_gbs: float
    cpu_update_gparams_s: float
    device_update_gparams_s: float
    is_estimate: bool
    quiet_link_gbs: float = 0.0

    def validate(self, where: str = "hardware") -> None:
        """Raise `PlannerError` for a number that can't be."""
        for name in ("device_memory_bytes", "host_memory_bytes", "nvme_bytes"):
            least = 0 if name == "nvme_bytes" else 1
            check_number(getattr(self, name), f"{where}.{name}", low=least, high=MAX_BYTES, integer=True)
        for field in fields(self):
            if field.name.endswith(("_gbs", "_tflops", "_gparams_s")):
                low = 0.0 if field.name == "quiet_link_gbs" else 1e-6
                check_number(getattr(self, field.name), f"{where}.{field.name}", low=low, high=MAX_RATE)
        check_number(self.copy_latency_ms, f"{where}.copy_latency_ms", low=0, high=1e3)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object, where: str = "hardware") -> "Hardware":
        """Return the machine that `to_dict` wrote; raises `PlannerError` naming the wrong field."""
        hardware = cls(**_take(cls, data, where))
        hardware.validate(where)
        return hardware


@dataclass(frozen=True, kw_only=True)
class Problem:
    """All that the planner must know. See the head of this file for units.

    Attributes:
        tokens_per_step: of all chunks, for tokens/s.
        prefetch_depths: the numbers of weight slots to try, each at least 2.
        allow_nvme, allow_cpu_update, allow_device_update, allow_residuals: what the executor can do here.
        allow_streamed_embed: the embed's backward does without its weights. allow_streamed_head: for comparisons.
        tied: head uses the embed's matrix, so that the embed's grads exist from the head on, and isn't streamed itself.
        device_is_host: a run on the CPU: the "device" is a part of the host's RAM, so that `device_memory_bytes` is a
            limit inside `host_memory_bytes`; a copy is a memcpy; compute, copies and updates share the cores.
        train_flops: of one step by the usual count (6 per parameter and token, attention on top), 0 = unknown.
        file_head_bytes: the room before weights or states in a file on NVMe; it grows with the tensors of a unit.
        library_bytes: device memory that libraries hold for the whole run, cuBLAS's workspace above all.
        embed_sums_densely: the embed's grads are summed in an fp32 tensor of their size; else some columns at a time,
            which its workspace includes.
    """

    version: int = VERSION
    model: str
    embed: UnitCost
    blocks: tuple[UnitCost, ...]
    head: UnitCost
    num_microbatches: int
    hardware: Hardware
    prefetch_depths: tuple[int, ...] = (2, 3)
    allow_nvme: bool = False
    tokens_per_step: int
    device_is_host: bool = False
    allow_cpu_update: bool = True
    allow_device_update: bool = True
    allow_residuals: bool = True
    allow_streamed_embed: bool = True
    allow_streamed_head: bool = True
    tied: bool = False
    train_flops: float = 0.0
    file_head_bytes: int = 16384
    library_bytes: int = 0
    embed_sums_densely: bool = True

    @cached_property
    def units(self) -> tuple[UnitCost, ...]:
        """Return all units in forward order."""
        return (self.embed, *self.blocks, self.head)

    def without_cpu_updates(self) -> "Problem | None":
        """Return the problem in which the CPU updates nothing: copies and launches are faster; None if not a choice."""
        link, old = self.hardware.quiet_link_gbs, self.hardware
        hardware = replace(old, h2d_gbs=max(link, old.h2d_gbs), d2h_gbs=max(link, old.d2h_gbs))
        blocks = tuple(block.without_cpu_updates() for block in self.blocks)
        is_faster = link > old.h2d_gbs or blocks != self.blocks
        if not (self.allow_cpu_update and self.allow_device_update and is_faster):
            return None
        return replace(self, hardware=hardware, blocks=blocks, allow_cpu_update=False)

    @cached_property
    def digest(self) -> str:
        """Return a short hash of everything in the problem; a plan names the problem it was made for by it."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def validate(self) -> None:
        """Raise `PlannerError` naming the first field that can't be used."""
        if self.version != VERSION:
            raise PlannerError(f"problem.version is {self.version!r}; this planner reads version {VERSION}")
        check_number(len(self.blocks), "the number of blocks", low=1, high=MAX_BLOCKS, integer=True)
        check_number(self.num_microbatches, "num_microbatches", low=1, high=MAX_MICROBATCHES, integer=True)
        check_number(self.tokens_per_step, "tokens_per_step", low=1, high=1e12, integer=True)
        check_number(self.train_flops, "train_flops", low=0, high=1e24)
        check_number(self.file_head_bytes, "file_head_bytes", low=0, high=MAX_BYTES, integer=True)
        check_number(self.library_bytes, "library_bytes", low=0, high=MAX_BYTES, integer=True)
        if not self.prefetch_depths:
            raise PlannerError("prefetch_depths is empty; give at least one depth, for example 2")
        for depth in self.prefetch_depths:
            check_number(depth, "prefetch_depths", low=2, high=64, integer=True)
        if not (self.allow_cpu_update or self.allow_device_update):
            raise PlannerError("allow_cpu_update and allow_device_update are both false; updates need one of them")
        for unit in self.units:
            unit.validate(f"unit {unit.name!r}")
        for edge in (self.embed, self.head):
            if len(edge.points) != 1:
                raise PlannerError(
                    f"unit {edge.name!r} has {len(edge.points)} residual points; embed and head have one"
                )
        self.hardware.validate()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> "Problem":
        """Return the problem that `to_dict` wrote; raises `PlannerError` naming the wrong field."""
        values = _take(cls, data, "problem")
        for name in ("embed", "head"):
            values[name] = UnitCost.from_dict(values[name], f"problem.{name}")
        if not isinstance(values["blocks"], list | tuple):
            raise PlannerError(f"problem.blocks is {type(values['blocks']).__name__}; it must be a list")
        values["blocks"] = tuple(UnitCost.from_dict(b, f"problem.blocks[{i}]") for i, b in enumerate(values["blocks"]))
        values["hardware"] = Hardware.from_dict(values["hardware"], "problem.hardware")
        values["prefetch_depths"] = tuple(values.get("prefetch_depths", (2, 3)))
        problem = cls(**values)
        problem.validate()
        return problem

    @classmethod
    def load(cls, path: str | Path) -> "Problem":
        """Read a problem.json; raises `PlannerError` with the file's name."""
        return load_json(path, "problem", cls.from_dict)
