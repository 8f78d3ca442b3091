"""The bound that a disk's rates give, and what the bench says of it."""

import itertools
import json
import random
from pathlib import Path

import pytest
from test_solver_edges import make_problem

from lazytrain.lanes import Span
from lazytrain.recipes import bench
from lazytrain.recipes.bench_disk import Disk, bound_step, with_disk
from lazytrain.recipes.bench_plans import choose_plan
from lazytrain.solver.plan import Plan
from lazytrain.solver.simulator import simulate
from lazytrain.store_bench import StreamRates, measure_streams
from lazytrain.store_io import DiskIO, Manner

GB = 1e9
MANNER = Manner(False, 2)


def test_a_disk_with_two_ways_needs_the_longer_of_them() -> None:
    rates = StreamRates(2 * GB, 1 * GB, 2 * GB, 1 * GB)
    assert rates.bound_s(8 * GB, 3 * GB) == rates.alone_s(8 * GB, 3 * GB) == 4.0
    assert rates.bound_s(0, 3 * GB) == 3.0


def test_a_disk_with_one_way_needs_the_sum() -> None:
    for both in ((1.0, 0.5), (1.0, 0.4), (0.1, 0.1)):  # as good as in turns, and worse
        rates = StreamRates(2 * GB, 1 * GB, both[0] * GB, both[1] * GB)
        assert rates.bound_s(8 * GB, 3 * GB) == pytest.approx(7.0)
        assert rates.alone_s(8 * GB, 3 * GB) == 4.0


@pytest.mark.parametrize("seed", range(50))
def test_no_mix_of_reads_and_writes_is_faster_than_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    read, write = rng.uniform(1, 4), rng.uniform(1, 4)
    rates = StreamRates(read, write, read * rng.uniform(0.2, 1), write * rng.uniform(0.2, 1))
    wanted = rng.uniform(0, 10), rng.uniform(0, 10)
    longest = rates.bound_s(*wanted)
    for _ in range(200):
        both = rng.uniform(0, 12)
        alone = [max(0.0, wanted[i] - both * rates[2 + i]) / rates[i] for i in range(2)]
        assert both + sum(alone) >= longest * (1 - 1e-12)


@pytest.mark.parametrize("direct", [False, True])
def test_streams_are_measured_and_leave_nothing(direct: bool, tmp_path: Path) -> None:
    manner, rates = measure_streams(tmp_path, 3 << 20, Manner(direct, 2), seconds=0.02)
    assert manner == Manner(direct, 2)
    assert min(rates) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DiskIO, *args: object, **kwargs: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DiskIO, "read_into", fail)
    with pytest.raises(OSError, match="Input/output"):
        measure_streams(tmp_path, 1 << 20, MANNER, seconds=1e9)
    assert list(tmp_path.iterdir()) == []


def test_the_speed_is_told_against_the_largest_bound() -> None:
    disk = Disk(MANNER, StreamRates(2 * GB, 1 * GB, 1 * GB, 0.5 * GB))
    problem = with_disk(make_problem(3, num_blocks=5), disk, 1 << 40)
    assert (problem.hardware.nvme_read_gbs, problem.hardware.nvme_write_gbs) == (1.0, 0.5)
    chosen = choose_plan("states-on-nvme", problem)
    assert chosen is not None
    simulation = simulate(chosen.problem, chosen.plan)
    spans = [
        Span("states", "u", "nvme_read", -50, 10),
        Span("states", "u", "nvme_read", 5, 30),
        Span("states", "u", "nvme_write", 990, 1200),
    ]
    moved = {"nvme_read": 0.8 * GB, "nvme_write": 0.3 * GB, "h2d": 5.0}
    use = bound_step(disk, simulation, step_ms=1000.0, moved=moved, spans=spans)
    assert (use.read_ms, use.write_ms, use.alone_ms) == (30.0, 10.0, pytest.approx(400.0))
    assert use.bounds_ms["NVMe"] == pytest.approx(700.0)
    assert use.predicted_read_bytes == simulation.moved_bytes["nvme_read"] > 0
    assert use.share == pytest.approx(0.7)
    assert "busy for 30 ms (26.67 GB/s) and 10 ms (30.00 GB/s)" in use.describe()[0]
    assert "speed 0.70 of the bound by NVMe" in use.describe()[1]
    compute = bound_step(disk, simulation, step_ms=1000.0, moved={}, spans=[])
    assert compute.bounds_ms["NVMe"] == 0
    assert compute.share == max(compute.bounds_ms.values()) / 1000.0 > 0


def test_the_bench_runs_on_nvme_and_says_what_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
    config |= {"vocab_size": 128, "model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": False}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))

    def measure(path: Path) -> Disk:
        return Disk(*measure_streams(path, 1 << 20, MANNER, seconds=0.01))

    monkeypatch.setattr(bench, "measure_disk", measure)
    counts = itertools.cycle((3, 6, 9))  # of each plan: before its steps, after warm-up, after all
    monkeypatch.setattr(bench, "_count_refills", lambda device: next(counts))
    common = ["--model", str(tmp_path / "m"), "--batch", "2", "--seq", "8", "--device", "cpu", "--floor", "0.001"]
    common += ["--spill-dir", str(tmp_path / "s"), "--warmup", "2", "--steps", "3", "--host-memory", "2GiB"]
    out = ["--out", str(tmp_path / "o")]
    assert bench.main([*common, *out, "--profile-only"]) == 0
    more = ["--problem", str(tmp_path / "o" / "problem.json"), "--plans", "states-on-nvme,all-on-nvme"]
    assert bench.main([*common, *out, *more]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("  NVMe: ")]
    assert len(lines) == 2
    digests = {line.split()[-1] for line in text.splitlines() if "losses" in line}
    assert len(digests) == 1
    assert text.count("of the bound by") == 2
    plans = [Plan.load(tmp_path / "o" / f"plan-{name}.json").predicted for name in ("states-on-nvme", "all-on-nvme")]
    for result, predicted in zip(json.loads((tmp_path / "o" / "bench.json").read_text()), plans, strict=True):
        assert predicted is not None
        assert result["predicted_host_bytes"] == predicted.host_bytes + predicted.device_peak_bytes
        assert (result["num_refills"], result["num_steady_refills"]) == (6, 3)
        disk = result["disk"]  # the planner counts padding, which isn't stored
        assert disk["read_bytes"] == pytest.approx(disk["predicted_read_bytes"], rel=0.01)
        assert disk["write_bytes"] > 0
    assert list((tmp_path / "s").iterdir()) == []
