"""Kill tiny runs with SIGKILL at seeded points, resume them, compare with a run that was left alone; run as a program.

    python tests/kill_driver.py DIRECTORY SEED NUM_POINTS

A point is the n-th event of a class: a system call on a spill file (a write-back of an update, a read of a block), one
on a checkpoint, the start of a step, a line of metrics; or a time. Every run is a forked process. A run that was killed
is started again, and every third is killed a second time. Prints JSON: for every point, where it was and what differs.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from store_runs import META, make_step
from toys import make_batch, make_model, make_params

from lazytrain.locking import RunLock
from lazytrain.recipes.batches import TokenCounts
from lazytrain.recipes.metrics import MetricsFile, read_metrics
from lazytrain.saving import resume_state, save_state
from lazytrain.trainer import read_params

NUM_STEPS, SAVE_EVERY = 6, 2
PLANS = ("all on nvme", "mixed", "all on nvme, updated on cpu", "streamed, updated on cpu")
CALLS = (
    "open", "pwrite", "preadv", "fsync", "posix_fallocate", "rename", "mkdir", "unlink", "rmdir", "close", "link",
    "ftruncate",
)  # fmt: skip
SPILL_WRITE, SPILL_READ, SAVE, SYNC, NAME, STEP, METRICS, TIME, LINK = (
    "spill write", "spill read", "save write", "save sync", "save rename or delete", "step", "metrics", "time",
    "save link",
)  # fmt: skip
CLASSES = (SPILL_WRITE, SAVE, NAME, SPILL_READ, STEP, SYNC, METRICS, TIME, LINK)
KILLED = -signal.SIGKILL


class Events:
    """Counts events by class; at a chosen one the process kills itself. Threads may count at once."""

    def __init__(self, at: tuple[str, int] | None) -> None:
        self.at, self.counts = at, Counter[str]()

    def note(self, kind: str) -> None:
        self.counts[kind] += 1
        if self.at is not None and self.at[0] == kind and self.counts[kind] > self.at[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.note(self._classify(name, args[0]))
            return real(*args, **options)

        return call

    def _classify(self, name: str, target: Any) -> str:
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
        except OSError:
            path = ""
        if name in ("link", "ftruncate"):  # what is on NVMe gets its header, its size and a name in the checkpoint
            return LINK
        if "/nvme/" in path or path.endswith("/nvme"):
            return SPILL_READ if name == "preadv" else SPILL_WRITE if name == "pwrite" else "other"
        if name == "fsync":
            return SYNC
        if name in ("rename", "unlink", "rmdir", "mkdir"):
            return NAME
        return SAVE if name in ("pwrite", "posix_fallocate") or "/checkpoints/" in path else "other"


def train(directory: Path, plan: str, events: Events) -> None:
    """Run, or go on with, six steps with a save after every second one; leave a digest of all that was trained."""
    torch.set_num_threads(1)
    run_dir = directory / "run"
    events.install()
    with RunLock(run_dir):
        step = make_step(plan, directory / "nvme", run_dir=run_dir)
        state = resume_state(step, run_dir, meta=META)
        if state is None:
            state = step.init(make_params(make_model()), seed=3)
        with MetricsFile(run_dir / "metrics.jsonl", first_step=state.step) as metrics_file:
            while state.step < NUM_STEPS:
                events.note(STEP)
                batch = make_batch(state.step)
                state, metrics = step(state, batch)
                events.note(METRICS)
                counts = TokenCounts(*(96 for _ in TokenCounts._fields))
                metrics_file.write(metrics, counts, batch)
                if state.step % SAVE_EVERY == 0:
                    save_state(state, run_dir, meta=META)
        homes = state.engine.homes
        sums = {name: digest(value) for name, value in read_params(state)}
        sums |= {f"{h.unit.name} state": digest(homes.state_slab(h)) for h in homes.units if h.has_params}
        rows = [
            {k: v for k, v in row.items() if k != "last_account" and not k.endswith("_s")}
            for row in read_metrics(run_dir / "metrics.jsonl")
        ]
        (directory / "result.json").write_text(json.dumps({"sums": sums, "rows": rows, "counts": events.counts}))


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def run(directory: Path, plan: str, at: tuple[str, int] | None) -> int:
    """Run in a forked process; return its exit code, which is -9 where the point was reached."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(directory, plan, Events(None if at is None or at[0] == TIME else at))
            code = 0
        except BaseException as error:
            print(f"{plan} {at}: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    if at is not None and at[0] == TIME:
        time.sleep(at[1] / 1e3)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def warm_up(directory: Path) -> None:
    """Load here what every forked process would load again. No threads: the plan spills nothing."""
    torch.set_num_threads(1)
    step = make_step("resident", directory)
    state, _ = step(step.init(make_params(make_model())), make_batch())
    save_state(state, directory, meta=META)


def read_result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def main(directory: Path, seed: int, num_points: int) -> dict[str, Any]:
    expected, ms = {}, {}
    warm_up(directory / "warm")
    for plan in PLANS:
        start_s = time.perf_counter()
        assert run(directory / plan, plan, None) == 0
        ms[plan] = int((time.perf_counter() - start_s) * 1e3)
        expected[plan] = read_result(directory / plan)
    first = expected[PLANS[0]]
    assert all((other["sums"], other["rows"]) == (first["sums"], first["rows"]) for other in expected.values())
    points = []
    for index in range(num_points):
        rng = random.Random(f"{seed} {index}")
        kind = CLASSES[index % len(CLASSES)]
        with_kind = [plan for plan in PLANS if kind == TIME or expected[plan]["counts"].get(kind)]
        plan = rng.choice(with_kind)

        def choose(kind: str = kind, plan: str = plan, rng: random.Random = rng) -> tuple[str, int]:
            return kind, rng.randrange(ms[plan] if kind == TIME else expected[plan]["counts"][kind])

        here = directory / f"point {index}"
        kills = [choose() for _ in range(2 if index % 3 == 2 else 1)]
        codes = [run(here, plan, at) for at in kills]
        # Another plan may go on with it: placement never changes a bit.
        other = rng.choice(PLANS)
        codes.append(run(here, other, None))
        result = read_result(here) if codes[-1] == 0 else {}
        same = (result.get("sums"), result.get("rows")) == (first["sums"], first["rows"])
        points.append({"kind": kind, "plan": plan, "then": other, "kills": kills, "codes": codes, "same": same})
    return {"points": points, "sums": len(first["sums"]), "rows": len(first["rows"])}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
