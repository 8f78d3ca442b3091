"""Packed samples: attention by their lengths is that by the dense mask, traceable, and repeats; training agrees."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vjp

from lazytrain import attention, decoder
from lazytrain.attention import segment_attention, takes_lengths
from lazytrain.base import Context, Params
from lazytrain.configuration import parse_config
from lazytrain.decoder import make_context
from lazytrain.joint import trace_joint
from lazytrain.partition import keep_all, residual_candidates
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.encoding import Encoded, EncodeReport
from lazytrain.transformer import random_params, transformer_model

TOLERANCE = 2e-6  # fp32, outputs and gradients of size 1; worst seen 5e-7
BF16_ERROR_RATIO = 1.5  # error against fp32, of attention by lengths to that of the dense mask
SIZES = [(2, 30), (1, 9), (0, 17), (3, 3), (1, 1), (5, 40), (2, 12), (4, 8), (1, 25)]
CONFIG = parse_config({
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
})  # fmt: skip


def make_batch(rows: int = 3, device: str = "cpu") -> dict[str, Tensor]:
    """Return a packed batch: full lines, lines with padding, and an empty one."""
    lengths = np.array([prompt + response for prompt, response in SIZES])
    tokens = np.random.default_rng(0).integers(1, 97, lengths.sum()).astype(np.int32)
    encoded = Encoded(
        tokens=tokens,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.array([prompt for prompt, _ in SIZES], dtype=np.int32),
        pad_id=0,
        report=EncodeReport(len(SIZES), len(SIZES), 0, {}, 64, {}, 0, 0),
    )
    batch = BatchStream(encoded, batch_size=rows + 1, seq_tokens=56, packing=True).batch(0)
    assert batch["segments_bt"][-1].max() == 0, "the last line is empty"
    assert batch["segments_bt"].max() >= 3
    return {name: value.to(device) for name, value in batch.items()}


def attend_one_by_one(q_nhk: Tensor, k_ngk: Tensor, v_ngk: Tensor, bounds_s: Tensor, max_length: int) -> Tensor:
    """Attend in each segment on its own, by the formula."""
    shared = q_nhk.shape[1] // k_ngk.shape[1]
    k_nhk, v_nhk = k_ngk.repeat_interleave(shared, 1), v_ngk.repeat_interleave(shared, 1)
    parts = []
    for first, last in zip(bounds_s[:-1].tolist(), bounds_s[1:].tolist()):
        assert 0 <= last - first <= max_length
        scores_hqn = torch.einsum("qhk,nhk->hqn", q_nhk[first:last], k_nhk[first:last]) / q_nhk.shape[-1] ** 0.5
        hidden_qn = torch.ones(last - first, last - first, dtype=torch.bool).triu(1)
        weights_hqn = scores_hqn.masked_fill(hidden_qn, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqn,nhk->qhk", weights_hqn, v_nhk[first:last]))
    return torch.cat(parts)


class Case:
    """One block over a packed batch."""

    def __init__(self, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        model = transformer_model(CONFIG)
        drawn = dict(random_params(model, 0, torch.float32, std=0.2))
        unit = model.blocks[0]
        self.fn, self.dtype, self.batch = unit.fn, dtype, make_batch(device=device)
        self.params: Params = {name: drawn[spec.full_name].to(dtype).to(device) for name, spec in unit.params.items()}
        shape = (*self.batch["tokens_bt"].shape, 96)
        x_btd, dy_btd = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
        self.x_btd, self.dy_btd = x_btd.to(dtype).to(device), dy_btd.to(dtype).to(device)

    def context(self, *, dense: bool = False) -> Context:
        batch = {name: value for name, value in self.batch.items() if not (dense and name == "segment_lengths_bs")}
        return make_context(batch, self.dtype, config=CONFIG)

    def run(self, ctx: Context) -> dict[str, Tensor]:
        """Return y, dx and the parameters' gradients by name."""
        y_btd, pull = vjp(lambda params, x: self.fn(params, x, ctx), self.params, self.x_btd)
        grads, dx_btd = pull(self.dy_btd)
        return {"y": y_btd, "dx": dx_btd, **grads}


