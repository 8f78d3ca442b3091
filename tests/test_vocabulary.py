"""Embed and head: their own gradients against autograd, chunks of logits, token ids."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp

from lazytrain import vocabulary
from lazytrain.base import IGNORE_INDEX, Params, Unit
from lazytrain.configuration import parse_config
from lazytrain.errors import DataError
from lazytrain.transformer import transformer_model
from lazytrain.vocabulary import check_token_ids, embed_grads_into, logits_chunk

CONFIG = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
)


def head_case() -> tuple[Unit, Params, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    params = {
        "norm.weight": 1 + 0.3 * torch.randn(24, generator=generator),
        "lm_head.weight": torch.randn(67, 24, generator=generator),
    }
    x_btd = torch.randn(2, 50, 24, generator=generator)
    targets_bt = torch.randint(0, 67, (2, 50), generator=generator)
    targets_bt[0, ::3] = IGNORE_INDEX
    return transformer_model(CONFIG).head, params, x_btd, {"targets_bt": targets_bt}


def zero_sums(params: Params) -> Params:
    return {name: torch.zeros_like(value, dtype=torch.float32) for name, value in params.items()}


def head_grads(
    head: Unit, params: Params, x_btd: Tensor, batch: dict[str, Tensor], scale: float
) -> tuple[Tensor, Tensor, Params]:
    """The gradients of two calls that add to the same sums are twice those of one; return those of one."""
    assert head.grads_into is not None
    sums = zero_sums(params)
    head.grads_into(params, x_btd, batch, scale, sums)
    once = {name: value.clone() for name, value in sums.items()}
    loss_sum, dx_btd = head.grads_into(params, x_btd, batch, scale, sums)
    torch.testing.assert_close(sums, {name: 2 * value for name, value in once.items()})
    return loss_sum, dx_btd, once


def embed_grads(params: Params, batch: dict[str, Tensor], dx_btd: Tensor) -> Tensor:
    sums = zero_sums(params)
    embed_grads_into(params, batch, dx_btd, sums)
    return sums["embed_tokens.weight"]


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 67 * 7, 2**20])
@pytest.mark.parametrize("with_index", [False, True])
def test_head_loss_and_grads_equal_autograd(
    chunk_bytes: int, with_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, params, x_btd, batch = head_case()
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    x_leaf = x_btd.clone().requires_grad_()
    h_btd = F.rms_norm(x_leaf, (24,), leaves["norm.weight"], CONFIG.rms_norm_eps)
    logits_nv = F.linear(h_btd, leaves["lm_head.weight"]).flatten(0, 1)
    loss = F.cross_entropy(logits_nv, batch["targets_bt"].flatten(), reduction="sum")
    (0.25 * loss).backward()

    monkeypatch.setitem(vocabulary.LOGITS_BYTES, "cpu", chunk_bytes)
    if with_index:
        batch["target_index_n"] = (batch["targets_bt"].reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
    loss_sum, dx_btd, grads = head_grads(head, params, x_btd, batch, 0.25)
    torch.testing.assert_close(loss_sum, loss.detach())
    torch.testing.assert_close(head.fn(params, x_btd, batch), loss.detach())
    torch.testing.assert_close(dx_btd, x_leaf.grad)
    assert set(grads) == set(params)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, leaves[name].grad)


def test_head_loss_is_differentiable() -> None:
    head, params, x_btd, batch = head_case()
    _, pull = vjp(lambda params, x: head.fn(params, x, batch), params, x_btd)
    grads, dx_btd = pull(torch.tensor(0.25))
    _, expected_dx, expected = head_grads(head, params, x_btd, batch, 0.25)
    torch.testing.assert_close(dx_btd, expected_dx)
    torch.testing.assert_close(grads, expected)


def test_head_without_targets_has_no_loss_and_no_gradient() -> None:
    head, params, x_btd, batch = head_case()
    batch = {"targets_bt": torch.full_like(batch["targets_bt"], IGNORE_INDEX)}
    for case in (batch, {**batch, "target_index_n": torch.empty(0, dtype=torch.int64)}):
        loss_sum, dx_btd, grads = head_grads(head, params, x_btd, case, 1.0)
        assert float(loss_sum) == float(head.fn(params, x_btd, case)) == 0
        assert not any(grad.any() for grad in (dx_btd, *grads.values()))


@pytest.mark.parametrize("vocab_size", [1, 67, 32000, 151936, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_chunk_fits_its_bytes(vocab_size: int, dtype: torch.dtype) -> None:
    weight_vd = torch.empty(0, dtype=dtype).expand(vocab_size, 0)
    rows = logits_chunk(weight_vd)
    assert rows >= 1
    assert rows == 1 or rows * vocab_size * dtype.itemsize <= vocabulary.LOGITS_BYTES["cpu"]
    assert rows < 128 or rows % 128 == 0


def embed_case(dtype: torch.dtype) -> tuple[Params, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)
    params = {"embed_tokens.weight": torch.zeros(9, 13, dtype=dtype)}
    tokens_bt = torch.randint(0, 8, (4, 500), generator=generator)
    return params, {"tokens_bt": tokens_bt}, torch.randn(4, 500, 13, generator=generator).to(dtype)


def test_embed_grads_equal_vjp() -> None:
    params, batch, dx_btd = embed_case(torch.float32)
    _, pull = vjp(lambda params: F.embedding(batch["tokens_bt"], params["embed_tokens.weight"]), params)
    expected = pull(dx_btd)[0]["embed_tokens.weight"]
    grads = embed_grads(params, batch, dx_btd)
    torch.testing.assert_close(grads, expected)
    assert not grads[8].any(), "a token that was never used"


def test_embed_grads_accumulate_in_fp32() -> None:
    params, batch, dx_btd = embed_case(torch.bfloat16)
    exact = torch.zeros(9, 13, dtype=torch.float64)
    exact.index_add_(0, batch["tokens_bt"].reshape(-1), dx_btd.reshape(-1, 13).double())
    assert torch.equal(embed_grads(params, batch, dx_btd), exact.float())


@pytest.mark.parametrize("tokens", [[3, 67], torch.tensor([[0, 67], [1, 2]]), [-1, 3]])
def test_token_id_without_a_row_is_named(tokens: Any) -> None:
    with pytest.raises(DataError, match=r"token id (67|-1) has no row.*0 to 66.*vocab_size 67"):
        check_token_ids(tokens, CONFIG)


def test_token_ids_up_to_the_last_row_pass() -> None:
    check_token_ids([0, 66], CONFIG)
    check_token_ids([], CONFIG)


@pytest.mark.gpu
def test_gpu_embed_grads_repeat_bit_for_bit() -> None:
    params, batch, dx_btd = embed_case(torch.bfloat16)
    cpu = embed_grads(params, batch, dx_btd)
    on_gpu = [{name: x.cuda() for name, x in tree.items()} for tree in (params, batch)]
    runs = [embed_grads(on_gpu[0], on_gpu[1], dx_btd.cuda()) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    torch.testing.assert_close(runs[0].cpu(), cpu)


@pytest.mark.gpu
def test_gpu_head_grads_equal_those_of_the_cpu() -> None:
    head, params, x_btd, batch = head_case()
    loss, dx_btd, grads = head_grads(head, params, x_btd, batch, 0.25)
    on_gpu = [{name: x.cuda() for name, x in tree.items()} for tree in (params, batch)]
    gpu_loss, gpu_dx, gpu_grads = head_grads(head, on_gpu[0], x_btd.cuda(), on_gpu[1], 0.25)
    torch.testing.assert_close(gpu_loss.cpu(), loss)
    torch.testing.assert_close(gpu_dx.cpu(), dx_btd)
    for name, grad in grads.items():
        torch.testing.assert_close(gpu_grads[name].cpu(), grad)
