"""AdamW's fused step over many steps: close to torch, and what 8-bit states must not break."""

import pytest
import torch
from kernel_states import make_grads, make_hyper, make_state8, make_state32
from torch import Tensor

from lazytrain.kernels import codec
from lazytrain.kernels.adamw import AdamWHyper, adamw8bit_update_into, adamw_update_into
from lazytrain.kernels.master import join_master, split_master

FIRST_STEP_ERROR = 2e-6  # of the learning rate; worst seen 1.9e-7
PARITY_ERROR = 1e-5  # fp32 states against torch, relative; worst seen 3.3e-6
NOISE_PATH_ERROR = 3e-3  # 8-bit states after 2000 steps, of the path's length; worst seen 2.8e-3
DRIFT_PATH_ERROR = 2.5e-2  # with a drift as large as the noise, where v's dither shows; worst seen 1.8e-2
BIAS = 3e-3  # of the path, along the movement: a step that is systematically too long or too short


def run_torch(w: Tensor, grads: list[Tensor], hyper: AdamWHyper, max_norm: float | None = None) -> Tensor:
    parameter = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps, weight_decay=hyper.weight_decay
    )
    for g in grads:
        parameter.grad = g.clone()
        optimizer.step()
    return parameter.detach()


def test_fp32_moments_match_torch() -> None:
    w, grads = make_grads(1000, 0, torch.float32), [make_grads(1000, i, torch.float32) for i in range(1, 51)]
    state = make_state32(w, "fp32")
    for step, g in enumerate(grads, 1):
        adamw_update_into(*state, g * 4, coef=0.25, hyper=make_hyper(step))
    truth = run_torch(w, grads, make_hyper(1))
    assert ((state[0] - truth).abs() / truth.abs().clamp_min(1e-2)).max() <= PARITY_ERROR


@pytest.mark.parametrize("exponent", [-9, -5, -3, 0, 4])
def test_first_8bit_step_matches_torch(exponent: int) -> None:
    g = make_grads(1000, 1, torch.float32) * 10.0**exponent
    hyper = make_hyper(1)
    state = make_state8(torch.zeros(1000), "fp32", 125)
    adamw8bit_update_into(*state, g, rows=8, cols=125, first_group=0, coef=1.0, hyper=hyper)
    truth = run_torch(torch.zeros(1000), [g], hyper)
    assert ((state[0] - truth).abs() / hyper.lr).max() <= FIRST_STEP_ERROR


@pytest.mark.parametrize(("drift", "bound"), [(0.0, NOISE_PATH_ERROR), (1.0, DRIFT_PATH_ERROR)])
def test_long_8bit_run_follows_the_fp32_path(drift: float, bound: float) -> None:
    """2000 steps of noise, without and with a drift: the distance from the fp32 weights is a small part of the path."""
    size, hyper = 4096, make_hyper(1, lr=1e-3, weight_decay=0.0)
    gen = torch.Generator().manual_seed(0)
    mean = torch.randn(size, generator=gen) * drift
    codes, truth = make_state8(torch.zeros(size), "fp32", 512), make_state32(torch.zeros(size), "fp32")
    path = torch.zeros(size)
    for step in range(1, 2001):
        g = (mean + torch.randn(size, generator=gen)) * 1e-3
        before = truth[0].clone()  # type: ignore[union-attr]
        now = hyper._replace(step=step)
        adamw8bit_update_into(*codes, g, rows=8, cols=512, first_group=0, coef=1.0, hyper=now)
        adamw_update_into(*truth, g, coef=1.0, hyper=now)
        path += (truth[0] - before).abs()
    distance = codes[0] - truth[0]  # type: ignore[operator]
    assert distance.norm() / path.norm() <= bound
    assert abs((distance * truth[0].sign()).mean() / path.mean()) <= BIAS  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["fp32", "32", "24"])
def test_untouched_rows_do_not_move(kind: str) -> None:
    """C26: gradients of unused vocabulary rows are zero, beside used ones and within a group."""
    w = make_grads(6 * 200, 1, torch.float32)
    if kind == "24":
        w = join_master(*split_master(w, 24))
    mask = torch.ones(6, 200)
    mask[1], mask[:, ::3] = 0.0, 0.0
    mask = mask.flatten()
    state = make_state8(w, kind, 200)
    start = [state[0].clone(), None if state[1] is None else state[1].clone()]  # type: ignore[union-attr]
    for step in range(1, 501):
        g = (make_grads(1200, step, torch.float32) * mask).bfloat16()
        hyper = make_hyper(step, weight_decay=0.0)
        adamw8bit_update_into(*state, g, rows=6, cols=200, first_group=0, coef=1.0, hyper=hyper)
    still = mask == 0
    for now, before in zip(state[:2], start):
        assert now is None or torch.equal(now[still], before[still])  # type: ignore[index]
    assert (state[0] != start[0])[~still].float().mean() > 0.9  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "tolerance"), [("fp32", 1e-4), ("32", 1e-4), ("24", 1e-4)])
@pytest.mark.parametrize("codes", [True, False])
def test_tiny_updates_add_up(kind: str, tolerance: float, codes: bool) -> None:
    """C27: a weight of 1.0 and 1000 updates of 1e-5 arrive at 0.99."""
    w, g = torch.ones(256), torch.full((256,), 1e-3).bfloat16()
    state = make_state8(w, kind, 256) if codes else make_state32(w, kind)
    for step in range(1, 1001):
        hyper = make_hyper(step, lr=1e-5, weight_decay=0.0)
        if codes:
            adamw8bit_update_into(*state, g, rows=1, cols=256, first_group=0, coef=1.0, hyper=hyper)
        else:
            adamw_update_into(*state, g, coef=1.0, hyper=hyper)
    end = state[0] if state[1] is None else join_master(state[0], state[1])  # type: ignore[arg-type]
    assert (end - 0.99).abs().max() <= tolerance


