"""Batches: a pure function of seed and step; every target once; few shapes; packed lines that don't touch."""

from collections import Counter
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.base import IGNORE_INDEX
from lazytrain.configuration import parse_config
from lazytrain.errors import DataError
from lazytrain.recipes.batches import MAX_SHAPES, BatchOrder, BatchStream, choose_lengths, pack_lines
from lazytrain.recipes.encoding import Encoded, EncodeReport
from lazytrain.transformer import forward_logits, random_params, transformer_model

PAD = 1  # is EOS too
PINNED_ORDER = [0, 4, 7, 1, 5, 6, 3, 2]  # of seed 3: runs resumed by a later version must go on in this order
LOSS_TOLERANCE = 2e-6  # relative, fp32; worst seen 3e-7
GRADS_TOLERANCE = 1e-5  # relative to the largest element; worst seen 1e-6

SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=40)
OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 9),
        "seq_tokens": st.sampled_from([None, 40, 64]),
        "seed": st.integers(-3, 2**65),
        "packing": st.booleans(),
        "pad_to_multiple": st.sampled_from([1, 8]),
        "group_by_length": st.booleans(),
    }
)


def make_encoded(sizes: list[tuple[int, int]]) -> Encoded:
    """Return samples of so many prompt and response tokens (at least two together); tokens differ between samples."""
    sizes = [(prompt, max(response, 2 - prompt)) for prompt, response in sizes]
    tokens = [[100 * i + j + 2 for j in range(p + r - 1)] + [PAD] for i, (p, r) in enumerate(sizes)]
    report = EncodeReport(len(sizes), len(sizes), 0, {}, 100, {}, 0, 0)
    return Encoded(
        tokens=np.concatenate([np.array(t, dtype=np.int32) for t in tokens]),
        offsets=np.cumsum([0, *(len(t) for t in tokens)]),
        prompt_lengths=np.array([p for p, _ in sizes], dtype=np.int32),
        pad_id=PAD,
        report=report,
    )


def expected_pairs(encoded: Encoded) -> Counter[tuple[int, int]]:
    """Return (token, next token) of every trained position."""
    pairs: Counter[tuple[int, int]] = Counter()
    for i in range(len(encoded)):
        tokens, prompt_tokens = encoded.example(i)
        pairs.update(list(pairwise(tokens))[max(prompt_tokens, 1) - 1 :])
    return pairs


def pairs_of(batch: dict[str, torch.Tensor]) -> Counter[tuple[int, int]]:
    tokens, targets = batch["tokens_bt"].flatten().tolist(), batch["targets_bt"].flatten().tolist()
    return Counter((token, target) for token, target in zip(tokens, targets) if target != IGNORE_INDEX)


