"""A profile that was kept is used again for the same work on the same machine, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_profiler import GIB, make_profiler
from toys import make_batch, make_model

from lazytrain import adamw8bit, profile_cache
from lazytrain.kernels import native
from lazytrain.profile_cache import ProfileCache
from lazytrain.profiler import Profiler
from lazytrain.programs import ProgramCache


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks were measured, in order."""
    calls: list[int] = []
    real = Profiler._measure

    def measure(self: Profiler, num_microbatches: int, report: object) -> object:
        calls.append(num_microbatches)
        return real(self, num_microbatches, report)  # type: ignore[arg-type]

    monkeypatch.setattr(Profiler, "_measure", measure)
    return calls


def test_the_same_work_is_measured_once_and_takes_the_limits_of_now(tmp_path: Path, measured: list[int]) -> None:
    cache = ProfileCache(tmp_path / "profiles")
    first = make_profiler(cache=cache).problem(2)
    lines: list[str] = []
    again = make_profiler(cache=cache, limits={"device": GIB // 2, "host": GIB}, name="other")
    second = again.problem(2, lines.append)
    assert measured == [2]
    assert str(tmp_path) in lines[0]
    assert second.hardware.device_memory_bytes == GIB // 2
    assert second.model == "other"
    assert replace(second, hardware=first.hardware, model=first.model) == first


def test_another_kernel_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    profile_cache._digest_of_code()
    assert {native.SOURCE.name, *(header.name for header in native.HEADERS), "native.py", "profiler.py"} <= set(read)


OTHERS = {
    "chunks": ({}, 1),
    "rows": ({"batch": make_batch(0, rows=16)}, 2),
    "blocks": ({"model": make_model(5)}, 2),
    "states": ({"settings": adamw8bit(1e-3, master_bits=24).settings}, 2),
    "dtype": ({"dtype": torch.bfloat16}, 2),
    "residual points": ({"programs": ProgramCache(budgets=(0.5,))}, 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_work_is_measured_on_its_own(name: str, tmp_path: Path, measured: list[int]) -> None:
    cache = ProfileCache(tmp_path)
    make_profiler(cache=cache).problem(2)
    changes, chunks = OTHERS[name]
    make_profiler(cache=cache, **changes).problem(chunks)
    assert measured == [2, chunks]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "{}", "[" * 5000, '{"version": 99}'])
def test_a_damaged_entry_is_measured_again(content: str, tmp_path: Path, measured: list[int]) -> None:
    cache = ProfileCache(tmp_path)
    make_profiler(cache=cache).problem(1)
    (entry,) = tmp_path.iterdir()
    entry.write_text(content)
    make_profiler(cache=cache).problem(1)
    assert measured == [1, 1]
    make_profiler(cache=cache).problem(1)
    assert measured == [1, 1], "it was kept anew"


def test_a_directory_that_cannot_be_written_only_costs_the_keeping(tmp_path: Path, measured: list[int]) -> None:
    (tmp_path / "file").write_text("")
    assert make_profiler(cache=ProfileCache(tmp_path / "file" / "profiles")).problem(1).blocks
    assert measured == [1]
