"""The update between two steps: what is pending, and the part of it that runs on CPU threads.

The norm of all grads is known when the backward sweep ends. Then the units are updated in forward order, each before
its own next forward and after nothing else: on the CPU by the worker below, on the device when the unit arrives there.
"""

import math
from dataclasses import dataclass, field

import torch

from lazytrain.homes import Homes, UnitHome, staging_key
from lazytrain.kernels.adamw import AdamWHyper
from lazytrain.lanes import CPU, Worker
from lazytrain.optimizer import update_unit_into


@dataclass(kw_only=True)
class PendingUpdate:
    """The update between two steps; `due` holds the indexes of the units that still wait for it.

    It is made before the norm is known, so that the first units' states can be on their way: `decide` completes it.
    """

    hyper: AdamWHyper
    due: set[int] = field(default_factory=set)
    coef: float = math.nan

    def decide(self, coef: float) -> None:
        """Set what grads are scaled by."""
        self.coef = coef

    def cancel(self) -> None:
        """Skip the update of all units."""
        self.due.clear()

    def is_due(self, home: UnitHome) -> bool:
        """Return whether this unit still waits."""
        return home.index in self.due

    def finish(self, home: UnitHome) -> None:
        """Note that this unit is updated."""
        self.due.discard(home.index)


def start_cpu_updates(homes: Homes, pending: PendingUpdate, worker: Worker) -> list[UnitHome]:
    """Queue the updates that the plan puts on the CPU, in forward order; return their units."""
    started = []
    for home in homes.units:
        if home.plan.update == "cpu" and pending.is_due(home):
            pending.finish(home)
            home.cpu_update = worker.submit(_update_on_cpu, homes, home, pending.coef, pending.hyper)
            started.append(home)
    return started


def _update_on_cpu(homes: Homes, home: UnitHome, coef: float, hyper: AdamWHyper) -> None:
    assert home.grads_host is not None
    for ticket in (home.grads_out, home.weights_out):
        if ticket is not None:
            ticket.synchronize()
    weights = homes.weights_slab(home, staging_key(home, "weights"))
    state = homes.state_slab(home, staging_key(home, "state"))
    with homes.lanes.span(CPU, "update", home.unit.name):
        update_unit_into(home.layout, weights, state, home.grads_host, coef=coef, hyper=hyper)
    if home.plan.weights == "nvme":
        homes.write(home, "weights", weights.view(torch.uint8))
    if home.plan.states == "nvme":
        homes.write(home, "state", state)
