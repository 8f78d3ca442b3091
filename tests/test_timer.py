"""How the profile times work: one call of many, at the clocks of a run, and works that are compared in turns."""

import time

import pytest
import torch

from lazytrain.timer import Timer


def test_median_time_is_that_of_one_call() -> None:
    timer = Timer(device=torch.device("cpu"), floor_s=0.05)
    x = torch.randn(256, 256)
    once, twice = timer.median_ms(lambda: x @ x), timer.median_ms(lambda: (x @ x, x @ x))
    assert 0 < once < twice


def test_gpu_is_timed_when_its_clocks_have_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has computed for long is slower than one that has just begun: its time is that of a long run."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    start_s = time.perf_counter()

    def work() -> None:
        time.sleep(0.0005 if time.perf_counter() - start_s < 0.02 else 0.002)

    assert Timer(device=torch.device("cuda"), floor_s=0.02).median_ms(work) > 1.9


def test_cpu_is_timed_without_a_warm_up() -> None:
    calls = list[float]()
    timer = Timer(device=torch.device("cpu"), floor_s=1e-6)
    timer.warm_up(lambda: calls.append(1.0))
    assert calls == []
    timer.median_ms(lambda: calls.append(1.0))
    assert len(calls) == 5  # once to load, once to count the calls of a round, three rounds of one


def test_works_that_are_compared_take_turns() -> None:
    """A GPU's clocks wander for seconds: what is timed a second later would look slower than it is."""
    calls = list[str]()
    works = [lambda name=name: calls.append(name) for name in "ab"]
    times = Timer(device=torch.device("cpu"), floor_s=1e-6).medians_ms(works)
    assert "".join(calls) == "aabb" + "ab" * 3
    assert len(times) == 2
