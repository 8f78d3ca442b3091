"""The load of a step: what is measured beside what, and that it ends."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lazytrain.slabs import allocate_slab
from lazytrain.step_load import FULL, LIGHT, NUM_ROUNDS, Rates, StepLoad

SIZE = 1 << 20


class Event:
    """A CUDA event of a stream on which a copy takes 2 ms."""

    clock_ms = 0.0

    def __init__(self, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking, "a thread that looks again and again takes a core from the updates"

    def record(self) -> None:
        Event.clock_ms += 2.0
        self.ms = Event.clock_ms

    def synchronize(self) -> None:
        time.sleep(0.002)

    def elapsed_time(self, end: "Event") -> float:
        return 2.0


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def make_load(update_s: float = 0.01) -> StepLoad:
    host, back = (torch.arange(4 * SIZE, dtype=torch.uint8).split(SIZE) for _ in range(2))
    return StepLoad(
        device=torch.device("cpu"),
        host=host,
        back=back,
        launch=lambda: time.sleep(0.001),
        update=lambda: time.sleep(update_s),
    )


@pytest.mark.usefixtures("no_gpu")
def test_everything_runs_at_once() -> None:
    load, before = make_load(), threading.active_count()
    rates = load.measure(0.2, FULL, updates=True)
    assert threading.active_count() == before
    assert rates.h2d_gbs == rates.d2h_gbs == pytest.approx(SIZE / 2e6), "by the device's clock"
    assert rates.update_ms >= 10.0
    assert 0 < rates.update_gb < 2 * SIZE / 1e9 * rates.update_ms / 2 + 1e-3


@pytest.mark.usefixtures("no_gpu")
def test_copies_rest_and_updates_are_left_out() -> None:
    load = make_load()
    light, heavy = (load.measure(0.3, shares, updates=True) for shares in (LIGHT, FULL))
    assert light.update_gb / light.update_ms < 0.6 * heavy.update_gb / heavy.update_ms
    quiet = load.measure(0.05, FULL, updates=False)
    assert (quiet.update_ms, quiet.update_gb) == (0.0, 0.0)
    assert quiet.h2d_gbs > 0


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("which", ["update", "launch"])
def test_it_ends_where_something_fails(which: str) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    load, before = make_load(), threading.active_count()
    object.__setattr__(load, which, fail)
    with pytest.raises(KeyboardInterrupt):
        load.measure(0.05, FULL, updates=True)
    assert threading.active_count() == before


def measure_loaded(monkeypatch: pytest.MonkeyPatch, light: Rates, heavy: Rates, quiet: Rates) -> tuple[float, ...]:
    asked = list[tuple[tuple[float, float], bool]]()

    def measure(self: StepLoad, seconds: float, shares: tuple[float, float], *, updates: bool) -> Rates:
        asked.append((shares, updates))
        if len(asked) <= 3:
            return Rates(1.0, 1.0, 1.0, 1.0)  # the first round, which touches all memory
        return quiet if not updates else light if shares == LIGHT else heavy

    monkeypatch.setattr(StepLoad, "measure", measure)
    rates = make_load().measure_loaded()
    assert len(asked) == 3 * (1 + NUM_ROUNDS)
    assert len(set(asked)) == 3
    return rates


def test_what_copies_cost_updates_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    light, heavy, quiet = Rates(45.0, 50.0, 22.0, 0.5), Rates(40.0, 51.0, 26.0, 1.5), Rates(50.0, 48.0, 0.0, 0.0)
    h2d, d2h, link, update_ms, dram_gbs = measure_loaded(monkeypatch, light, heavy, quiet)
    assert (h2d, d2h, link) == (40.0, 51.0, 48.0), "beside updates, and the slower direction without"
    assert dram_gbs == pytest.approx(250.0), "1 GB cost 4 ms"
    assert update_ms == pytest.approx(20.0), "22 ms beside half a GB"


def test_updates_that_lose_nothing_cost_dram_little(monkeypatch: pytest.MonkeyPatch) -> None:
    light, heavy, quiet = Rates(45.0, 50.0, 20.0, 0.5), Rates(50.0, 51.0, 19.0, 1.5), Rates(45.0, 48.0, 0.0, 0.0)
    _, _, link, update_ms, dram_gbs = measure_loaded(monkeypatch, light, heavy, quiet)
    assert link == 50.0, "no slower than beside updates"
    assert dram_gbs == pytest.approx(1.0 / 0.4 * 1e3), "2% are noise"
    assert update_ms == pytest.approx(19.8)


@pytest.mark.gpu
def test_a_gpus_host_under_load() -> None:
    device = torch.device("cuda")
    host, back = (allocate_slab(64 << 20, pin=True, name=name).split(16 << 20) for name in ("there", "back"))
    a = torch.randn(2048, 2048, device=device)
    load = StepLoad(device=device, host=host, back=back, launch=lambda: a @ a, update=lambda: time.sleep(0.01))
    heavy, light = (load.measure(0.3, shares, updates=True) for shares in (FULL, LIGHT))
    assert min(heavy) > 0
    assert heavy.update_gb > 1.5 * light.update_gb
