"""The MILP: event times in the executor's fixed order, decisions as binaries, memory as rows.

    minimise T, the time between the norms of two steps, over one-hot choices per unit (decisions.py)
    subject to   queues, data and rings (timing.py), NVMe (spilling.py), bandwidths (traffic.py),
                 the budgets at every position (budget.py)

Every queue's order is fixed by the order of the blocks, so that durations are linear in the binaries. Sizes are in GiB
and times in ms: in bytes the solver's tolerances are meaningless (`Scale` is there to prove it).
"""

from typing import NamedTuple

import numpy as np

from lazytrain.solver.budget import add_budgets
from lazytrain.solver.decisions import read_plan
from lazytrain.solver.draft import Draft, Scale, start_draft
from lazytrain.solver.events import add_events
from lazytrain.solver.linear import LinearModel
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.spilling import add_spilling
from lazytrain.solver.timing import add_timing
from lazytrain.solver.traffic import add_traffic
from lazytrain.solver.windows import add_windows


class Milp(NamedTuple):
    """A finished model and how to read it."""

    model: LinearModel
    draft: Draft

    def read(self, x: np.ndarray) -> Plan:
        """Return the plan that a solution stands for."""
        return read_plan(self.draft.problem, self.draft.choices, x, self.draft.prefetch_depth)


def build_milp(
    problem: Problem,
    *,
    prefetch_depth: int,
    horizon_ms: float,
    period: int | None = None,
    scale: Scale | None = None,
) -> Milp:
    """Build the model for one prefetch depth.

    Args:
        horizon_ms: no step longer than this is of interest (the best known plan's).
        period: ties blocks i and i + period; None = every block decides for itself.
        scale: the model's units; None = GiB and ms.

    Source: event-time formulation of a cyclic schedule whose queues have a fixed order; the same contract of queues and
    buffers as `machine.Machine`.
    """
    draft = start_draft(problem, prefetch_depth=prefetch_depth, horizon_ms=horizon_ms, period=period, scale=scale)
    events = add_events(draft)
    add_timing(draft, events)
    add_spilling(draft, events)
    add_windows(draft, events)
    add_traffic(draft)
    add_budgets(draft)
    return Milp(draft.model, draft)
