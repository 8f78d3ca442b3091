"""Adam8bit, the front for plain PyTorch parameters: the functional bits, options, errors, states that come back."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazytrain import Adam8bit, adamw8bit
from lazytrain.kernels.adam8bit import Adam8bit as FromItsModule
from lazytrain.kernels.master import join_master
from lazytrain.kernels.parameter_state import MIN_QUANTIZED_NUMEL
from lazytrain.layout import MIN_QUANTIZED_NUMEL as IN_LAYOUTS

SHAPES = {"a": (96, 130), "bias": (130,), "square": (64, 128), "small": (63, 65), "cube": (3, 40, 50), "one": ()}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
DTYPES = [torch.float32, torch.bfloat16]


def make_params(dtype: torch.dtype, seed: int = 0) -> dict[str, nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for name, shape in SHAPES.items()}


def set_grads(params: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)
    return {name: p.grad for name, p in params.items()}  # type: ignore[misc]


def state_tensors(optimizer: Adam8bit) -> list[Any]:
    return [value for p in optimizer.param_groups[0]["params"] for _, value in sorted(optimizer.state[p].items())]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b))


def test_both_names_are_the_same_class() -> None:
    assert Adam8bit is FromItsModule
    assert MIN_QUANTIZED_NUMEL == IN_LAYOUTS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("master_bits", [32, 24])
def test_adam8bit_equals_the_functional_optimizer(dtype: torch.dtype, master_bits: int) -> None:
    params = make_params(dtype)
    functional = adamw8bit(**OPTIONS, master_bits=master_bits)
    values = {name: p.detach().clone() for name, p in params.items()}
    state = functional.init(values)
    optimizer = Adam8bit(params.values(), **OPTIONS, master_bits=master_bits)
    for step in range(6):
        grads = set_grads(params, step + 1)
        values, state = functional.update(grads, state, values, clip_coef=0.3)
        optimizer.step(clip_coef=0.3)
    parts = state.layout.state_views(state.slab)
    for place in state.layout.places:
        p, mine = params[place.name], optimizer.state[params[place.name]]
        assert torch.equal(p, values[place.name]), place.name
        assert ("m_q" in mine) == place.quantized
        at = place.offset if place.quantized else place.offset - state.layout.quantized_numel
        names = (
            {"m_q": "m_q", "v_q": "v_q", "lo": "lo_q"} if place.quantized else {"m": "m_f", "v": "v_f", "lo": "lo_f"}
        )
        for name, part in names.items():
            if name in mine:
                assert torch.equal(mine[name].flatten(), parts[part][at : at + place.numel]), (place.name, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("through_a_file", [False, True])
def test_state_dict_comes_back_bit_by_bit(dtype: torch.dtype, through_a_file: bool) -> None:
    params = make_params(dtype)
    optimizer = Adam8bit(params.values(), **OPTIONS)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    saved: Any = optimizer.state_dict()
    if through_a_file:
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    others = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    other = Adam8bit(others.values(), lr=7.0, state_bits=32)
    other.load_state_dict(saved)
    assert same(state_tensors(other), state_tensors(optimizer))
    for step in range(3, 6):
        set_grads(params, step), set_grads(others, step)
        optimizer.step(), other.step()
    assert same(state_tensors(other), state_tensors(optimizer))
    for name, p in params.items():
        assert torch.equal(p, others[name])


def test_copies_go_on_alone() -> None:
    params = make_params(torch.bfloat16)
    optimizer = Adam8bit(params.values(), **OPTIONS)
    set_grads(params, 0)
    optimizer.step()
    before = [x.clone() if isinstance(x, Tensor) else x for x in state_tensors(optimizer)]
    twin = copy.deepcopy(optimizer)
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step()
    assert same(state_tensors(optimizer), before)
    assert twin.state[twin.param_groups[0]["params"][0]]["step"] == 2


def test_groups_and_patterns_choose_the_states() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(100, 64), "mix": nn.Linear(64, 128), "out": nn.Linear(128, 64)})
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    named = list(model.named_parameters())
    groups = [
        {"params": [x for x in named if "mix" not in x[0]], "lr": 0.0},
        {"params": [x for x in named if "mix" in x[0]], "state_bits": 32, "lr": 0.1, "weight_decay": 0.5},
    ]
    optimizer = Adam8bit(groups, fp32_patterns=["^embed"])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kinds = {name: "m_q" in optimizer.state[p] for name, p in named}
    assert kinds == {n: n == "out.weight" for n, _ in named}
    for name, p in named:  # zero gradients: only decay moves a weight
        torch.testing.assert_close(p.detach(), plain[name] * (1 - 0.1 * 0.5) if "mix" in name else plain[name])


def test_strided_parameters_and_gradients_give_the_same_bits() -> None:
    gen = torch.Generator().manual_seed(0)
    value, grad = torch.randn(80, 96, generator=gen), torch.randn(80, 96, generator=gen)
    plain, strided = nn.Parameter(value.clone()), nn.Parameter(value.T.contiguous().T)
    assert not strided.is_contiguous()
    for p in (plain, strided):
        optimizer = Adam8bit([p], **OPTIONS)
        for factor in (1.0, -2.0):
            p.grad = (grad * factor).T.contiguous().T if p is strided else grad * factor
            optimizer.step()
    assert torch.equal(plain, strided)
    assert not strided.is_contiguous()


def test_parameters_without_a_gradient_stay() -> None:
    params = make_params(torch.float32)
    optimizer = Adam8bit(params.values(), **OPTIONS)
    set_grads(params, 0)
    frozen, before = params["a"], params["a"].detach().clone()
    frozen.grad = None
    optimizer.step()
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state
    set_grads(params, 1)
    optimizer.step()
    assert [optimizer.state[params[name]]["step"] for name in ("a", "square")] == [1, 2]
    # `a` comes first: its groups keep their place in the dither's count
    assert [optimizer.state[params[name]]["first_group"] for name in ("a", "square")] == [0, 96 * 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_norm_skips_the_step(value: float) -> None:
    params = make_params(torch.bfloat16)
    optimizer = Adam8bit(params.values(), **OPTIONS)
    set_grads(params, 0)
    optimizer.step(clip_coef=optimizer.measure_clip(1.0).coef)
    values = [p.detach().clone() for p in params.values()]
    states = [x.clone() if isinstance(x, Tensor) else x for x in state_tensors(optimizer)]
    set_grads(params, 1)
    params["square"].grad[3, 5] = value  # type: ignore[index]
    optimizer.step(clip_coef=optimizer.measure_clip(1.0).coef)
    assert all(torch.equal(p, v) for p, v in zip(params.values(), values))
    assert same(state_tensors(optimizer), states)
    assert optimizer.num_skipped_steps == 1


def test_clipped_step_equals_clip_grad_norm() -> None:
    theirs, ours = make_params(torch.float32), make_params(torch.float32)
    reference = torch.optim.AdamW(theirs.values(), **OPTIONS)
    optimizer = Adam8bit(ours.values(), **OPTIONS, state_bits=32)
    for step in range(5):
        set_grads(theirs, step), set_grads(ours, step)
        norm = nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        reference.step()
        clip = optimizer.measure_clip(0.5)
        optimizer.step(clip_coef=clip.coef)
        torch.testing.assert_close(clip.norm.float(), norm)
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-5, atol=1e-6)


def test_autocast_training_and_schedulers_work() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = Adam8bit(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    x = torch.randn(64, 16)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(60):

        def closure() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() - y).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[-1] < losses[0] / 5
    assert optimizer.param_groups[0]["lr"] < 1e-6


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    w = nn.Parameter(torch.ones(64, 64))
    w.grad = torch.ones(64, 64)
    loss = (w * w).sum()
    Adam8bit([w]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_master_is_what_the_optimizer_updates() -> None:
    p = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = Adam8bit([p], lr=1e-5, weight_decay=0.0)
    assert torch.equal(optimizer.read_master(p), torch.ones(64, 128))
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(optimizer.read_master(p), join_master(p.detach(), optimizer.state[p]["lo"]))
    assert (optimizer.read_master(p) - 0.999).abs().max() < 1e-5


@pytest.mark.parametrize("master_bits", [32, 24])
def test_masters_can_be_set_before_the_first_step(master_bits: int) -> None:
    """bf16 parameters that start from fp32 values take the path of fp32 parameters."""
    values = {name: p.detach() for name, p in make_params(torch.float32).items()}
    params, plain = make_params(torch.bfloat16), make_params(torch.float32)
    ours = Adam8bit(params.values(), **OPTIONS, master_bits=master_bits)
    theirs = Adam8bit(plain.values(), **OPTIONS)
    for name, p in params.items():
        ours.set_master(p, values[name])
        bound = 0.0 if master_bits == 32 else 2**-16
        assert ((ours.read_master(p) - values[name]).abs() <= bound * values[name].abs()).all()
    for step in range(4):
        grads = set_grads(params, step)
        for name, p in plain.items():
            p.grad = grads[name].float()
        ours.step(), theirs.step()
    for name, p in params.items():
        if master_bits == 32:
            assert torch.equal(ours.read_master(p), plain[name].detach())
        else:
            torch.testing.assert_close(ours.read_master(p), plain[name].detach(), rtol=2**-13, atol=1e-4)


def test_mistakes_are_named() -> None:
    w = nn.Parameter(torch.zeros(64, 64))
    for options, words in [
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"lr": -1.0}, "lr"),
        ({"state_bits": 4}, "state_bits"),
        ({"master_bits": 16}, "master_bits"),
        ({"fp32_patterns": ["embed"]}, r"named_parameters\(\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            Adam8bit([w], **options)
    for dtype in (torch.float16, torch.complex64):
        with pytest.raises(ValueError, match=f"{dtype}"):
            Adam8bit([torch.zeros(4, dtype=dtype)])
    embedding = nn.Embedding(100, 64, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense"):
        Adam8bit(embedding.parameters()).step()
    w.grad = torch.ones(64, 64)
    with pytest.raises(ValueError, match="coef is nan"):
        Adam8bit([w]).step(clip_coef=float("nan"))


def test_states_of_others_are_refused() -> None:
    w, other = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 65))
    bf16 = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    for p in (w, other, bf16):
        p.grad = torch.ones_like(p)
    mine, torchs = Adam8bit([w]), torch.optim.AdamW([w])
    mine.step(), torchs.step()
    with pytest.raises(ValueError, match="load_torch_adamw"):
        Adam8bit([w]).load_state_dict(torchs.state_dict())
    with pytest.raises(ValueError, match="another parameter"):
        Adam8bit([other]).load_state_dict(mine.state_dict())
    with pytest.raises(ValueError, match="lo is nothing"):
        Adam8bit([bf16]).load_state_dict(mine.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    params = {place: make_params(dtype) for place in ("cpu", "cuda")}
    for p in params["cuda"].values():
        p.data = p.data.cuda()
    optimizers = {place: Adam8bit(p.values(), **OPTIONS) for place, p in params.items()}
    for step in range(6):
        for place, optimizer in optimizers.items():
            set_grads(params["cpu"], step)
            for name, p in params[place].items():
                p.grad = params["cpu"][name].grad.to(place)  # type: ignore[union-attr]
            if step == 3:
                params[place]["square"].grad[0, 0] = float("inf")  # type: ignore[index]
            optimizer.step(clip_coef=optimizer.measure_clip(0.7).coef)
    assert [o.num_skipped_steps for o in optimizers.values()] == [1, 1]
    assert optimizers["cuda"].state[params["cuda"]["square"]]["step"] == 5
    ours, truth = (state_tensors(optimizers[place]) for place in ("cuda", "cpu"))
    assert same([x.cpu() if isinstance(x, Tensor) else x for x in ours], truth)
    for name, p in params["cpu"].items():
        assert torch.equal(p, params["cuda"][name].cpu()), name
