"""Larger batches of a problem whose costs are known for one chunk: a chunk of more rows, or more such chunks."""

import math
from dataclasses import replace

from lazytrain.solver.problem import Problem, UnitCost


def grow_chunk(problem: Problem, factor: float) -> Problem:
    """Return a problem of one chunk with `factor` times the rows: its times and bytes are in proportion to them."""

    def grow(unit: UnitCost) -> UnitCost:
        points = tuple(
            replace(
                point,
                residual_bytes=math.ceil(point.residual_bytes * factor),
                forward_ms=point.forward_ms * factor,
                quiet_forward_ms=point.quiet_forward_ms * factor,
                backward_ms=point.backward_ms * factor,
                workspace_bytes=math.ceil(point.workspace_bytes * factor),
            )
            for point in unit.points
        )
        return replace(unit, boundary_bytes=math.ceil(unit.boundary_bytes * factor), points=points)

    return replace(
        problem,
        embed=grow(problem.embed),
        blocks=tuple(map(grow, problem.blocks)),
        head=grow(problem.head),
        tokens_per_step=round(problem.tokens_per_step * factor),
        train_flops=problem.train_flops * factor,
    )


def add_chunks(problem: Problem, count: int) -> Problem:
    """Return a problem of one chunk with `count` such chunks."""
    return replace(
        problem,
        num_microbatches=count,
        tokens_per_step=problem.tokens_per_step * count,
        train_flops=problem.train_flops * count,
    )
