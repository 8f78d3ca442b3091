"""TensorBoard and Weights & Biases, with fakes in their place."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lazytrain.errors import ConfigError
from lazytrain.recipes import trackers as module
from lazytrain.recipes.options import Options, parse_options
from lazytrain.recipes.trackers import Trackers, check_trackers, open_trackers

ROW = {"step": 3, "loss": 2.0, "lr": 1e-3, "grad_norm": float("nan"), "shape": [1, 2], "tokens_per_s": 10.0}


class FakeWriter:
    made: "list[FakeWriter]" = []  # noqa: RUF012

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.is_closed = False
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.is_closed = True


class FakeWandB(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.num_finished = 0

    def init(self, **kwargs: Any) -> Any:
        self.inits.append(kwargs)
        return SimpleNamespace(id=kwargs["id"] or "new-id", log=self.log, finish=self.finish)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.num_finished += 1


def options(tmp_path: Path, *arguments: str) -> Options:
    return parse_options(["--out", str(tmp_path), *arguments])


@pytest.mark.parametrize("flags", [("--tensorboard",), ("--wandb", "project")])
def test_a_tracker_that_is_not_installed_names_the_extra(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    name = flags[0].removeprefix("--")
    with pytest.raises(ConfigError, match=rf"pip install 'lazytrain\[{name}\]'"):
        check_trackers(options(tmp_path, *flags))


def test_without_flags_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(module, "find_spec", fail)
    monkeypatch.setattr(module, "import_module", fail)
    check_trackers(options(tmp_path))
    with open_trackers(options(tmp_path), first_step=0, config={}) as trackers:
        trackers.log_row(ROW)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_finite_scalars_and_drops_steps_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "import_module", lambda name: SimpleNamespace(SummaryWriter=FakeWriter))
    with open_trackers(options(tmp_path, "--tensorboard"), first_step=2, config={}) as trackers:
        trackers.log_row(ROW)
    writer = FakeWriter.made[-1]
    assert writer.purge_step == 2
    assert writer.log_dir == str(tmp_path / "tensorboard")
    assert writer.scalars == [("loss", 2.0, 3), ("lr", 1e-3, 3), ("tokens_per_s", 10.0, 3)]
    assert writer.is_closed


def test_wandb_goes_on_with_the_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config: Mapping[str, Any] = {"lr": 0.1, "out": tmp_path, "model": None}
    for first_step in (0, 5, 0):
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=first_step, config=config) as trackers:
            trackers.log_row(ROW)
    assert [kwargs["id"] for kwargs in fake.inits] == [None, "new-id", None]
    assert fake.inits[0]["project"] == "mine"
    assert fake.inits[0]["config"] == {"lr": 0.1, "out": str(tmp_path), "model": None}
    assert fake.logged == [({"loss": 2.0, "lr": 1e-3, "tokens_per_s": 10.0}, 3)] * 3
    assert fake.num_finished == 3


def test_wandb_that_cant_start_says_why_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()

    def refuse(**kwargs: Any) -> None:
        raise RuntimeError("no API\nkey")

    monkeypatch.setattr(fake, "init", refuse)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ConfigError, match=r"no API key.*WANDB_MODE=offline") as error:
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=0, config={}):
            pass
    assert "\n" not in str(error.value)


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on() -> None:
    class Broken:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise AssertionError("it was dropped")

    good = FakeWriter("", 0)
    keeper = SimpleNamespace(log=lambda step, values: good.scalars.append(("all", len(values), step)), close=good.close)
    trackers = Trackers([Broken(), keeper])
    with pytest.warns(RuntimeWarning, match="Broken failed at step 3 and is dropped: disk full"):
        trackers.log_row(ROW)
    trackers.log_row(ROW | {"step": 4})
    trackers.close()
    assert good.scalars == [("all", 3, 3), ("all", 3, 4)]
    assert good.is_closed
