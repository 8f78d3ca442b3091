"""Chunk sizes, the largest batch, and what more memory would bring."""

from dataclasses import replace

import pytest

from lazytrain.solver.baselines import list_baselines
from lazytrain.solver.capacity import find_gains, find_largest_batch
from lazytrain.solver.chunks import choose_microbatches, list_counts
from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.hardware import PRESETS
from lazytrain.solver.memory import account
from lazytrain.solver.plan import UnitPlan, make_plan
from lazytrain.solver.planning import solve
from lazytrain.solver.problem import Problem
from lazytrain.solver.toys import make_toy_problem

GIB = 1 << 30
AGREEMENT = 1e-6  # relative
TINY = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def make_tiny(batch: int, count: int, *, device_gib: float = 2.0, host_gib: float = 2.0) -> Problem:
    hardware = replace(
        PRESETS["rtx3090"], device_memory_bytes=int(device_gib * GIB), host_memory_bytes=int(host_gib * GIB)
    )
    return problem_from_config(TINY, hardware, batch=batch, seq=512, microbatch=-(-batch // count))


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 12, 64, 100])
def test_counts_begin_with_one_chunk_and_end_with_one_sequence_each(batch: int) -> None:
    counts = list_counts(batch)
    assert counts[0] == 1
    assert batch == 1 or counts[1] == 2
    assert counts[-1] == batch
    assert counts == sorted(set(counts))
    assert len(counts) <= batch.bit_length() + 1


def test_the_best_chunk_size_is_never_worse_than_a_baseline_of_any_other() -> None:
    choice = choose_microbatches(lambda count: make_tiny(16, count), list_counts(16), time_limit_s=5.0)
    assert choice.result.plan is not None
    assert choice.result.plan.predicted is not None
    choice.result.plan.validate(choice.problem)
    baselines = [list_baselines(make_tiny(16, count), num_random=0, with_greedy=False) for count in list_counts(16)]
    fastest_ms = min(found[0].step_ms for found in baselines if found)
    assert choice.result.plan.predicted.step_ms <= fastest_ms * (1 + AGREEMENT)


def test_chunks_that_do_not_fit_are_passed_over() -> None:
    counts = list_counts(64)
    choice = choose_microbatches(lambda count: make_tiny(64, count, device_gib=1.2), counts, time_limit_s=5.0)
    assert choice.screened[1] is None, "the case should not fit in one chunk"
    assert choice.result.plan is not None
    assert choice.problem.num_microbatches > 1


def test_where_no_chunk_size_fits_the_answer_says_what_is_missing() -> None:
    choice = choose_microbatches(lambda count: make_tiny(8, count, device_gib=0.1), list_counts(8))
    assert choice.result.plan is None
    assert "GiB more device memory" in choice.result.message
    with pytest.raises(PlannerError, match="microbatches"):
        choose_microbatches(lambda count: make_tiny(8, count), [])


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    def make(batch: int, count: int) -> Problem:
        return make_tiny(batch, count, device_gib=1.5, host_gib=1.2)

    largest = find_largest_batch(make)
    assert 1 <= largest.batch <= largest.bound
    assert max(largest.strategies.values()) <= largest.batch
    fitting = make(largest.batch, largest.num_microbatches)
    assert solve(fitting, time_limit_s=5.0, may_drop=True).plan is not None
    for count in list_counts(largest.bound + 1):
        assert solve(make(largest.bound + 1, count), time_limit_s=5.0, may_drop=True).plan is None


@pytest.mark.slow
def test_more_device_memory_brings_something_where_it_binds_and_nothing_where_it_does_not() -> None:
    problem = make_toy_problem(1, num_blocks=10, num_points=3)
    peak = account(problem, make_plan(problem, [UnitPlan()] * 12, 2)).device_peak_bytes
    slow = replace(problem.hardware, device_memory_bytes=peak // 2, h2d_gbs=1.0, d2h_gbs=1.0)
    problem = replace(problem, hardware=slow)
    plan = solve(problem, time_limit_s=5.0).plan
    assert plan is not None
    tight = find_gains(problem, plan, time_limit_s=5.0)
    roomy = replace(problem, hardware=replace(problem.hardware, device_memory_bytes=1 << 44))
    roomy_plan = solve(roomy, time_limit_s=5.0).plan
    assert roomy_plan is not None
    assert roomy_plan.predicted is not None
    assert plan.predicted is not None
    assert set(tight) == {"device", "host"}
    assert 0 < tight["device"] <= plan.predicted.step_ms
    assert find_gains(roomy, roomy_plan, time_limit_s=5.0)["device"] <= 1e-3 * roomy_plan.predicted.step_ms
