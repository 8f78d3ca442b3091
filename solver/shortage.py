"""Why nothing fits, and the smallest change that makes it: the memory rows of the MILP with one elastic limit.

For each tier the model without times is solved for the least that must be added to that tier alone. The answer is a plan,
whose needs the memory account then states to the byte; so what is promised is what a second run will find.
"""

import math
from dataclasses import dataclass, replace

from lazytrain.solver.backends import Limits, list_solvers, solve_model
from lazytrain.solver.baselines import make_plan
from lazytrain.solver.budget import add_budgets
from lazytrain.solver.choices import list_lanes, make_unit_plan
from lazytrain.solver.decisions import read_plan
from lazytrain.solver.draft import start_draft
from lazytrain.solver.errors import SolverUnavailableError
from lazytrain.solver.linear import Affine
from lazytrain.solver.memory import GIB, account, find_shortage
from lazytrain.solver.plan import DEVICE, HOST, NVME, Plan
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
        return replace(problem, hardware=replace(hardware, **limits), allow_nvme=problem.allow_nvme or self.allow_nvme)

    def __str__(self) -> str:
        parts = [f"+{_gib(more)} of {_label(tier)}" for tier, more in self.add_bytes.items()]
        return " and ".join((["allow NVMe"] if self.allow_nvme else []) + parts)


def explain_infeasible(problem: Problem) -> tuple[str, list[Remedy]]:
    """Return one line that says what is missing per tier and what would make it fit, and those changes as data."""
    hardware = problem.hardware
    tiers = [_tier_use(hardware, tier) for tier in TIERS[:2]]
    tiers.append(_tier_use(hardware, "nvme") if problem.allow_nvme else "NVMe not allowed")
    remedies = find_remedies(problem)
    everything = find_remedy(problem, ("device", "host"))
    lacks = f"the leanest plan lacks {everything}" if everything and everything.add_bytes else "no lean plan was found"
    options = [str(remedy) for remedy in remedies]
    options.append(f"cut the step in more microbatches (now {problem.num_microbatches}) or shorten the sequences")
    return f"nothing fits in {', '.join(tiers)}: {lacks}. To make it fit: {'; or '.join(options)}.", remedies


def find_remedies(problem: Problem) -> list[Remedy]:
    """Return the smallest changes, one tier at a time; two tiers together only where no single one helps."""
    alone: tuple[tuple[str, ...], ...] = (("device",), ("host",))
    if problem.allow_nvme:
        alone += (("nvme",),)
    found = [remedy for tiers in alone if (remedy := find_remedy(problem, tiers))]
    if not problem.allow_nvme:
        spilling = find_remedy(replace(problem, allow_nvme=True), ("nvme",))
        found += [replace(spilling, allow_nvme=True)] if spilling else []
    if not found and (both := find_remedy(problem, TIERS if problem.allow_nvme else TIERS[:2])):
        found.append(both)
    return found


def find_remedy(problem: Problem, tiers: tuple[str, ...]) -> Remedy | None:
    """Return the least to add to these tiers, in sum, so that some plan fits; None if nothing added there helps."""
    best: dict[str, int] | None = None
    for plan in (*_solve_elastic(problem, tiers), *_list_lean_plans(problem)):
        missing = find_shortage(problem, account(problem, plan))
        if set(missing) <= set(tiers) and (best is None or sum(missing.values()) < sum(best.values())):
            best = missing
    if best is None:
        return None
    return Remedy(add_bytes={tier: math.ceil(more / STEP_BYTES) * STEP_BYTES for tier, more in best.items()})


def _solve_elastic(problem: Problem, tiers: tuple[str, ...]) -> list[Plan]:
    """Return the plan with the least sum of slacks, if a solver finds one."""
    depth = min(problem.prefetch_depths)
    draft = start_draft(problem, prefetch_depth=depth, horizon_ms=1.0, period=None, scale=None)
    slack = {tier: draft.model.add_var(upper=MAX_BYTES / GIB) for tier in tiers}
    add_budgets(draft, slack)
    objective = draft.model.add_var()
    draft.model.add_at_least(objective, sum(slack.values(), Affine()))
    draft.model.objective = next(iter(objective.terms))
    for solver in list_solvers():
        try:
            outcome = solve_model(draft.model, LIMITS, solver=solver)
        except SolverUnavailableError:
            continue
        return [] if outcome.x is None else [read_plan(problem, draft.choices, outcome.x, depth)]
    return []


def _list_lean_plans(problem: Problem) -> list[Plan]:
    """Return the plans without residuals whose blocks, and whose ends, share one kind of lane."""
    last = len(problem.units) - 1
    options = [list_lanes(problem, unit, is_edge=u in (0, last)) for u, unit in enumerate(problem.units)]
    edges = sorted({lane for u in (0, last) for lane in options[u]})
    lanes = sorted({lane for lanes in options[1:last] for lane in lanes})
    places = (DEVICE, HOST, NVME) if problem.allow_nvme else (DEVICE, HOST)
    plans = []
    for place in places:
        for edge in edges:
            for lane in lanes:
                wanted = [edge if u in (0, last) else lane for u in range(last + 1)]
                picked = [a if a in allowed else allowed[0] for a, allowed in zip(wanted, options, strict=True)]
                units = [make_unit_plan(a, boundary=place if 0 < u < last else DEVICE) for u, a in enumerate(picked)]
                plans.append(make_plan(problem, units, min(problem.prefetch_depths)))
    return plans


def _tier_use(hardware: Hardware, tier: str) -> str:
    return f"{_label(tier)} {_gib(getattr(hardware, FIELDS[tier]))}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _label(tier: str) -> str:
    return "NVMe" if tier == "nvme" else f"{tier} memory"