@pytest.fixture
def by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU attend by lengths, by the formula."""
    monkeypatch.setattr(decoder, "takes_lengths", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(attention, "_attend_by_lengths", attend_one_by_one)


@pytest.mark.usefixtures("by_lengths")
def test_attention_by_lengths_equals_the_dense_mask() -> None:
    case = Case()
    ctx, dense = case.context(), case.context(dense=True)
    assert "mask_b1tt" not in ctx
    assert "bounds_s" not in dense
    ours, expected = case.run(ctx), case.run(dense)
    for name, value in expected.items():
        assert (ours[name] - value).abs().max() <= TOLERANCE * value.abs().max().clamp(min=1), name


@pytest.mark.usefixtures("by_lengths")
def test_bounds_are_those_of_the_segments_for_every_cut_in_microbatches() -> None:
    batch = make_batch()
    for num_parts in (1, 2, 4):
        for parts in zip(*(value.tensor_split(num_parts) for value in batch.values())):
            part = dict(zip(batch, parts))
            bounds = make_context(part, torch.float32, config=CONFIG)["bounds_s"]
            assert bounds.dtype == torch.int32
            segments_n = part["segments_bt"].flatten()
            places_n = part["positions_bt"].flatten()
            row_n = torch.arange(len(segments_n)) // part["segments_bt"].shape[1]
            changes = (segments_n.diff() != 0) | (row_n.diff() != 0)
            starts = [0, *(changes.nonzero().flatten() + 1).tolist(), len(segments_n)]
            assert sorted(set(bounds.tolist())) == starts
            assert not places_n[torch.tensor(starts[:-1])].any()


def test_who_attends_by_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    takes = partial(takes_lengths, cuda)
    assert takes(torch.bfloat16, 128)
    assert takes(torch.float16, 64)
    assert not takes(torch.float32, 128)
    assert not takes(torch.bfloat16, 264)
    assert not takes(torch.bfloat16, 20)
    assert not takes_lengths(cpu, torch.bfloat16, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes(torch.float16, 64)


def test_block_that_attends_by_lengths_can_be_traced_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "takes_lengths", lambda device, dtype, head_dim: True)
    case = Case(dtype=torch.bfloat16)
    ctx = case.context()
    joint = trace_joint(  # on fake tensors: the kernel itself needs a GPU
        case.fn, case.params, case.x_btd, ctx, lambda grads: torch.cat([g.flatten() for g in grads.values()])
    )
    names = [str(node.target) for node in joint.module.graph.nodes]
    assert sum("_flash_attention_forward" in name for name in names) == 1
    assert sum("_flash_attention_backward" in name for name in names) == 1
    num_places = case.x_btd.shape[1]
    for node in joint.module.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, Tensor) or value.shape[-2:] != (num_places, num_places), node
    kept = {node.name for node in keep_all(joint)}
    assert any("flash_attention" in name or "getitem" in name for name in kept)
    points = [len(residuals) for residuals in residual_candidates(joint, (0.0, 0.5, 1.0))]
    assert points[0] < points[-1]


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.float() - truth).norm() / truth.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_attention_by_lengths_is_as_near_to_fp32_as_the_dense_mask(dtype: torch.dtype) -> None:
    case, truth_case = Case(device="cuda", dtype=dtype), Case(device="cuda")
    ctx = case.context()
    assert "bounds_s" in ctx
    truth_case.params = {name: value.float() for name, value in case.params.items()}
    truth_case.x_btd, truth_case.dy_btd = case.x_btd.float(), case.dy_btd.float()
    truth = truth_case.run(truth_case.context())  # fp32: by the dense mask
    ours, dense = case.run(ctx), case.run(case.context(dense=True))
    for name, value in truth.items():
        assert error(ours[name], value) <= BF16_ERROR_RATIO * error(dense[name], value) + 1e-4, name


@pytest.mark.gpu
def test_gpu_attention_by_lengths_repeats_bit_for_bit() -> None:
    from lazytrain.determinism import deterministic

    case = Case(device="cuda", dtype=torch.bfloat16)
    with deterministic(torch.device("cuda")):
        first = case.run(case.context())
        for _ in range(3):
            again = case.run(case.context())
            assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.gpu
def test_gpu_attention_by_lengths_needs_no_square_of_the_row() -> None:
    num_positions = 32_768  # a dense mask has 1 GiB, the scores of 4 heads 8 GiB more in bf16
    q, k, v = (
        torch.randn(1, heads, num_positions, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    bounds_s = torch.arange(0, num_positions + 1, 4096, device="cuda", dtype=torch.int32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    segment_attention(q, k, v, bounds_s).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_gpu_packed_training_is_that_of_the_dense_mask(compile: bool) -> None:
    from lazytrain.optimizer import adamw8bit
    from lazytrain.trainer import make_train_step

    model = transformer_model(CONFIG)
    drawn = dict(random_params(model, 0, torch.float32, std=0.2))
    batch = make_batch()

    def losses(batch: dict[str, Tensor]) -> list[float]:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "compile": compile}
        step = make_train_step(model, adamw8bit(1e-3), **options)
        state = step.init(lambda name: drawn[name], seed=0)
        found = []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(metrics.loss)
        return found

    packed = losses(batch)
    dense = losses({name: value for name, value in batch.items() if name != "segment_lengths_bs"})
    assert packed == pytest.approx(dense, rel=5e-3)
    assert packed[-1] < packed[0]
