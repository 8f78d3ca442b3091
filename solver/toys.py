"""Small random problems, for tests and benchmarks of the planner."""

import random
from dataclasses import replace

from lazytrain.solver.problem import Hardware, Problem, ResidualPoint, UnitCost

MIB = 1 << 20


def make_toy_problem(
    seed: int, *, num_blocks: int = 3, num_points: int = 2, allow_nvme: bool = False, device_is_host: bool = False
) -> Problem:
    """Return a random problem of a few blocks whose link, compute, CPU and budgets are all near to binding."""
    rng = random.Random(seed)
    weight = rng.randint(20, 200) * MIB
    kinds = [_make_block(rng, weight, num_points) for _ in range(rng.choice((1, 1, 2)))]
    blocks = tuple(replace(kinds[i % len(kinds)], name=f"block.{i}") for i in range(num_blocks))
    num_microbatches = rng.choice((1, 1, 2))
    embed, head = _make_edge(rng, "embed", weight), _make_edge(rng, "head", weight)
    everything = sum(u.weight_bytes + u.state_bytes + u.grad_bytes for u in (embed, *blocks, head))
    activations = sum(b.boundary_bytes + b.points[-1].residual_bytes for b in blocks) * num_microbatches
    roof = everything + activations
    hardware = Hardware(
        name="toy",
        device_memory_bytes=int(roof * rng.uniform(0.45, 1.1)),
        host_memory_bytes=int(roof * rng.uniform(0.5 if allow_nvme else 0.9, 2.0)) * (2 if device_is_host else 1),
        nvme_bytes=2 * roof,
        h2d_gbs=rng.uniform(5, 50),
        d2h_gbs=rng.uniform(5, 50),
        nvme_read_gbs=rng.uniform(2, 7),
        nvme_write_gbs=rng.uniform(1, 5),
        dram_gbs=rng.uniform(60, 200),
        copy_latency_ms=rng.choice((0.0, 0.02)),
        matmul_tflops=100.0,
        device_memory_gbs=1000.0,
        cpu_update_gparams_s=4.0,
        device_update_gparams_s=100.0,
        is_estimate=True,
    )
    if seed % 2:  # copies are faster in backward
        hardware = replace(hardware, quiet_link_gbs=1.25 * hardware.h2d_gbs)
    return Problem(
        model=f"toy-{seed}",
        embed=embed,
        blocks=blocks,
        head=head,
        num_microbatches=num_microbatches,
        hardware=hardware,
        allow_nvme=allow_nvme,
        library_bytes=seed % 3 * MIB,
        tokens_per_step=1024,
        device_is_host=device_is_host,
        tied=(tied := rng.random() < 0.3),
        embed_sums_densely=tied or seed % 4 > 1,
    )


def _make_block(rng: random.Random, weight: int, num_points: int) -> UnitCost:
    weight_bytes = int(weight * rng.uniform(0.7, 1.3))
    compute_ms = rng.uniform(2, 40)
    full = int(weight_bytes * rng.uniform(0.2, 3.0))
    points = tuple(
        ResidualPoint(
            residual_bytes=int(full * k / max(1, num_points - 1)),
            forward_ms=compute_ms * (1 + 0.02 * (k > 0)),
            backward_ms=compute_ms * (3 - k / max(1, num_points - 1)),
            workspace_bytes=int(full * 0.3),
        )
        for k in range(num_points)
    )
    return _make_unit(rng, "block", weight_bytes, points, boundary_bytes=max(1, full // 16))


def _make_edge(rng: random.Random, name: str, weight: int) -> UnitCost:
    forward_ms = rng.uniform(0.1, 1) if name == "embed" else 0.0
    point = ResidualPoint(
        residual_bytes=0,
        forward_ms=forward_ms,
        backward_ms=rng.uniform(1, 20),
        workspace_bytes=rng.randint(0, 20) * MIB,
    )
    return _make_unit(rng, name, int(weight * rng.uniform(0.2, 1.5)), (point,), boundary_bytes=rng.randint(1, 8) * MIB)


def _make_unit(
    rng: random.Random, kind: str, weight_bytes: int, points: tuple[ResidualPoint, ...], boundary_bytes: int
) -> UnitCost:
    num_params = weight_bytes // 2
    return UnitCost(
        name=kind,
        kind=kind,
        num_params=num_params,
        weight_bytes=weight_bytes,
        state_bytes=int(num_params * 4.06),
        grad_bytes=weight_bytes,
        boundary_bytes=boundary_bytes,
        points=points,
        cpu_update_ms=num_params / (rng.uniform(2, 8) * 1e6),
        device_update_ms=num_params / 1e8,
    )
