"""An audit hook sees all that a run opens, imports and executes: nothing of a poisoned model but its data.

The run trains, saves, exports, evaluates, resumes with NVMe allowed, and verifies; beside the model lie pickles, Python
files that the config's `auto_map` names, foreign indexes and links that leave the directory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
MODEL_FILES = {
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip
DATA_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".jsonl", ".parquet", ".arrow")
HOSTILE_MODELS = {
    "index up": "not a plain file name",
    "index absolute": "not a plain file name",
    "shard link": "leaves the directory",
    "config link": "leaves the directory",
    "index link": "leaves the directory",
    "checksums link": "leaves the directory",
    "side link": "leaves the directory",
}
HOSTILE_CHECKPOINTS = {
    "name up": "no plain file name",
    "name absolute": "no plain file name",
    "file link": "missing",
    "manifest link": "never completed",
    "directory link": "skipped",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the watched directory and what the hook saw."""
    root = tmp_path_factory.mktemp("audit").resolve()
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "audit_driver.py"), str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return root, json.loads(done.stdout)


def opened(audit: tuple[Path, dict[str, Any]]) -> list[Path]:
    return [Path(what) for event, what in audit[1]["events"] if event == "open"]


def test_the_hook_sees_what_it_must(audit: tuple[Path, dict[str, Any]]) -> None:
    assert {"open", "exec", "compile", "pickle.find_class"} <= set(audit[1]["control"])
    assert len(opened(audit)) > 50


def test_of_the_model_only_its_data_is_opened(audit: tuple[Path, dict[str, Any]]) -> None:
    base = audit[0] / "base"
    names = {str(path.relative_to(base)) for path in opened(audit) if path.is_relative_to(base)}
    assert names == MODEL_FILES


def test_nothing_outside_model_data_and_run_is_opened(audit: tuple[Path, dict[str, Any]]) -> None:
    root = audit[0]
    allowed = [root / name for name in ("base", "run", "nvme")]
    files = {root / name for name in ("train.jsonl", "held_out.jsonl", "first.log", "second.log", "verify.log")}
    ours = [path for path in opened(audit) if path.is_relative_to(root) and path != root]
    assert [path for path in ours if path not in files and not any(map(path.is_relative_to, allowed))] == []
    # Elsewhere lies the program: its code, its libraries' own files; directories that are synced.
    others = [path for path in opened(audit) if not path.is_relative_to(root)]
    assert [path for path in others if path.name.endswith(DATA_ENDINGS)] == []


def test_no_pickle_no_code_of_the_model_and_no_network(audit: tuple[Path, dict[str, Any]]) -> None:
    root, result = audit
    events = [(event, what) for event, what in result["events"] if event != "open"]
    assert [pair for pair in events if pair[0] == "pickle.find_class"] == []
    assert {what for event, what in events if event.startswith(("socket.", "urllib.", "http."))} <= {"()"}
    assert {event for event, _ in events if event.startswith("socket.")} <= {"socket.gethostname"}  # the lock's note
    code = [what for event, what in events if event in ("import", "exec", "compile")]
    assert code
    assert [what for what in code if what.startswith(str(root))] == []
    # `platform` asks uname; the kernels of the CPU are compiled once a machine.
    started = [
        what for event, what in events if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
    ]
    assert [what for what in started if not what.startswith(("('uname'", "('/", "('g++'", "('c++'"))] == []
    assert [what for what in started if str(root) in what] == []


@pytest.mark.parametrize(("kind", "text"), (HOSTILE_MODELS | HOSTILE_CHECKPOINTS).items())
def test_what_points_outside_is_refused_and_never_opened(
    audit: tuple[Path, dict[str, Any]], kind: str, text: str
) -> None:
    message, paths = audit[1]["hostile"][kind]
    assert text in message
    own = audit[0] / "hostile" / kind
    assert [path for path in paths if not Path(path).is_relative_to(own)] == []
    assert not any("secret" in path for path in paths)
