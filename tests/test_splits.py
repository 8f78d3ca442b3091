"""Samples of the held-out rows: by the seed, in order, nested."""

from hypothesis import given
from hypothesis import strategies as st

from lazytrain.recipes.rows import Row
from lazytrain.recipes.splits import sample_rows

ROWS = [Row(f"Q{i}", "A", "", "") for i in range(50)]
PINNED = ["Q10", "Q23", "Q27", "Q31", "Q41"]  # of seed 0: scores of a later version must stay comparable


@given(st.integers(0, 60), st.integers(0, 60), st.integers(-3, 2**65))
def test_sample_is_in_order_and_a_smaller_one_is_part_of_it(count: int, more: int, seed: int) -> None:
    sample = sample_rows(ROWS, count, seed)
    assert len(sample) == min(count, 50)
    assert sample == sorted(set(sample), key=ROWS.index)
    assert set(sample) <= set(sample_rows(ROWS, count + more, seed))


def test_sample_depends_on_the_seed_and_is_not_the_first_rows() -> None:
    samples = [sample_rows(ROWS, 10, seed) for seed in (0, 1)]
    assert samples[0] != samples[1]
    assert ROWS[:10] not in samples
    assert sample_rows(ROWS, None, 0) == ROWS


def test_sample_of_a_seed_is_pinned_for_ever() -> None:
    assert [row.query for row in sample_rows(ROWS, 5, 0)] == PINNED
