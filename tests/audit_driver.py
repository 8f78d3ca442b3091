"""Watch, by an audit hook, what the recipe opens, imports and runs beside a poisoned model; run as a program.

    python tests/audit_driver.py DIRECTORY

Prints JSON: the events of a whole run (train, save, export, evaluate, resume, verify), and for each hostile directory
the error that refused it and what was opened outside of it.
"""

import json
import os
import pickle
import signal
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from signal_driver import SMALL, make_input, output_to

from lazytrain.checkpoint import latest_valid, open_checkpoint
from lazytrain.errors import LazyTrainError
from lazytrain.recipes import metamathqa
from lazytrain.shards import INDEX, open_model_dir
from lazytrain.store import main as store_main
from lazytrain.store_manifest import MODEL_CHECKSUMS, canonical
from lazytrain.store_saving import save_checkpoint

WATCHED = (
    "open",
    "import",
    "exec",
    "compile",
    "pickle.find_class",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.system",
)
PAYLOAD = "raise SystemExit('a file of the model was executed')\n"


class Poison:
    """What a pickle may do as it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (66,)


class Watch:
    """Records the watched events while it is on; a hook can't be removed."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[tuple[str, str]] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and (event in WATCHED or event.startswith(("socket.", "urllib.", "http."))):
            self.events.append((event, describe(event, arguments)))

    def during(self, action: Callable[[], Any]) -> tuple[Any, list[tuple[str, str]]]:
        self.events, self.is_on = [], True
        try:
            return action(), self.events
        finally:
            self.is_on = False


def describe(event: str, arguments: tuple[Any, ...]) -> str:
    """Return what an event is about: a path where it has one."""
    path: Any = None
    if event in ("open", "compile"):
        path = arguments[0] if event == "open" else arguments[1]
    if event == "exec":
        path = arguments[0].co_filename
    if event == "import":
        path = arguments[1]
    if isinstance(path, (str, bytes, os.PathLike)):
        text = os.fsdecode(path)
        return text if text.startswith("<") else os.path.abspath(text)  # "<string>": generated code has no file
    return repr(arguments)[:200]


def poison(model: Path) -> None:
    """Lay beside a good model all that careless loaders open."""
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "consolidated.00.pth",
        "training_args.bin",
        "optimizer.pt",
        "rng_state.pth",
    ):
        (model / name).write_bytes(pickle.dumps(Poison()))
    for name in (
        "modeling_qwen2.py",
        "configuration_qwen2.py",
        "tokenization_qwen2.py",
        "__init__.py",
        "torch.py",
        "conftest.py",
    ):
        (model / name).write_text(PAYLOAD)
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_qwen2.Model", "AutoConfig": "configuration_qwen2.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / MODEL_CHECKSUMS).unlink()  # the model is a stranger's
    (model / "adapter_model.safetensors").symlink_to("../secret/weights.safetensors")
    (model / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../secret/weights.safetensors"}}')


def run_everything(root: Path, files: tuple[str, ...]) -> None:
    run_dir = root / "run"
    arguments = [*SMALL, *files, "--out", str(run_dir), "--spill-dir", str(root / "nvme")]
    with output_to(root / "first.log"):
        assert metamathqa.main(arguments) == 0
    with output_to(root / "second.log"):
        assert metamathqa.main([*arguments, "--resume", "auto", "--plan", str(run_dir / "plan.json")]) == 0
    with output_to(root / "verify.log"):
        assert store_main(["verify", str(run_dir)]) == 0
        assert store_main(["verify", str(root / "base")]) == 0


def hostile_models(root: Path, secret: Path) -> dict[str, Path]:
    """Return model directories that point to a file outside of them, each in another way."""
    paths = {}
    for kind in (
        "index up",
        "index absolute",
        "shard link",
        "config link",
        "index link",
        "checksums link",
        "side link",
    ):
        path = paths[kind] = root / "hostile" / kind
        path.mkdir(parents=True)
        (path / "config.json").write_text('{"model_type": "qwen2"}')
        save_file({"a": torch.ones(3)}, path / "model.safetensors", {"format": "pt"})
        if kind.startswith("index"):
            shard = {"index up": f"../../{secret.parent.name}/{secret.name}", "index absolute": str(secret)}.get(
                kind, "x"
            )
            (path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
            (path / "model.safetensors").rename(path / "x")
        link = {
            "shard link": "model.safetensors", "config link": "config.json", "index link": INDEX,
            "checksums link": MODEL_CHECKSUMS, "side link": "tokenizer.json",
        }.get(kind)  # fmt: skip
        if link is not None:
            (path / link).unlink(missing_ok=True)
            (path / link).symlink_to(secret)
    return paths


def hostile_checkpoints(root: Path, secret: Path) -> dict[str, Path]:
    paths = {}
    for kind in ("name up", "name absolute", "file link", "manifest link", "directory link"):
        run_dir = root / "hostile" / kind
        path = save_checkpoint(run_dir, 1, [("x.safetensors", {"a": torch.ones(3)})], {})
        paths[kind] = run_dir
        if kind.startswith("name"):
            body = json.loads((path / "manifest.json").read_text())["body"]
            name = str(secret) if kind == "name absolute" else f"../../../{secret.parent.name}/{secret.name}"
            body["files"] = {name: body["files"]["x.safetensors"]}
            content = {"crc32": zlib.crc32(canonical(body)), "body": body}
            (path / "manifest.json").write_text(json.dumps(content))
        elif kind == "directory link":
            path.rename(secret.parent / "moved")
            path.symlink_to(secret.parent / "moved")
        else:
            link = path / ("x.safetensors" if kind == "file link" else "manifest.json")
            link.unlink()
            link.symlink_to(secret)
    return paths


def refusal(action: Callable[[], Any]) -> str:
    try:
        return f"accepted: {action()}"
    except LazyTrainError as error:
        return str(error)


def main(root: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    secret = root / "secret" / "weights.safetensors"
    secret.parent.mkdir()
    save_file({"a": torch.ones(3)}, secret, {"format": "pt"})
    files = make_input(root)
    poison(root / "base")
    os.chdir(root / "base")  # where a careless import would find torch.py
    watch = Watch()
    _, events = watch.during(lambda: run_everything(root, files))
    result: dict[str, Any] = {"events": sorted(set(events)), "hostile": {}}
    for kind, path in hostile_models(root, secret).items():
        text, events = watch.during(lambda: refusal(lambda: open_model_dir(path)))  # noqa: B023
        result["hostile"][kind] = [text, [what for event, what in events if event == "open"]]
    for kind, path in hostile_checkpoints(root, secret).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, events = watch.during(lambda: latest_valid(path))  # noqa: B023
        step = path / "checkpoints/step_00000001"
        text = "accepted" if found is not None else "skipped"
        if not step.is_symlink():  # such a link is not even looked at; the others are named
            text = refusal(lambda: open_checkpoint(step).verify())  # noqa: B023
        result["hostile"][kind] = [text, [what for event, what in events if event == "open"]]

    # The hook sees what it must: else the lists above prove nothing.
    def misbehave() -> None:
        (root / "secret/weights.safetensors").read_bytes()
        pickle.loads(pickle.dumps(signal.Signals.SIGTERM))
        exec(compile("1", str(root / "base/torch.py"), "exec"))

    result["control"] = sorted({event for event, _ in watch.during(misbehave)[1]})
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve())))
