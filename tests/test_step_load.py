"""The load of a step: what is measured beside what, that there is enough to measure, and that it ends."""

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazytrain import step_load
from lazytrain.slabs import allocate_slab
from lazytrain.step_load import FULL, LIGHT, MIN_UPDATES, NUM_ROUNDS, Rates, StepLoad, _Lane

SIZE = 1 << 20
COPY_MS = 2.0


class Event:
    """A CUDA event of a stream on which whatever is queued takes 2 ms."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert blocking, "a thread that looks again and again takes a core from the updates"

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return COPY_MS


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(step_load, "BURST_BYTES", SIZE)


def make_load(launch: Callable[[], object] = lambda: None, update: Callable[[], object] = lambda: None) -> StepLoad:
    host, back = (torch.arange(4 * SIZE, dtype=torch.uint8).split(SIZE) for _ in range(2))
    return StepLoad(device=torch.device("cpu"), host=host, back=back, launch=launch, update=update)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("shares", [LIGHT, FULL])
def test_a_round_has_enough_to_measure_however_short_it_is(shares: tuple[float, float]) -> None:
    counts, before = itertools.count(), threading.active_count()
    rates = make_load(update=lambda: next(counts)).measure(0.0, shares, updates=True)
    assert threading.active_count() == before
    assert next(counts) >= MIN_UPDATES
    assert rates.h2d_gbs == rates.d2h_gbs == pytest.approx(SIZE / COPY_MS / 1e6), "by the device's clock"
    assert rates.update_ms > 0
    assert rates.update_gb > 0


@pytest.mark.usefixtures("no_gpu")
def test_updates_count_that_end_while_all_else_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one ends beside fewer copies, or none; here it ends when told to stop, later than all others."""
    stops, ended = list[threading.Event](), list[float]()
    real = threading.Event

    def make_event() -> threading.Event:
        stops.append(real())
        return stops[-1]

    def update() -> None:
        if len(ended) >= MIN_UPDATES:
            stops[0].wait(60.0)
        ended.append(1.0)

    def perf_counter() -> float:
        return float(len(ended) > MIN_UPDATES) * 1e3  # the last one took 1,000 s

    monkeypatch.setattr(step_load, "threading", SimpleNamespace(Event=make_event))
    monkeypatch.setattr(step_load, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(_Lane, "mean_gbs", 1.0)
    rates = make_load(update=update).measure(0.0, FULL, updates=True)
    assert len(ended) == MIN_UPDATES + 1
    assert rates.update_ms == 0.0


@pytest.mark.usefixtures("no_gpu")
def test_copies_go_on_without_updates() -> None:
    rates = make_load().measure(0.0, FULL, updates=False)
    assert (rates.update_ms, rates.update_gb) == (0.0, 0.0)
    assert rates.h2d_gbs > 0


class Stopped:
    """An event that is set after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waits_s = looks, list[float]()

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)


def copy(num_bursts: int, share: float, size: int = SIZE) -> tuple[_Lane, Stopped, list[tuple[int, int]]]:
    copied = list[tuple[int, int]]()

    def piece(name: int) -> Any:
        part = torch.zeros(size, dtype=torch.uint8)
        return SimpleNamespace(
            numel=part.numel, element_size=part.element_size, copy_=lambda source, **_: copied.append((name, source))
        )

    lane, stopped = _Lane([(piece(i), i) for i in range(3)]), Stopped(num_bursts)  # type: ignore[misc]
    lane.copy_on(torch.device("cpu"), stopped, share)  # type: ignore[arg-type]
    return lane, stopped, copied


@pytest.mark.usefixtures("no_gpu")
def test_a_lane_takes_pieces_in_turn_and_counts_what_was_queued_at_the_end() -> None:
    lane, stopped, copied = copy(7, 1.0)
    assert copied == [(i % 3, i % 3) for i in range(7)]
    assert lane.num_bursts == 7
    assert stopped.waits_s == []
    assert lane.gbs == pytest.approx(SIZE / COPY_MS / 1e6)


@pytest.mark.usefixtures("no_gpu")
def test_a_lane_rests_in_proportion() -> None:
    _, stopped, copied = copy(5, 0.25)
    assert stopped.waits_s == pytest.approx([3 * COPY_MS / 1e3] * 5), "three quarters of the time"
    assert len(copied) == 5


@pytest.mark.usefixtures("no_gpu")
def test_small_copies_are_timed_together() -> None:
    lane, _, copied = copy(2, 0.5, size=SIZE // 8)
    assert len(copied) == 16
    assert lane.gbs == pytest.approx(SIZE / COPY_MS / 1e6)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("which", ["update", "launch", "copy"])
def test_it_ends_where_something_fails(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    if which == "copy":
        monkeypatch.setattr(_Lane, "_copy", fail)
    load = make_load(**{which: fail} if which != "copy" else {})
    with pytest.raises(KeyboardInterrupt):
        load.measure(60.0, FULL, updates=True)
    assert threading.active_count() == before


@pytest.mark.usefixtures("no_gpu")
def test_it_ends_where_a_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls, before = step_load.ThreadPoolExecutor.submit, itertools.count(), threading.active_count()

    def submit(pool: Any, *args: Any) -> Any:
        if next(calls):
            raise RuntimeError("can't start new thread")
        return real(pool, *args)

    monkeypatch.setattr(step_load.ThreadPoolExecutor, "submit", submit)
    with pytest.raises(RuntimeError, match="new thread"):
        make_load().measure(0.0, FULL, updates=True)
    assert threading.active_count() == before


def measure_loaded(
    monkeypatch: pytest.MonkeyPatch, light: Rates, heavy: Rates, quiet: Rates, *, round_s: float = 0.0
) -> tuple[tuple[float, ...], int]:
    asked, clock = list[tuple[tuple[float, float], bool]](), itertools.count(0.0, round_s)

    def measure(self: StepLoad, seconds: float, shares: tuple[float, float], *, updates: bool) -> Rates:
        asked.append((shares, updates))
        if len(asked) <= 3:
            return Rates(1.0, 1.0, 1.0, 1.0)  # the first round, which touches all memory
        return quiet if not updates else light if shares == LIGHT else heavy

    monkeypatch.setattr(StepLoad, "measure", measure)
    monkeypatch.setattr(step_load, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    rates = make_load().measure_loaded()
    assert len(set(asked)) == 3
    return rates, len(asked) // 3


LIGHT_RATES, HEAVY_RATES = Rates(45.0, 50.0, 22.0, 0.5), Rates(40.0, 51.0, 26.0, 1.5)
QUIET_RATES = Rates(50.0, 48.0, 0.0, 0.0)


def test_what_copies_cost_updates_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    (h2d, d2h, link, update_ms, dram_gbs), rounds = measure_loaded(monkeypatch, LIGHT_RATES, HEAVY_RATES, QUIET_RATES)
    assert rounds == 1 + NUM_ROUNDS
    assert (h2d, d2h, link) == (40.0, 51.0, 48.0), "beside updates, and the slower direction without"
    assert dram_gbs == pytest.approx(250.0), "1 GB cost 4 ms"
    assert update_ms == pytest.approx(20.0), "22 ms beside half a GB"


def test_a_slow_machine_has_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for round_s, expected in ((10.0, 3), (100.0, 2)):
        rates, rounds = measure_loaded(monkeypatch, LIGHT_RATES, HEAVY_RATES, QUIET_RATES, round_s=round_s)
        assert rounds == expected
        assert rates[3] == pytest.approx(20.0)


def test_updates_that_lose_nothing_cost_dram_little(monkeypatch: pytest.MonkeyPatch) -> None:
    light, heavy = Rates(45.0, 50.0, 20.0, 0.5), Rates(50.0, 51.0, 19.0, 1.5)
    (_, _, link, update_ms, dram_gbs), _ = measure_loaded(monkeypatch, light, heavy, Rates(45.0, 48.0, 0.0, 0.0))
    assert link == 50.0, "no slower than beside updates"
    assert dram_gbs == pytest.approx(1.0 / 0.4 * 1e3), "2% are noise"
    assert update_ms == pytest.approx(19.8)


def test_a_link_too_slow_to_tell_light_traffic_from_heavy_costs_dram_little(monkeypatch: pytest.MonkeyPatch) -> None:
    light, heavy = Rates(1.0, 1.0, 20.0, 0.5), Rates(1.0, 1.0, 24.0, 0.5)
    (*_, update_ms, dram_gbs), _ = measure_loaded(monkeypatch, light, heavy, Rates(1.0, 1.0, 0.0, 0.0))
    assert dram_gbs == pytest.approx(0.5 / 0.4 * 1e3)
    assert update_ms == pytest.approx(19.6)


@pytest.mark.gpu
def test_a_gpus_host_under_load() -> None:
    device = torch.device("cuda")
    host, back = (allocate_slab(64 << 20, pin=True, name=name).split(16 << 20) for name in ("there", "back"))
    a = torch.randn(2048, 2048, device=device)
    load = StepLoad(device=device, host=host, back=back, launch=lambda: a @ a, update=lambda: sum(range(100_000)))
    heavy, light = (load.measure(0.3, shares, updates=True) for shares in (FULL, LIGHT))
    assert min(*heavy, *light) > 0
    assert heavy.update_gb / heavy.update_ms > light.update_gb / light.update_ms
