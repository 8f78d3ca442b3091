"""The kernels' benchmark runs from end to end (its numbers mean nothing here) and does not time a wrong kernel."""

import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.kernels import bench_kernels
from lazytrain.kernels.adamw_triton import adamw8bit_update_triton_into


def run_tiny(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["bench_kernels", "--tiny", *arguments])
    bench_kernels.main()


def test_benchmark_runs_and_reports_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_tiny(monkeypatch, "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())
    measured = {row["what"] for row in rows if row["share"] is not None}
    assert measured >= {f"update, {kind}" for kind in bench_kernels.KINDS}
    dtypes = ("bfloat16", "float32")
    assert measured >= {f"square sum{of}, torch.{dtype}" for of in ("", " of blocks") for dtype in dtypes}
    assert all(row["gb_s"] > 0 for row in rows)


def test_one_part_is_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_tiny(monkeypatch, "--only", "squares", "--json", str(tmp_path / "rows.json"))
    measured = [row["what"] for row in json.loads((tmp_path / "rows.json").read_text()) if row["share"] is not None]
    assert measured
    assert all(what.startswith("square sum") for what in measured)


def test_bytes_are_those_of_the_format() -> None:
    kinds = bench_kernels.KINDS.items()
    moved = {kind: bench_kernels.make_state(1280, bits, "cpu").moved_bytes / 1280 for kind, bits in kinds}
    assert moved == {"32-bit master": 14.125, "24-bit master": 12.125, "fp32 weights": 14.125}


def test_a_setting_that_fails_does_not_end_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    def rate(setting: tuple[int]) -> float:
        if setting == (2,):
            raise RuntimeError("out of registers")
        return float(setting[0])

    assert bench_kernels.Report().sweep("update", [(1,), (2,), (3,)], rate, 4.0) == (3,)
    assert "out of registers" in capsys.readouterr().out


def test_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*tensors: Any, **options: Any) -> None:
        adamw8bit_update_triton_into(*tensors, **options)
        tensors[2][5] += 1

    monkeypatch.setattr(bench_kernels, "adamw8bit_update_triton_into", wrong)
    with pytest.raises(SystemExit, match="wrong bits"):
        run_tiny(monkeypatch)
    assert "GB/s" not in capsys.readouterr().out
