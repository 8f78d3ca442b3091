"""Why nothing fits: what the leanest plans lack, tier by tier, and what would make one of them fit."""

import math
from collections.abc import Iterator

from lazytrain.solver.choices import list_boundaries, list_lanes, make_unit_plan
from lazytrain.solver.memory import GIB, Accountant, find_shortage
from lazytrain.solver.plan import DEVICE, Plan, make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.sizes import format_size


def explain_infeasible(problem: Problem) -> str:
    """Return what the leanest plans lack, tier by tier, and what would make one of them fit."""
    missing = find_least_shortage(problem)
    if not missing:
        return "the leanest plan fits; only the search failed. Raise the time limit."
    needs = ", ".join(f"{_need(num_bytes)} more {_name(tier)} memory" for tier, num_bytes in sorted(missing.items()))
    hardware = problem.hardware
    have = f"device {format_size(hardware.device_memory_bytes)}, host {format_size(hardware.host_memory_bytes)}"
    have += f", NVMe {format_size(hardware.nvme_bytes)}" if problem.allow_nvme else ", NVMe not allowed"
    remedies = [f"give {needs}"]
    if not problem.allow_nvme:
        remedies.append("allow NVMe (name a spill directory)")
    remedies.append("cut the step in more microbatches, or shorten the sequences")
    return f"nothing fits ({have}). The leanest plan needs {needs}. To make it fit: {'; or '.join(remedies)}."


def find_least_shortage(problem: Problem) -> dict[str, int]:
    """Return tier -> missing bytes of the lean plan that lacks least; empty if one fits."""
    accountant = Accountant(problem)
    shortages = (find_shortage(problem, accountant.account(plan)) for plan in _leanest_plans(problem))
    return min(shortages, key=lambda missing: (len(missing), sum(missing.values())))


def count_missing_bytes(problem: Problem) -> int:
    """Return how many bytes, over all tiers, the leanest plan lacks; 0 if it fits."""
    return sum(find_least_shortage(problem).values())


def _leanest_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the plans without residuals whose blocks, and whose ends, share one kind of lane."""
    last = len(problem.units) - 1
    options = [list_lanes(problem, u) for u in range(last + 1)]
    for boundary in list_boundaries(problem):
        for edge in sorted({lane for u in (0, last) for lane in options[u]}):
            for lane in sorted({lane for lanes in options[1:last] for lane in lanes}):
                picked = [
                    wanted if (wanted := edge if u in (0, last) else lane) in lanes else lanes[0]
                    for u, lanes in enumerate(options)
                ]
                units = [make_unit_plan(p, boundary=boundary if 0 < u < last else DEVICE) for u, p in enumerate(picked)]
                yield make_plan(problem, units, min(problem.prefetch_depths))


def _need(num_bytes: int) -> str:
    """Return a size that is surely enough, rounded up to 0.01 GiB."""
    return f"{math.ceil(num_bytes / GIB * 100) / 100:.2f} GiB"


def _name(tier: str) -> str:
    return "NVMe" if tier == "nvme" else tier
