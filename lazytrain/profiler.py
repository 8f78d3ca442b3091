"""Measure what the planner needs to know of a model on this machine, at the shapes of the run.

Every time is the median of repeats that fill `floor_s`, on random weights of the real shapes. Forward, head and embed
run as the sweep runs them; a block's backward is what it adds to its forward; updates go from block to block; copies
are of the size of a block.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.base import Batch, Context, Model, Unit, count_rows
from lazytrain.determinism import deterministic
from lazytrain.engine import split_batch
from lazytrain.homes import list_layouts, owned_params
from lazytrain.links import Work, measure_library_bytes, measure_machine
from lazytrain.optimizer import AdamWSettings
from lazytrain.profile_cache import ProfileCache, describe_machine, describe_work, make_key
from lazytrain.programs import BlockPrograms, ProgramCache
from lazytrain.solver.problem import Hardware, Problem, UnitCost
from lazytrain.store_units import head_room
from lazytrain.timer import Timer
from lazytrain.unit_costs import (
    end_params,
    make_program,
    make_update,
    profile_block,
    profile_embed,
    profile_head,
    random_unit_params,
)

# What updates on the CPU are timed over, where the blocks have so much: a processor's cache holds hundreds of MiB.
UPDATED_BYTES = 2 << 30
# Of the device: batches, positions, sums of squares, and what cuts of 512 bytes take.
SMALL_BYTES = 16 << 20


@dataclass(kw_only=True)
class Profiler:
    """Measures one model's costs on this machine, for the planner; the machine itself once.

    Attributes:
        batch: an example of the run's batches (CPU tensors), the largest shape.
        limits: what a plan may fill: "device", "host" and, if `spill_dir` is given, "nvme", in bytes.
        spill_dir: where NVMe would be used; None = NVMe is not part of the plan.
        floor_s: least time spent on each measurement.
        allow_cpu_update, allow_device_update: where the plan may put updates.
        cache: keeps what was measured for the next run; None = measure anew.
    """

    model: Model
    settings: AdamWSettings
    batch: Batch
    device: torch.device
    dtype: torch.dtype
    programs: ProgramCache
    limits: Mapping[str, int]
    name: str = "model"
    spill_dir: Path | None = None
    floor_s: float = 0.2
    allow_cpu_update: bool = True
    allow_device_update: bool = True
    cache: ProfileCache | None = None
    _hardware: Hardware | None = field(default=None, repr=False)

    def problem(self, num_microbatches: int, report: Callable[[str], None] = lambda line: None) -> Problem:
        """Return the planner's problem for a step cut in that many chunks, measured or kept; costs are per chunk.

        Args:
            report: called with one line for each phase that takes long.
        """
        if self.cache is None:
            return self._measure(num_microbatches, report)
        key = self._key(num_microbatches)
        kept = self.cache.load(key, self.limits)
        if kept is not None:
            report(f"profile: measured before, in {self.cache.path(key)}")
            self.compile(num_microbatches, report)
            return replace(
                kept,
                model=self.name,
                allow_cpu_update=self.allow_cpu_update,
                allow_device_update=self.allow_device_update,
            )
        problem = self._measure(num_microbatches, report)
        self.cache.save(key, problem)
        return problem

    def _key(self, num_microbatches: int) -> str:
        work = describe_work(self.model, self.settings, self.batch)
        how = {"dtype": self.dtype, "programs": self.programs.options, "microbatches": num_microbatches}
        disk = None if self.spill_dir is None else os.stat(_existing(self.spill_dir)).st_dev
        return make_key({**describe_machine(self.device), **work, **how, "floor_s": self.floor_s, "disk": disk})

    def _chunk(self, num_microbatches: int) -> Batch:
        part = split_batch(self.batch, num_microbatches)[0]
        return {key: value.to(self.device) for key, value in part.items()}

    def compile(self, num_microbatches: int, report: Callable[[str], None]) -> None:
        """Compile the programs of all kinds of blocks, where they are compiled at all, and load the update's kernels.

        `problem` does so too: no step's time or memory includes it.
        """
        if not self.programs.compiles:
            return
        model, timer = self.model, Timer(device=self.device, floor_s=self.floor_s)
        chunk = self._chunk(num_microbatches)
        with torch.no_grad(), deterministic(self.device):
            ctx = model.context(chunk, self.dtype)
            x_btd = model.embed.fn(end_params(model, self.device, self.dtype)[0], chunk)
            for unit in {unit.kind: unit for unit in model.blocks}.values():
                make_program(unit, self.settings, x_btd, ctx, self.dtype, self.programs, timer, report)
                make_update(self.settings.layout(unit.params, self.dtype), self.settings, self.device)()

    def _measure(self, num_microbatches: int, report: Callable[[str], None]) -> Problem:
        model, dtype = self.model, self.dtype
        timer = Timer(device=self.device, floor_s=self.floor_s)
        chunk = self._chunk(num_microbatches)
        with torch.no_grad(), deterministic(self.device):
            library_bytes = measure_library_bytes(self.device)
            library_bytes += SMALL_BYTES if library_bytes else 0
            ctx = model.context(chunk, dtype)
            embed_params, head_params = end_params(model, self.device, dtype)
            x_btd = model.embed.fn(embed_params, chunk)
            embed = profile_embed(model, self.settings, embed_params, chunk, x_btd, dtype, timer, num_microbatches)
            costs, made = dict[str, UnitCost](), dict[str, BlockPrograms]()
            for unit in model.blocks:
                if unit.kind not in costs:
                    program = make_program(unit, self.settings, x_btd, ctx, dtype, self.programs, timer, report)
                    made[unit.kind] = program
                    costs[unit.kind] = profile_block(
                        unit,
                        self.settings,
                        x_btd,
                        ctx,
                        dtype,
                        program,
                        timer,
                        num_microbatches,
                        self._count_alike(unit),
                    )
            head = profile_head(model, self.settings, head_params, chunk, x_btd, dtype, timer)
            if self._hardware is None:
                self._hardware = self._measure_machine((embed, *costs.values(), head), made, x_btd, ctx, timer)
        embed, head = map(self._updated_on_host, (embed, head))
        blocks = (self._updated_on_host(replace(costs[unit.kind], name=unit.name)) for unit in model.blocks)
        tokens = self.batch["tokens_bt"].numel() if "tokens_bt" in self.batch else count_rows(self.batch)
        return Problem(
            model=self.name,
            embed=embed,
            blocks=tuple(blocks),
            head=head,
            num_microbatches=num_microbatches,
            hardware=self._hardware,
            allow_nvme=self.spill_dir is not None,
            allow_cpu_update=self.allow_cpu_update,
            allow_device_update=self.allow_device_update,
            allow_streamed_embed=model.streams_embed,
            tokens_per_step=int(tokens),
            device_is_host=self.device.type == "cpu",
            tied=bool(model.tied),
            train_flops=6.0 * model.num_params * int(tokens),
            file_head_bytes=head_room(list_layouts(model, self.settings, dtype)),
            library_bytes=library_bytes,
            embed_sums_densely=model.embed_rows is None,
        )

    def _count_alike(self, unit: Unit) -> int:
        """Return over how many units to time updates on the CPU: all of that kind, or what fills `UPDATED_BYTES`."""
        layout = self.settings.layout(owned_params(self.model, unit), self.dtype)
        unit_bytes = max(1, 2 * layout.weight_bytes + layout.state_bytes)
        num_filling = min(UPDATED_BYTES, self.limits["host"] // 16) // unit_bytes
        return max(1, min(num_filling, sum(other.kind == unit.kind for other in self.model.units)))

    def _measure_machine(
        self, costs: Sequence[UnitCost], made: Mapping[str, BlockPrograms], x_btd: Tensor, ctx: Context, timer: Timer
    ) -> Hardware:
        """Measure the machine under the load of the largest block; of the largest unit, if no block has parameters."""
        blocks = [cost for cost in costs if cost.kind in made and cost.num_params]
        cost = max(blocks or costs, key=lambda cost: cost.num_params)
        unit = next(unit for unit in self.model.units if unit.kind == cost.kind)
        layout = self.settings.layout(owned_params(self.model, unit), self.dtype)
        program = made.get(unit.kind) if self.device.type == "cuda" else None
        params = random_unit_params(unit, self.device, self.dtype) if program else {}

        def launch() -> object:
            return program.forward(params, x_btd, ctx) if program else None

        return measure_machine(
            self.device,
            max((cost.weight_bytes for cost in costs[1:-1]), default=1 << 20),
            self.limits,
            work=Work(
                launch=launch,
                update=make_update(layout, self.settings, torch.device("cpu"), self._count_alike(unit)),
                num_params=cost.num_params,
                update_ms=(cost.cpu_update_ms, cost.device_update_ms),
            ),
            spill_dir=self.spill_dir,
            timer=timer,
        )

    def _updated_on_host(self, cost: UnitCost) -> UnitCost:
        """Return a unit's cost with its update on a GPU's host as that machine makes it, measured under load."""
        if self.device.type != "cuda":
            return cost
        assert self._hardware is not None
        return replace(cost, cpu_update_ms=cost.num_params / self._hardware.cpu_update_gparams_s / 1e6)


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
