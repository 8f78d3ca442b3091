"""One trainer's machinery: homes, queues and sweeps, and the order in which a step uses them."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.account import account_step
from lazytrain.activations import Activations
from lazytrain.arrivals import Arrivals
from lazytrain.base import Batch, Context, Model, Params, StepMetrics, Unit, count_rows, find_targets
from lazytrain.determinism import deterministic
from lazytrain.errors import DataError, NonFiniteError
from lazytrain.gradients import GradientSink
from lazytrain.homes import FillUnit, build_homes
from lazytrain.lanes import COMPUTE, Lanes, Span, Worker
from lazytrain.optimizer import AdamWSettings
from lazytrain.prefetch import Prefetch
from lazytrain.programs import ProgramCache
from lazytrain.solver.plan import Plan
from lazytrain.spill import SpillStore
from lazytrain.sweep import Sweep
from lazytrain.updates import PendingUpdate, start_cpu_updates

# In place of the step whose state is live: an exception left a step in its middle, with some of its update done.
INTERRUPTED = -1


class Engine:
    """Executes steps of one model under one plan. Mutable; the public functions of `trainer` guard it."""

    def __init__(
        self,
        model: Model,
        settings: AdamWSettings,
        plan: Plan,
        *,
        fill: FillUnit,
        device: torch.device,
        dtype: torch.dtype,
        spill_dir: Path | None,
        shared_checkpoints: int | None,
        programs: ProgramCache,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.settings, self.plan = model, settings, plan
        self.device, self.dtype = device, dtype
        self.lanes = Lanes(device)
        spills = any(unit.uses_nvme for unit in plan.units)
        updates_on_cpu = any(unit.update == "cpu" for unit in plan.units)
        self.loader = Worker("loader", threaded=spills or (updates_on_cpu and self.lanes.is_cuda))
        self.writer = Worker("writer", threaded=spills)
        self.updater = Worker("updater", threaded=updates_on_cpu)
        self.spill = SpillStore(spill_dir) if spills and spill_dir is not None else None
        self.homes = build_homes(
            model,
            plan,
            settings,
            fill=fill,
            dtype=dtype,
            lanes=self.lanes,
            spill=self.spill,
            writer=self.writer,
            shared_checkpoints=shared_checkpoints,
            progress=progress,
        )
        self.arrivals = Arrivals(self.homes, plan.prefetch_depth, self.lanes, self.writer)
        self.sweep = Sweep(
            model=model,
            homes=self.homes,
            arrivals=self.arrivals,
            activations=Activations(self.homes, self.lanes, self.writer),
            programs=programs,
            lanes=self.lanes,
            loader=self.loader,
            chunks_behind=plan.chunks_behind,
        )
        self.num_updates = 0
        self.live_step = 0
        self._pending: PendingUpdate | None = None
        self._ahead: Prefetch | None = None  # loads of the next forward sweep that are on their way
        self._is_interrupted = True  # nothing that was recorded belongs to the next step
        self._sink = GradientSink(self.homes, self.lanes, tied=model.tied)

    def step(self, batch: Batch, *, step: int, lr: float) -> StepMetrics:
        """Run one optimizer step: forward (with the last step's update), backward, norm; leave the update pending."""
        start_s = time.perf_counter()
        num_targets = self.model.count(batch)
        if num_targets <= 0:
            raise DataError(f"step {step}: no position of the batch has a target. Drop such rows when encoding.")
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        if was_interrupted:
            self.lanes.begin_step()
        with torch.no_grad(), deterministic(self.device):
            batches, contexts = self._microbatches(batch)
            sink = self._sink
            sink.begin_step(len(batches))
            pending, ahead = self._pending, self._ahead
            self._pending = self._ahead = None
            self.live_step = INTERRUPTED  # until the step is whole
            xs, stash = self.sweep.forward(batches, contexts, pending, ahead, sink.room_for_forward)
            loss_sum, cotangents = self.sweep.loss(xs, batches, 1.0 / num_targets, sink)
            self.sweep.backward(cotangents, batches, contexts, stash, sink)
            following = self._next_update(lr)
            self._ahead = self.sweep.load_ahead(following)
            clip = self.settings.clip(sink.squares)
            numbers = torch.cat([part.double().view(-1) for part in (sink.squares, loss_sum, clip.norm, clip.coef)])
            read = self.lanes.start_reading(numbers)
            self.arrivals.update_in_place(following, clip.coef)
            # While the device works on, the host looks at the step before.
            step_ms, spans = self.lanes.read_step()
            account = account_step(step_ms, spans) if math.isfinite(step_ms) and not was_interrupted else None
            # The one host synchronisation of a step.
            *squares, loss, grad_norm, coef = read()
        self.lanes.end_step()
        bad_unit = next((h.unit.name for h, s in zip(self.homes.units, squares) if not math.isfinite(s)), None)
        skipped = math.isnan(coef)
        if skipped:
            coef = 0.0
            following.cancel()
            sink.drop()
            if self.settings.error_if_nonfinite:
                self.live_step = step
                raise NonFiniteError(
                    f"step {step}: the gradient norm is {grad_norm}; first in {bad_unit}. "
                    "Lower the learning rate or look at this batch."
                )
        else:
            following.decide(coef)
            self._schedule(following)
        return StepMetrics(
            step=step,
            loss=loss / num_targets,
            grad_norm=grad_norm,
            clip_coef=coef,
            lr=lr,
            num_target_tokens=num_targets,
            skipped=skipped,
            bad_unit=bad_unit,
            step_s=time.perf_counter() - start_s,
            last_account=account,
        )

    def read_step(self) -> tuple[Span, ...]:
        """Return the spans of the last step, in ms from its begin; waits for the device."""
        if self.lanes.is_cuda:
            torch.cuda.synchronize(self.device)
        return self.lanes.read_step()[1]

    def finish_updates(self) -> None:
        """Run what is still pending, so that homes hold the state after the last step."""
        pending, ahead = self._pending, self._ahead
        self._pending = self._ahead = None
        self._is_interrupted = True
        self.lanes.pause()
        if ahead is not None:
            ahead.wait()
        with torch.no_grad():
            if pending is not None:
                for home in self.homes.units:
                    if pending.is_due(home):
                        arrival = self.arrivals.bring(home, pending)
                        self.arrivals.update_on_load(arrival, pending)
            for home in self.homes.units:
                for future in (home.cpu_update, home.weights_write, home.state_write):
                    if future is not None:
                        future.result()
        if self.lanes.is_cuda:
            torch.cuda.synchronize(self.device)

    def unit_params(self, unit: Unit) -> tuple[Params, bool]:
        """Return a unit's current parameters on the device, and whether they lie in a slot that will be reused.

        Call `finish_updates` first.
        """
        homes = [home for home in self.homes.units if home.unit is unit]
        if unit is self.model.head and self.model.tied:
            homes.append(self.homes.units[0])
        with self.lanes.span(COMPUTE, "arrive", unit.name) as now:
            self.arrivals.used_all(now)
        arrivals = [self.arrivals.bring(home, None) for home in homes]
        with self.lanes.span(COMPUTE, "arrive", unit.name, [arrival.ticket for arrival in arrivals]):
            pass
        is_streamed = any(home.plan.is_streamed for home in homes)
        if unit is self.model.head:
            return self.sweep.head_params(), is_streamed
        return homes[0].layout.views(arrivals[0].weights), is_streamed

    def close(self) -> None:
        """Finish pending work, end the threads and give back the room on NVMe."""
        for worker in (self.loader, self.updater, self.writer):
            worker.close()
        if self.spill is not None:
            self.spill.close()

    def _next_update(self, lr: float) -> PendingUpdate:
        """Return the update that follows the running step, still to be decided."""
        due = {home.index for home in self.homes.units if home.has_params}
        return PendingUpdate(hyper=self.settings.hyper(lr, self.num_updates + 1), due=due)

    def _schedule(self, pending: PendingUpdate) -> None:
        self.num_updates += 1
        for home in start_cpu_updates(self.homes, pending, self.updater):
            self.arrivals.forget(home)
        self._pending = pending if pending.due else None

    def _microbatches(self, batch: Batch) -> tuple[list[Batch], list[Context]]:
        batches: list[Batch] = []
        for part in split_batch(batch, self.plan.num_microbatches):
            if "targets_bt" in part:
                part = {**part, "target_index_n": find_targets(part["targets_bt"])}
            batches.append({name: value.to(self.device, non_blocking=True) for name, value in part.items()})
        return batches, [self.model.context(part, self.dtype) for part in batches]


def split_batch(batch: Batch, num_microbatches: int) -> Sequence[dict[str, Tensor]]:
    """Cut a batch along its first dimension into at most `num_microbatches` parts of nearly equal size."""
    num_rows = count_rows(batch)
    for name, value in batch.items():
        if len(value) != num_rows:
            raise DataError(f"batch: {name} has {len(value)} rows, another tensor has {num_rows}. They must agree.")
    num_parts = max(1, min(num_microbatches, num_rows))
    pieces = {name: value.tensor_split(num_parts) for name, value in batch.items()}
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(num_parts)]
