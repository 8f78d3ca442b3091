"""Sizes as people write and read them."""

import argparse
from dataclasses import replace

import pytest
from test_solver_edges import make_problem

from lazytrain.solver.shortage import explain_infeasible
from lazytrain.solver.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(3 << 29, "1.50 GiB"), (1 << 27, "0.12 GiB"), (5 << 20, "5.0 MiB"), (10240, "0.010 MiB"), (0, "0.000 MiB")],
)
def test_a_size_that_is_there_is_never_shown_as_none(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_what_was_given_is_told_where_nothing_fits() -> None:
    problem = make_problem(1)
    tiny = replace(problem, hardware=replace(problem.hardware, device_memory_bytes=10240))
    assert "device 0.010 MiB" in explain_infeasible(tiny)


def test_sizes_are_read_and_what_is_none_is_refused() -> None:
    assert parse_size("24GiB") == 24 << 30
    assert parse_size("1e9") == 10**9
    for text in ("", "GiB", "-1GiB", "0", "1 parsec"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(text)