def test_bf16_weights_alone_would_lose_tiny_updates() -> None:
    w = torch.ones(1).bfloat16()
    for _ in range(1000):
        w -= 1e-5
    assert w.item() == 1.0


@pytest.mark.parametrize("power", [-20, -7, 12])
def test_scaling_grads_and_eps_keeps_the_codes(power: int) -> None:
    plain, scaled = (make_state8(torch.zeros(600), "fp32", 200) for _ in range(2))
    for step in range(1, 30):
        g = make_grads(600, step, torch.float32) * 1e-3
        hyper = make_hyper(step)
        adamw8bit_update_into(*plain, g, rows=3, cols=200, first_group=0, coef=1.0, hyper=hyper)
        hyper = hyper._replace(eps=hyper.eps * 2.0**power)
        # fl(eps) times a power of two is exact: both runs divide alike
        adamw8bit_update_into(*scaled, g * 2.0**power, rows=3, cols=200, first_group=0, coef=1.0, hyper=hyper)
    for i in (0, 2, 4):
        assert torch.equal(plain[i], scaled[i])
    assert torch.equal(plain[3] * 2.0**power, scaled[3])  # type: ignore[operator]


@pytest.mark.parametrize("rms", [1e-3, 1e-5, 1e-7, 1e-9])
def test_v_follows_a_drop_of_the_gradients(rms: float) -> None:
    """Gradients shrink tenfold: 3000 steps later the median root of v is within 2% of fp32's."""
    size = 1024
    gen = torch.Generator().manual_seed(0)
    codes, truth = make_state8(torch.zeros(size), "fp32", 512), make_state32(torch.zeros(size), "fp32")
    for step in range(1, 4001):
        g = torch.randn(size, generator=gen) * (rms if step <= 1000 else rms / 10)
        hyper = make_hyper(step)
        adamw8bit_update_into(*codes, g, rows=2, cols=512, first_group=0, coef=1.0, hyper=hyper)
        adamw_update_into(*truth, g, coef=1.0, hyper=hyper)
    m_q, m_scale, v_q, v_scale = codes[2:]
    _, v = codec.dequantize_moments(m_q.view(2, 512), m_scale, v_q.view(2, 512), v_scale)  # type: ignore[union-attr]
    ratio = v.sqrt().median() / truth[3].sqrt().median()  # type: ignore[union-attr]
    assert abs(ratio - 1.0) <= 0.02


def test_updates_stay_small_under_heavy_tails() -> None:
    """max |u| <= 5, with rare bursts, silent elements and gradients over ten decades in one group."""
    size, largest = 2048, 0.0
    gen = torch.Generator().manual_seed(0)
    spread = 10 ** (torch.rand(size, generator=gen) * 10 - 9)
    state = make_state8(torch.zeros(size), "fp32", 256)
    for step in range(1, 1001):
        burst = (torch.rand(size, generator=gen) < 0.01).float() * 100 + 0.1
        g = torch.randn(size, generator=gen) * spread * burst
        state[0].zero_()  # type: ignore[union-attr]
        hyper = make_hyper(step, lr=1.0, weight_decay=0.0)
        adamw8bit_update_into(*state, g, rows=8, cols=256, first_group=0, coef=1.0, hyper=hyper)
        largest = max(largest, (state[0] * (1 - 0.9**step)).abs().max().item())  # type: ignore[operator]
    assert largest <= 5.0


def run_quadratic(rounding: str) -> float:
    """Mean loss at the end of a noisy quadratic at beta2 = 0.999: gradients shrink a hundredfold as it converges."""
    size, steps, last = 1024, 2500, 1000
    gen = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-2, 0, size)[torch.randperm(size, generator=gen)]
    w = torch.randn(size, generator=gen) * 1e-2
    codes = codec.reference_quantize_moments(torch.zeros(8, 128), torch.zeros(8, 128), step=0)
    state8, state32 = [w, None, *(x.view(-1) for x in codes)], [w, None, torch.zeros(size), torch.zeros(size)]
    total = 0.0
    for step in range(1, steps + 1):
        g = curvature * w + 1e-4 * torch.randn(size, generator=gen)
        hyper = make_hyper(step, lr=1e-4, weight_decay=0.0)
        if rounding == "none":
            adamw_update_into(*state32, g, coef=1.0, hyper=hyper)
        elif rounding == "dither":
            adamw8bit_update_into(*state8, g, rows=8, cols=128, first_group=0, coef=1.0, hyper=hyper)
        else:
            m_q, m_scale, v_q, v_scale = codes
            m, v = codec.reference_dequantize_moments(m_q, m_scale, v_q, v_scale)
            adamw_update_into(w, None, m, v, g, coef=1.0, hyper=hyper)
            half = torch.full((8, 1), 0x80000000)  # rho = 0.5
            codes = codec.reference_encode(m, codec.root(v), half)
        if step > steps - last:
            total += (curvature * w * w).sum().item() / (2 * last)
    return total


@pytest.mark.slow
def test_dither_keeps_the_loss_that_nearest_rounding_loses() -> None:
    truth = run_quadratic("none")
    assert run_quadratic("dither") <= 1.02 * truth
    assert run_quadratic("nearest") > 2 * truth
