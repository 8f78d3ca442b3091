"""The planner's command line, without torch."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.solver.costs import problem_from_config
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.hardware import PRESETS, load_hardware
from lazytrain.solver.models import KNOWN_MODELS
from lazytrain.solver.sizes import parse_size

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
from lazytrain.solver.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
PLANNED = ("llama", "mistral", "qwen2", "qwen3")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_command_prints_plan_and_baselines_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run(
        *("--model", "qwen2.5-3b", "--hardware", "rtx3090", "--batch", "32", "--seq", "1024", "--time-limit", "3"),
        *("--gpu-memory", "24GiB", "--host-memory", "64GiB", "--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    for word in ("embed", "blocks", "head", "expected step", "tokens/s", "device", "host", "recompute_all"):
        assert word in done.stdout, word
    assert json.loads(path.read_text())["num_microbatches"] >= 1


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--model", "qwen2.5-8b", "--hardware", "h200"), "qwen2.5-7b"),
        (("--model", "qwen2.5-7b", "--hardware", "h2000"), "h200"),
        (("--model", "qwen2.5-7b", "--hardware", "h200", "--gpu-memory=-3GiB"), "-3GiB"),
        (("--model", "qwen2.5-7b", "--hardware", "h200", "--gpu-memory", "lots"), "24GiB"),
        (("--model", "qwen2.5-7b", "--hardware", "h200", "--batch", "0"), "batch"),
        (("--model", "qwen2.5-32b", "--hardware", "rtx3090"), "GiB more host memory"),
        (("--model", "qwen2.5-7b", "--hardware", "h200", "--time-limit", "0"), "--time-limit"),
    ],
)
def test_a_mistake_gets_one_line_and_code_2(arguments: tuple[str, ...], phrase: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert phrase in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.data
def test_real_configs_are_planned_for_or_refused_by_name(shared_dir: Path) -> None:
    paths = sorted((shared_dir / "data" / "configs").rglob("config.json"))
    assert len(paths) >= 30
    for path in paths:
        config = json.loads(path.read_text())
        quantized = "quantization" in config or "quantization_config" in config
        if config["model_type"] in PLANNED and not quantized:
            problem = problem_from_config(config, load_hardware("h200"), batch=8, seq=1024)
            assert len(problem.blocks) == config["num_hidden_layers"], path
        else:
            with pytest.raises(PlannerError, match=r"supported|quantized"):
                problem_from_config(config, load_hardware("h200"), batch=8, seq=1024)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid_and_marked_as_estimates(name: str) -> None:
    hardware = load_hardware(name)
    hardware.validate()
    assert hardware.is_estimate


def test_known_models_have_their_size() -> None:
    billions = {"qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62, "qwen2.5-32b": 32.8, "llama-3-8b": 8.03, "qwen3-0.6b": 0.596}
    for name, expected in billions.items():
        problem = problem_from_config(KNOWN_MODELS[name], load_hardware("h200"), batch=1, seq=128)
        num_params = sum(unit.num_params for unit in problem.units)
        assert num_params / 1e9 == pytest.approx(expected, rel=0.01), name


@pytest.mark.slow
def test_largest_batch_and_gains_are_printed() -> None:
    done = run(
        *("--model", "qwen2.5-0.5b", "--hardware", "rtx3090", "--seq", "512", "--time-limit", "2"),
        *("--gpu-memory", "5GiB", "--host-memory", "4GiB", "--max-batch", "--explain"),
    )
    assert done.returncode == 0, done.stderr
    solved = re.search(r"^solved +(\d+)$", done.stdout, re.MULTILINE)
    fixed = re.search(r"^fixed_interval +(\d+)$", done.stdout, re.MULTILINE)
    gains = re.search(r"one more GiB: device ([-+][\d.]+) ms, host ([-+][\d.]+) ms", done.stdout)
    assert solved is not None
    assert fixed is not None
    assert gains is not None
    assert int(solved[1]) >= int(fixed[1]) > 0
    assert all(float(gain) <= 0 for gain in gains.groups())


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GiB", 24 << 30), ("500MB", 500_000_000), ("1e9", 10**9), (" 2 kb ", 2000)]
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "24 bananas", "0", "1e30", "1e999", "nan"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)
