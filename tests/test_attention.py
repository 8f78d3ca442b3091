"""Attention whose forward is cuDNN's and whose backward is flash attention's: who takes it, its graph, its values."""

import pytest
import torch
import torch.nn.functional as F
from test_decoder import BlockCase
from torch import Tensor

from lazytrain import attention
from lazytrain.attention import CudnnForward, causal_attention, gains_by_cudnn
from lazytrain.determinism import deterministic
from lazytrain.joint import trace_joint
from lazytrain.partition import keep_all, residual_candidates


class OnHopper:
    """What `gains_by_cudnn` reads of a tensor."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype


def gains(q: OnHopper, k: OnHopper) -> bool:
    return gains_by_cudnn(q, k)  # type: ignore[arg-type]


def test_who_takes_cudnns_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    q, k = OnHopper(2, 8, 1024, 128), OnHopper(2, 2, 1024, 128)
    assert gains(q, k)
    assert gains(OnHopper(2, 8, 1024, 64, dtype=torch.float16), OnHopper(2, 2, 1024, 64))
    assert not gains(OnHopper(2, 8, 1024, 128, dtype=torch.float32), k)
    assert not gains(OnHopper(2, 8, 64, 128), OnHopper(2, 2, 64, 128)), "short rows"
    assert not gains(OnHopper(2, 8, 1, 128), k), "one more token of a cache"
    assert not gains(OnHopper(2, 8, 1024, 256), k), "wide heads"
    assert not gains(OnHopper(2, 8, 1024, 20), k)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    assert not gains(q, k), "an older cuDNN"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert not gains(q, k)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not gains(q, k), "another generation"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not gains(q, k), "switched off"
    assert not gains_by_cudnn(torch.empty(2, 8, 1024, 128), torch.empty(2, 2, 1024, 128)), "no GPU"


def test_block_can_be_traced_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "gains_by_cudnn", lambda q, k: True)
    case = BlockCase("llama", dtype=torch.bfloat16, length=10)
    joint = trace_joint(  # on fake tensors: the kernels need a GPU
        case.unit.fn,
        case.params,
        case.x_btd,
        case.ctx,
        lambda grads: torch.cat([g.flatten() for g in grads.values()]),
    )
    nodes = list(joint.module.graph.nodes)
    names = [str(node.target) for node in nodes]
    assert sum("_cudnn_attention.default" in name for name in names) == 1
    assert sum("_flash_attention_backward" in name for name in names) == 1
    assert not any("_cudnn_attention_backward" in name or "_flash_attention.default" in name for name in names)
    for node in nodes:
        value = node.meta.get("val")
        assert not isinstance(value, Tensor) or value.shape[-2:] != (10, 10), "no t x t scores"
    shapes = [tuple(node.meta["val"].shape) for node in keep_all(joint)]
    assert (2, 6, 10, 1) in shapes, "the log-sum-exp is kept, not the scores"
    points = [len(residuals) for residuals in residual_candidates(joint, (0.0, 0.5, 1.0))]
    assert points[0] < points[-1]


def make_inputs(t: int, k: int, dtype: torch.dtype, heads: tuple[int, int] = (8, 2)) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, key, v, do = (
        torch.randn(2, t, n, k, device="cuda", dtype=dtype, generator=generator).transpose(1, 2)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    return q, key, v, do


def differentiate(attend: object, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    own = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*own)  # type: ignore[operator]
    return (o.detach(), *torch.autograd.grad(o, own, do))


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.float() - truth).norm() / truth.norm())


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("t", "k", "heads"), [(1024, 128, (8, 2)), (128, 64, (6, 6)), (333, 128, (8, 1)), (2048, 96, (4, 2))]
)
def test_values_are_as_near_to_the_truth_as_flash_attentions(
    t: int, k: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    q, key, v, do = make_inputs(t, k, dtype, heads)
    if not gains_by_cudnn(q, key):
        pytest.skip("not Hopper, or an older cuDNN")
    with deterministic(torch.device("cuda")):
        ours = differentiate(lambda *qkv: causal_attention(*qkv, {}), q, key, v, do)
        again = differentiate(lambda *qkv: CudnnForward.apply(*qkv)[0], q, key, v, do)
        theirs = differentiate(flash, q, key, v, do)
        truth = differentiate(
            flash,
            *(x.double() for x in (q, key.repeat_interleave(heads[0] // heads[1], 1))),
            v.double().repeat_interleave(heads[0] // heads[1], 1),
            do.double(),
        )
    num_shared = heads[0] // heads[1]
    truth = (*truth[:2], *(x.unflatten(1, (heads[1], num_shared)).sum(2) for x in truth[2:]))
    for name, mine, same, other, true in zip(("o", "dq", "dk", "dv"), ours, again, theirs, truth):
        assert torch.equal(mine, same), f"{name} repeats"
        assert mine.stride() == other.stride(), name
        assert error(mine, true.float()) <= 1.05 * error(other, true.float()), name


@pytest.mark.gpu
def test_compiled_block_gives_what_the_eager_one_does() -> None:
    case = BlockCase("llama", device="cuda", dtype=torch.bfloat16, length=256, head_dim=64)
    q = torch.empty(2, 6, 256, 64, device="cuda", dtype=torch.bfloat16)
    if not gains_by_cudnn(q, q):
        pytest.skip("not Hopper, or an older cuDNN")
    with deterministic(torch.device("cuda")):
        eager, compiled = case.run(), case.run(torch.compile(case.trace()))
        for mine, other in zip(
            (eager[0], eager[2], *eager[1].values()), (compiled[0], compiled[2], *compiled[1].values())
        ):
            assert error(mine, other.float()) < 0.02
        again = case.run()
    assert all(torch.equal(a, b) for a, b in zip((eager[0], eager[2]), (again[0], again[2])))
