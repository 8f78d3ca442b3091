"""Feed damaged indexes, headers, manifests, checksums, configs and plans to their readers; run as a program.

    python tests/fuzz_driver.py DIRECTORY SEED NUM_CASES

Prints JSON: per kind, how many cases were refused and how many loaded, and every case that did neither. Memory is
limited to 256 MiB beyond what the process has at the start, so that an allocation by a declared size fails; a case that
takes more than 5 s is a hang.
"""

import json
import random
import resource
import signal
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from store_runs import META, make_run, make_step
from toys import ON_CPU, make_model, make_params, make_plan

from lazytrain.checkpoint import open_checkpoint
from lazytrain.configuration import load_config
from lazytrain.errors import CheckpointError, LazyTrainError
from lazytrain.saving import resume_state, save_state
from lazytrain.shards import open_model_dir
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.plan import Plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.toys import make_toy_problem
from lazytrain.store_manifest import canonical
from lazytrain.store_verify import verify_directory
from lazytrain.tensorfile import TensorFile

ROOM_BYTES = 256 * 2**20
CASE_S = 5
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x", ".", "..", "../x", "/etc/passwd", "a/b", "model.safetensors", "F32", "\0", "\ud800",
    "é" * 200, [], [[]], [0, 0], [2**40, 2**40], [0] * 70, {}, {"a": 1}, {"": {}}, [None], "9" * 30,
)  # fmt: skip


class Hang(BaseException):
    """A case that took too long. No `Exception`, so that no reader can swallow it."""


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with one to three small damages."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.randint(1, 40)]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 12)))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at : at + 1] = str(rng.choice((0, -1, 2**31, 2**63, 10**40))).encode()
        else:
            data[at:at] = rng.choice((b"[" * 3000, b'{"a":' * 3000, b"NaN", b"\xff\xfe", b"\0" * 20, b'"', b"}"))
    return bytes(data)


def damage_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one place changed, dropped, renamed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.6:
            return {k: damage_json(v, rng) if k == key else v for k, v in value.items()}
        if kind < 0.75:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.9:
            return {(str(rng.choice(VALUES)) if k == key else k): v for k, v in value.items()}
        return value | {str(rng.choice(VALUES)): value[key]}
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], damage_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(VALUES)


def damage_text(content: bytes, rng: random.Random) -> bytes:
    """Return a damaged JSON file: its bytes, or its meaning (with the checksum made right, where it has one)."""
    if rng.random() < 0.3:
        return damage_bytes(content, rng)
    value = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        if isinstance(value, dict) and value.keys() == {"crc32", "body"} and rng.random() < 0.95:
            body = damage_json(value["body"], rng)
            value = {"crc32": zlib.crc32(canonical(body)), "body": body}
        else:
            value = damage_json(value, rng)
    return json.dumps(value).encode()


def damage_header(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a damaged header: its length, its bytes or its meaning."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.2:
        declared = rng.choice((0, 1, length - 1, length + 1, len(content), 2**31, 2**63, 2**64 - 1, 10**8))
        return declared.to_bytes(8, "little") + header + data
    header = damage_text(header, rng)
    if rng.random() < 0.1:
        data = damage_bytes(data, rng)
    return len(header).to_bytes(8, "little") + header + data


def read_tensors(path: Path) -> None:
    file = TensorFile(path)
    for name, info in file.tensors.items():
        assert file.read(name).shape == info.shape
        assert file.raw(name).numel() == info.num_bytes


def read_model(path: Path) -> None:
    model = open_model_dir(path)
    for name, info in model.tensors.items():
        assert model.read(name).shape == info.shape
    load_config(path)


def read_plan(path: Path, problem: Problem) -> None:
    plan = Plan.load(path)
    plan.validate(problem)
    assert len(plan.units) == len(problem.units)


def read_checkpoint(path: Path, run_dir: Path, step: Any) -> None:
    """Read a damaged manifest as verification and resume do; what loads must be whole."""
    open_checkpoint(path).verify()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = resume_state(step, run_dir, meta=META)
    assert state is None or state.step >= 0


def run_cases(directory: Path, seed: int, num_cases: int) -> dict[str, Any]:
    run_dir = make_run(directory / "run")
    step = make_step("resident", directory / "nvme")
    problem = replace(make_toy_problem(seed, num_blocks=4, allow_nvme=True), num_microbatches=1)
    make_plan(default=ON_CPU).save(directory / "plan.json")
    Plan.load(directory / "plan.json").validate(problem)
    for path in (run_dir / "checkpoints").iterdir():
        if path.name != "step_00000003":
            path.rename(directory / path.name)
    checkpoint, model = run_dir / "checkpoints/step_00000003", run_dir / "model"
    linked = save_state(
        make_step("all on nvme", directory / "nvme", run_dir=directory / "linked").init(make_params(make_model())),
        directory / "linked",
        meta=META,
    )
    bare = directory / "bare"
    bare.mkdir()
    for path in model.iterdir():
        if path.name != "lazytrain_checksums.json":
            (bare / path.name).write_bytes(path.read_bytes())

    def read_sealed(path: Path) -> None:
        read_model(model)
        problems = verify_directory(model, stream=sys.stderr).problems
        if problems:
            raise CheckpointError(problems[0])

    kinds: dict[str, tuple[Path, Callable[[bytes, random.Random], bytes], Callable[[Path], None]]] = {
        "header": (checkpoint / "unit-00001.states", damage_header, read_tensors),
        "shard": (bare / "model-00001-of-00004.safetensors", damage_header, lambda path: read_model(bare)),
        "index": (bare / "model.safetensors.index.json", damage_text, lambda path: read_model(bare)),
        "config": (bare / "config.json", damage_text, lambda path: read_model(bare)),
        "checksums": (model / "lazytrain_checksums.json", damage_text, read_sealed),
        "manifest": (
            checkpoint / "manifest.json",
            damage_text,
            lambda path: read_checkpoint(checkpoint, run_dir, step),
        ),
        "linked manifest": (
            linked / "manifest.json",
            damage_text,
            lambda path: read_checkpoint(linked, linked.parents[1], step),
        ),
        "plan": (directory / "plan.json", damage_text, lambda path: read_plan(path, problem)),
    }
    limit = address_space_bytes() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        bytearray(2 * ROOM_BYTES)
    except MemoryError:
        pass
    else:
        raise AssertionError("the limit on memory doesn't hold: an allocation by a declared size would pass")
    signal.signal(signal.SIGALRM, raise_hang)
    result: dict[str, Any] = {"failures": []}
    for kind, (path, damage, read) in kinds.items():
        whole, rng = path.read_bytes(), random.Random(f"{seed} {kind}")
        refused = loaded = 0
        for case in range(num_cases // len(kinds) + 1):
            path.write_bytes(damage(whole, rng))
            signal.setitimer(signal.ITIMER_REAL, CASE_S)
            try:
                read(path)
                loaded += 1
            except (LazyTrainError, PlannerError):
                refused += 1
            except (Exception, Hang) as error:
                result["failures"].append([kind, case, repr(error)[:200], repr(path.read_bytes()[:300])])
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        path.write_bytes(whole)
        result[kind] = {"refused": refused, "loaded": loaded}
    return result


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def raise_hang(number: int, frame: Any) -> None:
    raise Hang


if __name__ == "__main__":
    print(json.dumps(run_cases(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
