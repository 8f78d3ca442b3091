"""The planner's answer: for every unit, where its things live, what forward keeps and where the update runs.

    weights         device = resident for the whole run; host, nvme = streamed through `prefetch_depth` slots; embed and
                    head (host only) through one slot of their own
    states          8-bit moments, scales, master correction; device only beside resident weights and a device update
    update          cpu, or device ("update on load")
    grads           where accumulated grads wait for the norm
    residual_point  index in the unit's residual curve; 0 = recompute all
    residuals       where forward's residuals wait for backward; none if and only if residual_point is 0
    boundary        where the unit's input waits for backward

A plan is saved as JSON, one line for a run of equal blocks, so that a person can read and edit it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from lazytrain.solver.errors import PlannerError
from lazytrain.solver.problem import Problem, UnitCost, check_number, load_json

VERSION = 1
DEVICE, HOST, NVME, CPU, NONE = "device", "host", "nvme", "cpu", "none"
PLACES = {
    "weights": (DEVICE, HOST, NVME),
    "states": (DEVICE, HOST, NVME),
    "update": (CPU, DEVICE),
    "grads": (DEVICE, HOST),
    "residuals": (NONE, DEVICE, HOST, NVME),
    "boundary": (DEVICE, HOST, NVME, NONE),
}


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The decisions for one unit (see the head of this file)."""

    weights: str = DEVICE
    states: str = DEVICE
    update: str = DEVICE
    grads: str = DEVICE
    residual_point: int = 0
    residuals: str = NONE
    boundary: str = DEVICE

    @property
    def is_streamed(self) -> bool:
        """Return whether the working weights come through slots."""
        return self.weights != DEVICE

    @property
    def moves_states(self) -> bool:
        """Return whether the states come to the device for the update and leave it again."""
        return self.update == DEVICE and self.states != DEVICE

    @property
    def updates_in_place(self) -> bool:
        """Return whether the update needs nothing from elsewhere: it runs as soon as the norm is known."""
        return self.update == DEVICE and self.weights == DEVICE and self.states == DEVICE

    @property
    def uses_nvme(self) -> bool:
        """Return whether anything of the unit lives on NVMe or is spilled there."""
        return NVME in (self.weights, self.states, self.residuals, self.boundary)

    def contradiction(self) -> tuple[str, str] | None:
        """Return (field, reason) of the first rule that the decisions break, or None."""
        for name, allowed in PLACES.items():
            if getattr(self, name) not in allowed:
                return name, f"must be one of {', '.join(allowed)}"
        if self.states == DEVICE and not (self.weights == DEVICE and self.update == DEVICE):
            return "states", "can be on the device only if weights are and the update runs there"
        if self.update == CPU and self.grads != HOST:
            return "grads", "must be host where the update runs on the cpu"
        if self.weights == DEVICE and self.update == DEVICE and self.grads != DEVICE:
            return "grads", "must be device where resident weights are updated on the device"
        if (self.residuals == NONE) != (self.residual_point == 0):
            return "residuals", "must be none if and only if residual_point is 0"
        return None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the simulator says of a plan: a steady step's time, peaks and bytes over the link per step."""

    step_ms: float
    device_peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    h2d_bytes: int
    d2h_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for all units, and what they are expected to give.

    Attributes:
        prefetch_depth: the number of weight slots.
        chunks_behind: of how many chunks the offloads may still be under way while the next chunk passes a block.
        solver: statistics: status, gap, seconds, source ("milp" or "fallback:<name>") ...
        problem_digest: `Problem.digest` of the problem that was solved.
    """

    version: int = VERSION
    model: str
    num_microbatches: int
    prefetch_depth: int
    embed: UnitPlan
    blocks: tuple[UnitPlan, ...]
    head: UnitPlan
    predicted: Predicted | None = None
    solver: Mapping[str, Any] = field(default_factory=dict)
    problem_digest: str = ""
    chunks_behind: int = 1

    @cached_property
    def units(self) -> tuple[UnitPlan, ...]:
        """Return all units' decisions in forward order."""
        return (self.embed, *self.blocks, self.head)

    def validate(self, problem: Problem) -> None:
        """Check that the plan is consistent and belongs to `problem`; memory is `memory.find_shortage`'s to check.

        Raises:
            PlannerError: names the unit, the field, its value and the rule. Remedy: edit that field, or plan anew.
        """
        if self.version != VERSION:
            raise PlannerError(f"plan.version is {self.version!r}; this planner reads version {VERSION}")
        if len(self.blocks) != len(problem.blocks):
            raise PlannerError(f"the plan has {len(self.blocks)} blocks, the model {len(problem.blocks)}: plan anew")
        if self.num_microbatches != problem.num_microbatches:
            raise PlannerError(
                f"the plan cuts a step in {self.num_microbatches} chunks, the run in {problem.num_microbatches}: "
                "plan anew"
            )
        check_number(self.prefetch_depth, "plan.prefetch_depth", low=2, high=64, integer=True)
        check_number(self.chunks_behind, "plan.chunks_behind", low=1, high=self.num_microbatches, integer=True)
        for unit, decisions in zip(problem.units, self.units, strict=True):
            _validate_unit(unit, decisions, problem)
        lost = self.find_lost_boundary()
        if lost is not None:
            raise _unit_error(problem.blocks[lost[0]], self.blocks[lost[0]], "boundary", lost[1])
        for u, unit, decisions in ((0, problem.embed, self.embed), (-1, problem.head, self.head)):
            places = list_weight_places(problem, u)
            for name, allowed in (("weights", places), ("residual_point", (0,)), ("boundary", (DEVICE,))):
                if getattr(decisions, name) not in allowed:
                    raise _unit_error(unit, decisions, name, f"must be {' or '.join(map(str, allowed))} for this end")

    def find_lost_boundary(self) -> tuple[int, str] | None:
        """Return (block, reason) of the first boundary that is not kept and can't be computed again, or None."""
        start = 0
        for i, block in enumerate(self.blocks):
            if block.boundary != NONE:
                start = i
            elif i == 0:
                return i, "must be kept for the first block"
            elif block.residual_point != 0:
                return i, "must be kept where residuals are"
            elif self.blocks[start].boundary != DEVICE:
                return i, f"can be none only if that of block {start}, the last kept one before, is on the device"
        return None

    @property
    def drops_boundaries(self) -> bool:
        """Return whether some boundary is computed again."""
        return any(block.boundary == NONE for block in self.blocks)

    def with_prediction(self, predicted: Predicted, **statistics: Any) -> "Plan":
        """Return the same decisions with another prediction and further statistics."""
        return replace(self, predicted=predicted, solver={**self.solver, **statistics})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; equal neighbours among the blocks share one entry `{"first", "last", ...}`."""
        data = asdict(self)
        data["solver"] = dict(self.solver)
        data["blocks"] = [{"first": a, "last": b, **asdict(d)} for a, b, d in find_runs(self.blocks)]
        return data

    @classmethod
    def from_dict(cls, data: object) -> "Plan":
        """Return the plan that `to_dict` wrote; raises `PlannerError` naming the wrong field."""
        values = _take(cls, data, "plan")
        values["embed"] = _read_unit(values["embed"], "plan.embed")
        values["head"] = _read_unit(values["head"], "plan.head")
        values["blocks"] = tuple(_read_blocks(values["blocks"]))
        if values.get("predicted") is not None:
            values["predicted"] = Predicted(**_take(Predicted, values["predicted"], "plan.predicted"))
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one line per run of equal blocks."""
        data = self.to_dict()
        lines = [f"  {json.dumps(key)}: {_to_json(value)}" for key, value in data.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote or a person edited; raises `PlannerError` with the file's name."""
        return load_json(path, "plan", cls.from_dict)


def list_weight_places(problem: Problem, u: int) -> tuple[str, ...]:
    """Return where the weights of unit u, counted in forward order, may live."""
    if u not in (0, -1, len(problem.units) - 1):
        return (DEVICE, HOST, NVME) if problem.allow_nvme else (DEVICE, HOST)
    is_streamable = problem.allow_streamed_embed if u == 0 else problem.allow_streamed_head and not problem.tied
    return (DEVICE, HOST) if is_streamable else (DEVICE,)


def make_plan(problem: Problem, units: Sequence[UnitPlan], prefetch_depth: int) -> Plan:
    """Return the units' decisions, in forward order, as a plan."""
    return Plan(
        model=problem.model,
        num_microbatches=problem.num_microbatches,
        prefetch_depth=prefetch_depth,
        embed=units[0],
        blocks=tuple(units[1:-1]),
        head=units[-1],
        problem_digest=problem.digest,
        chunks_behind=least_chunks_behind(problem.num_microbatches),
    )


def least_chunks_behind(num_microbatches: int) -> int:
    """Return `Plan.chunks_behind` of plans that are compared.

    With one, a chunk that is less than a step would wait for the link at the start of every other block.
    """
    return min(num_microbatches, 2)


def find_runs(blocks: tuple[UnitPlan, ...]) -> Iterator[tuple[int, int, UnitPlan]]:
    """Yield (first block_idx, last block_idx, decisions) for every run of equal neighbours."""
    start = 0
    for decisions, group in groupby(blocks):
        count = len(list(group))
        yield start, start + count - 1, decisions
        start += count


def _to_json(value: object) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


def _take(cls: type, data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise PlannerError(f"{where} is {type(data).__name__}; it must be an object")
    known = [f.name for f in fields(cls)]
    for key in data:
        if key not in known:
            raise PlannerError(f"{where} has the unknown field {key!r}; known are {', '.join(known)}")
    try:
        cls(**data)
    except TypeError as error:
        raise PlannerError(f"{where} is incomplete: {error}") from error
    return dict(data)


def _read_unit(data: object, where: str) -> UnitPlan:
    return UnitPlan(**_take(UnitPlan, data, where))


def _read_blocks(runs: object) -> Iterator[UnitPlan]:
    if not isinstance(runs, list):
        raise PlannerError(f"plan.blocks is {type(runs).__name__}; it must be a list")
    expected = 0
    for index, run in enumerate(runs):
        where = f"plan.blocks[{index}]"
        if not isinstance(run, Mapping) or not {"first", "last"} <= set(run):
            raise PlannerError(f"{where} must be an object with the fields first and last")
        first, last = run["first"], run["last"]
        check_number(first, f"{where}.first", low=expected, high=expected, integer=True)
        check_number(last, f"{where}.last", low=first, high=first + 1024, integer=True)
        unit = _read_unit({k: v for k, v in run.items() if k not in ("first", "last")}, where)
        yield from [unit] * (last - first + 1)
        expected = last + 1


def _unit_error(unit: UnitCost, decisions: UnitPlan, name: str, reason: str) -> PlannerError:
    return PlannerError(f"plan, unit {unit.name!r}: {name} is {getattr(decisions, name)!r}; it {reason}")


def _validate_unit(unit: UnitCost, decisions: UnitPlan, problem: Problem) -> None:
    broken = decisions.contradiction()
    if broken is not None:
        raise _unit_error(unit, decisions, *broken)
    if not isinstance(decisions.residual_point, int) or not 0 <= decisions.residual_point < len(unit.points):
        raise _unit_error(unit, decisions, "residual_point", f"must be from 0 to {len(unit.points) - 1}")
    if not problem.allow_nvme:
        for name in ("weights", "states", "residuals", "boundary"):
            if getattr(decisions, name) == NVME:
                raise _unit_error(unit, decisions, name, "can't be nvme where NVMe is not allowed")