def same_batches(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@given(SIZES, OPTIONS)
@settings(deadline=None)
def test_every_epoch_has_every_target_once(sizes: list[tuple[int, int]], options: dict) -> None:
    encoded = make_encoded(sizes)
    stream = BatchStream(encoded, **options)
    assert 1 <= len(set(stream.shapes)) == len(stream.shapes) <= MAX_SHAPES
    for epoch in (0, 2):
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
        batches = [stream.batch(step) for step in steps]
        assert sum(map(pairs_of, batches), Counter()) == expected_pairs(encoded)
        seen = [sample for step in steps for line in stream.examples_at(step) for sample in line]
        assert sorted(seen) == list(range(len(encoded)))
        counts = [stream.count_tokens(step) for step in steps]
        for batch, count in zip(batches, counts):
            lengths_bs = batch.pop("segment_lengths_bs", None)
            assert all(tuple(tensor.shape) in stream.shapes for tensor in batch.values())
            assert (lengths_bs is not None) == options["packing"]
            if lengths_bs is not None:
                assert lengths_bs.sum(1).tolist() == [batch["tokens_bt"].shape[1]] * len(lengths_bs)
            assert all(tensor.dtype == torch.int64 for tensor in batch.values())
            assert count.real_tokens + count.padding_tokens == batch["tokens_bt"].numel()
            assert count.target_tokens == (batch["targets_bt"] != IGNORE_INDEX).sum()
        assert tuple(map(sum, zip(*counts))) == stream.epoch_counts
        assert stream.epoch_counts.real_tokens == encoded.lengths.sum() - len(encoded)


@given(SIZES, OPTIONS, st.integers(0, 200))
@settings(deadline=None, max_examples=50)
def test_batch_is_a_function_of_seed_and_step(sizes: list[tuple[int, int]], options: dict, step: int) -> None:
    encoded = make_encoded(sizes)
    stream = BatchStream(encoded, **options)
    for earlier in range(3):
        stream.batch(earlier)
    assert same_batches(stream.batch(step), BatchStream(encoded, **options).batch(step))


def test_resume_at_step_17_of_three_epochs_of_ten_has_the_uninterrupted_order() -> None:
    encoded = make_encoded([(2, 3 + i % 4) for i in range(10)])

    def order(first: int) -> list[list[list[int]]]:
        stream = BatchStream(encoded, batch_size=1, seed=7)
        assert stream.steps_per_epoch == 10
        return [stream.examples_at(step) for step in range(first, 30)]

    assert order(17) == order(0)[17:]
    epochs = [order(0)[i : i + 10] for i in (0, 10, 20)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(sorted(epoch) == [[[i]] for i in range(10)] for epoch in epochs)


def test_every_epoch_mixes_samples_and_shapes_anew() -> None:
    stream = BatchStream(make_encoded([(1, 4 + 20 * (i % 2)) for i in range(40)]), batch_size=4, seed=0)
    assert len(stream.shapes) == 2
    epochs = [range(start, start + stream.steps_per_epoch) for start in (0, stream.steps_per_epoch)]
    shapes = [[stream.batch(step)["tokens_bt"].shape for step in epoch] for epoch in epochs]
    companies = [
        {frozenset(sample for line in stream.examples_at(step) for sample in line) for step in epoch}
        for epoch in epochs
    ]
    assert shapes[0] != shapes[1]
    assert sorted(shapes[0]) == sorted(shapes[1])
    assert companies[0] != companies[1]


def test_order_is_pinned_to_the_seed_for_ever() -> None:
    order = BatchOrder(num_examples=8, seed=3)
    assert order.permutation(0).tolist() == PINNED_ORDER
    assert [order.example_at(0, i) for i in range(8)] == PINNED_ORDER
    others = [
        BatchOrder(num_examples=8, seed=seed, stream=stream).permutation(epoch).tolist()
        for seed, epoch, stream in ((4, 0, 0), (3, 1, 0), (3, 0, 1))
    ]
    assert PINNED_ORDER not in others


def test_prompt_and_padding_have_no_target_and_the_end_has_one() -> None:
    batch = BatchStream(make_encoded([(3, 2)]), batch_size=2, seq_tokens=6).batch(0)
    assert batch["tokens_bt"].tolist() == [[2, 3, 4, 5, PAD, PAD], [PAD] * 6]
    assert batch["targets_bt"].tolist() == [[-100, -100, 5, PAD, -100, -100], [-100] * 6]


def test_packed_segments_restart_and_do_not_predict_each_other() -> None:
    stream = BatchStream(make_encoded([(2, 2), (1, 5), (0, 3)]), batch_size=1, seq_tokens=12, packing=True)
    assert (stream.steps_per_epoch, stream.examples_at(0)) == (1, [[1, 0, 2]])
    batch = {name: tensor[0].tolist() for name, tensor in stream.batch(0).items()}
    assert batch == {
        "tokens_bt": [102, 103, 104, 105, 106, 2, 3, 4, 202, 203, PAD, PAD],
        "targets_bt": [103, 104, 105, 106, PAD, -100, 4, PAD, 203, PAD, -100, -100],
        "positions_bt": [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 0, 0],
        "segments_bt": [1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0],
        "segment_lengths_bs": [5, 3, 2, 2],
    }


@given(SIZES, OPTIONS, st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_microbatches_have_the_same_targets(sizes: list[tuple[int, int]], options: dict, step: int) -> None:
    batch = BatchStream(make_encoded(sizes), **options).batch(step)
    lines = len(batch["tokens_bt"])
    for num_microbatches in {k for k in (1, 2, 4, lines) if lines % k == 0}:
        chunks = zip(*(tensor.chunk(num_microbatches) for tensor in batch.values()))
        parts = [pairs_of(dict(zip(batch, chunk))) for chunk in chunks]
        assert sum(parts, Counter()) == pairs_of(batch)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None)
def test_chosen_lengths_equal_brute_force(places: list[int], multiple: int, max_shapes: int) -> None:
    ends = sorted({-(-p // multiple) * multiple for p in places})

    def cost(lengths: tuple[int, ...]) -> int:
        return sum(min(length for length in lengths if length >= p) for p in places)

    best = [
        min(cost((*lower, ends[-1])) for lower in combinations(ends[:-1], k - 1))
        for k in range(1, min(max_shapes, len(ends)) + 1)
    ]
    chosen = choose_lengths(np.array(places), multiple, max_shapes)
    assert chosen == sorted(set(chosen))
    assert cost(tuple(chosen)) == best[len(chosen) - 1]  # the best of its number; fewer where more save little
    assert all(small <= large * 0.95 for large, small in pairwise(best[: len(chosen)]))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(0, 3))
@settings(deadline=None)
def test_packed_lines_hold_every_sample_once_and_fit(sizes: list[int], seed: int) -> None:
    lines = pack_lines(np.array(sizes), 20, seed)
    assert sorted(np.concatenate(lines).tolist()) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in line) for line in lines]
    assert max(filled) <= 20
    assert len(lines) <= 1.5 * max(1, -(-sum(sizes) // 20)) + 1  # best fit decreasing is within 11/9 of the optimum


def test_sample_longer_than_a_line_is_refused() -> None:
    for packing in (False, True):
        with pytest.raises(DataError, match=r"a sample fills 19 places, more than the 16 of a line; encode with"):
            BatchStream(make_encoded([(10, 10)]), batch_size=1, seq_tokens=16, packing=packing)


def test_padding_is_little_where_lengths_differ_much() -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 0.6, 2000).astype(int).clip(2, 400)
    encoded = make_encoded([(1, int(n)) for n in lengths])
    shares = {}
    for name, options in {
        "buckets": {},
        "ungrouped": {"group_by_length": False},
        "one": {"seq_tokens": 400},
        "packed": {"seq_tokens": 400, "packing": True},
    }.items():
        counts = BatchStream(encoded, batch_size=8, **options).epoch_counts
        shares[name] = counts.padding_tokens / (counts.padding_tokens + counts.real_tokens)
    assert shares["one"] > 0.8
    assert shares["ungrouped"] > 0.8
    assert shares["buckets"] < 0.4
    assert shares["packed"] < 0.02


def test_packing_batch_size_and_accumulation_give_the_same_loss_and_gradients() -> None:
    """Over an epoch: packed or not, 1 or 8 rows a batch, 1 or 4 batches a step."""
    sizes = [(3, 9), (1, 2), (0, 5), (7, 20), (2, 2), (4, 11), (1, 1), (5, 6)]
    encoded = make_encoded(sizes)
    encoded.tokens[:] %= 67
    config = parse_config({
        "model_type": "qwen2", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    })  # fmt: skip
    model = transformer_model(config)

    def run(num_microbatches: int, **options) -> tuple[float, dict[str, torch.Tensor]]:  # type: ignore[no-untyped-def]
        params = {n: p.requires_grad_() for n, p in random_params(model, 0, torch.float32, std=0.3)}
        stream = BatchStream(encoded, seed=5, **options)
        total = torch.zeros(())
        for step in range(stream.steps_per_epoch):
            batch = stream.batch(step)
            for chunk in zip(*(tensor.chunk(num_microbatches) for tensor in batch.values())):
                part = dict(zip(batch, chunk))
                logits = forward_logits(
                    model, lambda unit: {k: params[s.full_name] for k, s in unit.params.items()}, part
                )
                targets = part["targets_bt"]
                total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        total.backward()
        return total.item(), {name: p.grad for name, p in params.items() if p.grad is not None}

    loss, grads = run(1, batch_size=8, seq_tokens=32)
    assert loss > 0
    cases = [
        (accumulate, {"batch_size": rows * accumulate, "seq_tokens": 40, "packing": packing})
        for packing, rows, accumulate in product((False, True), (1, 8), (1, 4))
    ]
    others = [(1, {"batch_size": 8}), (1, {"batch_size": 1, "pad_to_multiple": 1}), (2, {"batch_size": 4})]
    for num_microbatches, options in [*cases, *others]:
        other_loss, other_grads = run(num_microbatches, **options)
        assert abs(other_loss - loss) <= LOSS_TOLERANCE * loss, options
        for name, grad in grads.items():
            assert (other_grads[name] - grad).abs().max() <= GRADS_TOLERANCE * grad.abs().max(), (name, options)
