"""Why nothing fits, and the smallest change that makes it: the memory rows of the MILP with one elastic limit.

For each tier the model without times is solved for the least that must be added to that tier alone. The answer is a plan,
whose needs the memory account then states to the byte; so what is promised is what a second run will find.
"""

import math
from dataclasses import dataclass, replace

from lazytrain.solver.backends import NOTHING, Limits, list_solvers, solve_model
from lazytrain.solver.baselines import make_plan
from lazytrain.solver.budget import add_budgets
from lazytrain.solver.choices import Lane, list_lanes, make_unit_plan
from lazytrain.solver.decisions import read_plan
from lazytrain.solver.draft import start_draft
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.linear import Affine
from lazytrain.solver.memory import GIB, Usage, account, find_shortage
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, Plan
from lazytrain.solver.problem import MAX_BYTES, Hardware, Problem

TIERS = ("device", "host", "nvme")
FIELDS = {"device": "device_memory_bytes", "host": "host_memory_bytes", "nvme": "nvme_bytes"}
LIMITS = Limits(time_s=2.0, gap=1e-3, num_nodes=200)
STEP_BYTES = GIB // 100


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that makes the problem feasible: bytes to add per tier, and whether NVMe must be allowed."""

    add_bytes: dict[str, int]
    allow_nvme: bool = False

    def apply(self, problem: Problem) -> Problem:
        """Return the problem with this change made."""
        hardware = problem.hardware
        limits = {FIELDS[tier]: getattr(hardware, FIELDS[tier]) + more for tier, more in self.add_bytes.items()}
        return replace(
            problem, hardware=replace(hardware, **limits), allow_nvme=problem.allow_nvme or self.allow_nvme
        )

    def __str__(self) -> str:
        parts = [f"+{_gib(more)} of {_label(tier)}" for tier, more in self.add_bytes.items()]
        return " and ".join((["allow NVMe"] if self.allow_nvme else []) + parts)
