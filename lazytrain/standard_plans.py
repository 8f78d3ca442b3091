"""Plans that need no solver: everything on the device, or every block streamed."""

from dataclasses import replace

from lazytrain.solver.plan import Plan, UnitPlan

# More than any curve has: the executor keeps as much as a block's curve offers.
KEEP_ALL = 99


def resident_plan(num_blocks: int, *, num_microbatches: int = 1, residual_point: int = KEEP_ALL) -> Plan:
    """Return the plan of plain training: weights, states, grads and residuals stay on the device."""
    end = UnitPlan(weights="device", states="device", update="device", grads="device")
    keep = replace(end, residual_point=residual_point, residuals="device") if residual_point else end
    return _plan(keep, end, num_blocks, num_microbatches)


def streaming_plan(num_blocks: int, *, num_microbatches: int = 1, update: str = "device") -> Plan:
    """Return the leanest plan without NVMe for the device: blocks streamed, states on the host, recompute all."""
    block = UnitPlan(
        weights="host",
        states="host",
        update=update,
        grads="host",
        residual_point=0,
        residuals="none",
        boundary="device",
    )
    end = UnitPlan(
        weights="device",
        states="host",
        update=update,
        grads="device" if update == "device" else "host",
        residual_point=0,
        residuals="none",
        boundary="device",
    )
    return _plan(block, end, num_blocks, num_microbatches)


def _plan(block: UnitPlan, end: UnitPlan, num_blocks: int, num_microbatches: int) -> Plan:
    return Plan(
        model="",
        num_microbatches=num_microbatches,
        prefetch_depth=2,
        embed=end,
        blocks=(block,) * num_blocks,
        head=end,
    )
