"""TensorBoard and Weights & Biases, with fakes in their place."""

import json
import sys
import sysconfig
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
        self.exit_codes: list[int] = []
        self.step_known = 0  # the step that the service wants next

    def init(self, **kwargs: Any) -> Any:
        self.inits.append(kwargs)
        step = self.step_known if kwargs["id"] else 0
        return SimpleNamespace(id=kwargs["id"] or "new-id", step=step, log=self.log, finish=self.finish)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    """Return a fake in the package's place."""
    fake = FakeWandB()
    monkeypatch.setattr(module, "_load", lambda name: fake)
    return fake


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
    monkeypatch.setattr(module, "_load", lambda name: SimpleNamespace(SummaryWriter=FakeWriter))
    with open_trackers(options(tmp_path, "--tensorboard"), first_step=2, config={}) as trackers:
        trackers.log_row(ROW)
    writer = FakeWriter.made[-1]
    assert writer.purge_step == 2
    assert writer.log_dir == str(tmp_path / "tensorboard")
    assert writer.scalars == [("loss", 2.0, 3), ("lr", 1e-3, 3), ("tokens_per_s", 10.0, 3)]
    assert writer.is_closed


def test_wandb_goes_on_with_the_run_that_is_resumed(tmp_path: Path, wandb: FakeWandB) -> None:
    config: Mapping[str, Any] = {"lr": 0.1, "out": tmp_path, "model": None}
    for first_step in (0, 5, 0):
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=first_step, config=config) as trackers:
            trackers.log_row(ROW)
    assert [kwargs["id"] for kwargs in wandb.inits] == [None, "new-id", None]
    assert wandb.inits[0]["project"] == "mine"
    assert wandb.inits[0]["config"] == {"lr": 0.1, "out": str(tmp_path), "model": None}
    assert wandb.logged == [({"loss": 2.0, "lr": 1e-3, "tokens_per_s": 10.0}, 3)] * 3
    assert wandb.exit_codes == [0, 0, 0]


def test_wandb_gets_what_a_kill_took_and_nothing_twice(tmp_path: Path, wandb: FakeWandB) -> None:
    with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=0, config={}):
        pass
    lines = [json.dumps(ROW | {"step": step, "loss": float(step)}) for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    for step_known, expected in ((4, [4, 5, 6, 7]), (7, [7])):
        wandb.step_known, wandb.logged = step_known, []
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=6, config={}) as trackers:
            for step in (6, 7):
                trackers.log_row(ROW | {"step": step, "loss": float(step)})
        assert [(step, values["loss"]) for values, step in wandb.logged] == [(step, step) for step in expected]


def test_wandb_hears_of_a_run_that_failed(tmp_path: Path, wandb: FakeWandB) -> None:
    with pytest.raises(ZeroDivisionError):
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=0, config={}):
            raise ZeroDivisionError
    assert wandb.exit_codes == [1]


def test_wandb_that_cant_start_says_why_in_one_line(
    tmp_path: Path, wandb: FakeWandB, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**kwargs: Any) -> None:
        raise RuntimeError("no API\nkey. Use it.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"no API key\. Use it\. Log in .*WANDB_MODE=offline") as error:
        with open_trackers(options(tmp_path, "--wandb", "mine"), first_step=0, config={}):
            pass
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags", [("--tensorboard",), ("--wandb", "project")])
def test_a_folder_of_that_name_is_no_package(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = flags[0].removeprefix("--")
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), sysconfig.get_path("stdlib")])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match="is not installed"):
        check_trackers(options(tmp_path, *flags))


def test_a_package_that_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise TypeError("Descriptors cannot be created directly.\nIf this call came from")

    monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace(origin="there"))
    monkeypatch.setattr(module, "import_module", fail)
    with pytest.raises(ConfigError, match=r"tensorboard does not load: Descriptors .* directly\. Install it anew"):
        check_trackers(options(tmp_path, "--tensorboard"))


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on() -> None:
    class Broken:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def close(self, failed: bool) -> None:
            raise AssertionError("it was dropped")

    good = FakeWriter("", 0)
    keeper = SimpleNamespace(
        log=lambda step, values: good.scalars.append(("all", len(values), step)), close=lambda failed: good.close()
    )
    trackers = Trackers([Broken(), keeper])
    with pytest.warns(RuntimeWarning, match="Broken failed at step 3 and is dropped: disk full"):
        trackers.log_row(ROW)
    trackers.log_row(ROW | {"step": 4})
    trackers.close()
    assert good.scalars == [("all", 3, 3), ("all", 3, 4)]
    assert good.is_closed
