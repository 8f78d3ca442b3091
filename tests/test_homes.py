"""Weights and states as they are placed at the start of a run."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import RESIDENT, STREAMED, make_model, make_params, make_plan

from lazytrain import adamw8bit
from lazytrain.homes import build_homes
from lazytrain.lanes import Lanes, Worker
from lazytrain.optimizer import init_unit_into
from lazytrain.solver.plan import UnitPlan
from lazytrain.spill import SpillStore

ALL = replace(STREAMED, weights="nvme", states="nvme")
STATES = replace(ALL, weights="host")


class LateFuture(Future):  # type: ignore[type-arg]
    """Runs its job when somebody waits for it."""

    def __init__(self, job: Any, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.job, self.args = job, args

    def result(self, timeout: float | None = None) -> Any:
        """Run the job, once."""
        if not self.done():
            self.set_result(self.job(*self.args))
        return super().result(timeout)


class LateWorker(Worker):
    """A worker that is as late as it may be."""

    def __init__(self) -> None:
        self.futures: list[LateFuture] = []

    def submit(self, job: Any, *args: Any) -> LateFuture:
        """Queue a job for whoever waits for it."""
        self.futures.append(LateFuture(job, args))
        return self.futures[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unit", [ALL, STATES, replace(ALL, update="cpu"), replace(STATES, update="cpu")])
def test_what_goes_to_nvme_is_written_before_its_buffer_is_filled_again(
    unit: UnitPlan, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model(5)
    params, settings, worker = make_params(model), adamw8bit(1e-3).settings, LateWorker()
    waiting: list[int] = []

    def fill(home: Any, weights: torch.Tensor, state: torch.Tensor) -> None:
        init_unit_into(home.layout, params.__getitem__, weights, state)
        waiting.append(sum(not future.done() for future in worker.futures))

    spill = SpillStore(tmp_path)
    plan = make_plan(5, default=unit, ends=RESIDENT)
    homes = build_homes(
        model, plan, settings, fill=fill, dtype=dtype, lanes=Lanes(torch.device("cpu")), spill=spill, writer=worker
    )
    assert all(future.done() for future in worker.futures)
    if unit.update == "device":
        assert max(waiting) > 0  # the next unit is filled while the last one is written
    for home in homes.units:
        weights, state = torch.empty(home.layout.numel, dtype=dtype), torch.empty(home.layout.state_bytes).byte()
        init_unit_into(home.layout, params.__getitem__, weights, state)
        assert torch.equal(homes.weights_slab(home), weights), home.unit.name
        assert torch.equal(homes.state_slab(home), state), home.unit.name
    # No other memory than updates use.
    assert set(homes._staging) <= {f"update {what}" for what in ("weights", "state")} | {
        f"out {what} {turn}" for what in ("weights", "state") for turn in range(2)
    }
    spill.close()
