"""The recipe as a program: what it leaves, exact resume after kill and signal, clean refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--steps", "6", "--batch-size", "8", "--eval-limit", "6", "--eval-batch-size", "3", "--max-new-tokens", "6")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DEADLINE_S = 180
TIMES = ("step_s", "tokens_per_s", "padded_tokens_per_s", "model_tflops", "last_account")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lazytrain.recipes.metamathqa", "--device", "cpu", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def read_rows(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def read_weights(out: Path) -> dict[str, bytes]:
    weights = {}
    for path in sorted((out / "model").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
    return weights


def wait_for_steps(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    path = out / "metrics.jsonl"
    while not path.is_file() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "the run takes no steps"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Return the run directory and the output of a run of six steps."""
    out = tmp_path_factory.mktemp("straight") / "run"
    code, stdout, stderr = run(*SMALL, "--out", str(out))
    assert code == 0, stderr
    return out, stdout, stderr


def test_a_run_leaves_all_that_it_promises(straight: tuple[Path, str, str]) -> None:
    out, stdout, _ = straight
    for name in (
        "plan.json",
        "metrics.jsonl",
        "samples.jsonl",
        "outcome.json",
        "run.png",
        "report.html",
        "options.toml",
    ):
        assert (out / name).stat().st_size > 0, name
    model = {path.name for path in (out / "model").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= model
    assert len(list((out / "model").glob("*.safetensors"))) >= 2
    assert len(list((out / "base_model").glob("*.safetensors"))) >= 2
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000006"]
    assert [row["step"] for row in read_rows(out)] == list(range(6))
    assert len((out / "samples.jsonl").read_text().splitlines()) == 6
    for phrase in ("expected:", "will use:", "predicted", "measured", "exact match"):
        assert phrase in stdout, phrase


def test_output_to_a_file_is_plain_lines(straight: tuple[Path, str, str]) -> None:
    assert "\r" not in straight[1] + straight[2]
    assert "training 6/6 steps" in straight[2]


def test_a_killed_run_resumes_with_the_same_bits(straight: tuple[Path, str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*SMALL, "--out", str(out), "--save-every", "2")
    wait_for_steps(process, out, 3)
    process.kill()
    process.communicate()
    code, stdout, stderr = run(*SMALL, "--out", str(out), "--resume", "auto")
    assert code == 0, stderr
    assert "resumed at step" in stdout
    assert read_rows(out) == read_rows(straight[0])
    assert read_weights(out) == read_weights(straight[0])
    assert "starting anew" not in stdout
    code, stdout, stderr = run(*SMALL, "--out", str(out))
    assert code == 0, stderr
    assert f"starting anew: the checkpoints in {out} (2) are kept until this run comes to their steps" in stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on_later(
    number: signal.Signals, code: int, straight: tuple[Path, str, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    long = ("--steps", "2000", *SMALL[2:])
    process = start(*long, "--out", str(out))
    wait_for_steps(process, out, 2)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, stderr
    assert "--resume auto" in stdout
    assert "saved within" in stderr
    steps = len(read_rows(out))
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step_{steps:08d}"]


def test_a_second_process_on_a_run_directory_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = start("--steps", "2000", *SMALL[2:], "--out", str(out))
    try:
        wait_for_steps(first, out, 1)
        code, _, stderr = run(*SMALL, "--out", str(out))
        assert code == 2
        assert str(first.pid) in stderr
    finally:
        first.kill()
        first.communicate()


def test_resume_with_other_options_names_the_one_that_differs(straight: tuple[Path, str, str]) -> None:
    code, _, stderr = run("--steps", "9", *SMALL[2:], "--out", str(straight[0]), "--resume", "auto")
    assert code == 2
    assert "num_steps = 6, this run has 9" in stderr


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--model", "nowhere", "--data", "rows.jsonl"), "not a directory"),
        (("--data", "rows.jsonl"), "--model DIR"),
        (("--model", "nowhere"), "--data FILE"),
        (("--gpu-memory", "1MiB", *SMALL), "nothing fits"),
        (("--max-tokens", "8", *SMALL), "--max-tokens"),
        (("--plan", "no-plan.json", *SMALL), "no-plan.json"),
    ],
)
def test_a_mistake_gets_one_line_and_code_2(arguments: tuple[str, ...], phrase: str, tmp_path: Path) -> None:
    code, _, stderr = run(*arguments, "--out", str(tmp_path / "run"))
    assert code == 2
    assert phrase in stderr
    assert "Traceback" not in stderr


def test_a_saved_plan_can_be_edited_and_run(straight: tuple[Path, str, str], tmp_path: Path) -> None:
    plan = json.loads((straight[0] / "plan.json").read_text())
    for run_of_blocks in plan["blocks"]:
        run_of_blocks |= {"weights": "host", "states": "host", "grads": "host", "update": "cpu", "boundary": "host"}
        run_of_blocks |= {"residual_point": 0, "residuals": "none"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code, _, stderr = run(*SMALL, "--out", str(tmp_path / "run"), "--plan", str(tmp_path / "plan.json"))
    assert code == 0, stderr
    assert read_rows(tmp_path / "run") == read_rows(straight[0])
    assert read_weights(tmp_path / "run") == read_weights(straight[0])
