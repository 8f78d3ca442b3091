"""How long copies, reads and writes take on a machine, and what they cost the host's DRAM."""

from lazytrain.solver.problem import Problem, UnitCost

BYTES_PER_MS = 1e6  # of one GB/s


def copy_ms(
    problem: Problem, num_bytes: int, *, to_device: bool, num_copies: int = 1, in_backward: bool = False
) -> float:
    """Return the time of a copy over the link; between two places in the host's own RAM it is read plus write.

    Args:
        in_backward: all updates on the CPU are over by then, and leave the host's memory to the link.
    """
    hardware = problem.hardware
    latency = hardware.copy_latency_ms * num_copies
    if problem.device_is_host:
        return latency + 2 * num_bytes / (hardware.dram_gbs * BYTES_PER_MS)
    inward_gbs = max(hardware.h2d_gbs, hardware.quiet_link_gbs) if in_backward else hardware.h2d_gbs
    return latency + num_bytes / ((inward_gbs if to_device else hardware.d2h_gbs) * BYTES_PER_MS)


def sync_ms(problem: Problem) -> float:
    """Return the time of the step's one host synchronisation: a small copy."""
    return 0.0 if problem.device_is_host else problem.hardware.copy_latency_ms


def read_ms(problem: Problem, num_bytes: int) -> float:
    """Return the time to read from NVMe."""
    return num_bytes / (problem.hardware.nvme_read_gbs * BYTES_PER_MS)


def write_ms(problem: Problem, num_bytes: int) -> float:
    """Return the time to write to NVMe."""
    return num_bytes / (problem.hardware.nvme_write_gbs * BYTES_PER_MS)


def dram_ms(problem: Problem, num_bytes: float) -> float:
    """Return how long copies of that much keep the host's DRAM busy; 0 where they are themselves memcpys."""
    return 0.0 if problem.device_is_host else num_bytes / (problem.hardware.dram_gbs * BYTES_PER_MS)


def update_dram_ms(problem: Problem, unit: UnitCost) -> float:
    """Return how long an update on the CPU keeps the host's DRAM busy: all of its time; 0 as for `dram_ms`."""
    return 0.0 if problem.device_is_host else unit.cpu_update_ms
