"""A checkpoint survives whatever happens while the next one is written."""

import errno
import os
import shutil
import warnings

import pytest
from checkpoint_files import assert_whole, latest_without_warning, make_files, save, steps

from lazytrain import durable
from lazytrain.errors import CheckpointError
from lazytrain.store_saving import save_checkpoint

SYSTEM_CALLS = [
    "pwrite",
    "fsync",
    "posix_fallocate",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "ftruncate",
    "close",
    "link",
]


def count_calls(action, monkeypatch, at=None, do=None):
    """Run `action`; count the system calls it makes and `do` something instead of number `at`."""
    count = 0

    def wrap(real):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count - 1 == at:
                do()
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, wrap(getattr(os, name)))
        action()
    return count


def run_killed(action):
    """Run `action` in a forked process, which kills itself with SIGKILL; return the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_kill_at_every_system_call_leaves_a_valid_checkpoint(tmp_path, monkeypatch):
    base = tmp_path / "base"
    for step in (1, 2):
        save(base, step)
    shutil.copytree(base, tmp_path / "dry")
    num_calls = count_calls(lambda: save(tmp_path / "dry", 3), monkeypatch)
    assert num_calls > 20
    found = []
    for at in range(num_calls):
        run_dir = tmp_path / f"run{at}"
        shutil.copytree(base, run_dir)
        kill = lambda: os.kill(os.getpid(), 9)  # noqa: E731
        code = run_killed(lambda: count_calls(lambda: save(run_dir, 3), monkeypatch, at, kill))  # noqa: B023
        assert code == -9
        checkpoint = latest_without_warning(run_dir)
        assert_whole(checkpoint)
        found.append(checkpoint.step)
        # The next save cleans up and rotates.
        save(run_dir, 4)
        assert_whole(latest_without_warning(run_dir))
        kept = ["step_00000003" if checkpoint.step == 3 else "step_00000002", "step_00000004"]
        assert steps(run_dir) == kept
        shutil.rmtree(run_dir)
    assert found == sorted(found)
    assert set(found) == {2, 3}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failure_at_every_system_call_leaves_a_valid_checkpoint(tmp_path, monkeypatch, code):
    base = tmp_path / "base"
    for step in (1, 2):
        save(base, step)
    shutil.copytree(base, tmp_path / "dry")
    num_calls = count_calls(lambda: save(tmp_path / "dry", 3), monkeypatch)

    def fail():
        raise OSError(code, os.strerror(code))

    messages = []
    for at in range(num_calls):
        run_dir = tmp_path / f"run{at}"
        shutil.copytree(base, run_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old checkpoint that can't be deleted
            try:
                count_calls(lambda: save(run_dir, 3), monkeypatch, at, fail)  # noqa: B023
            except CheckpointError as error:
                messages.append(str(error))
        assert_whole(latest_without_warning(run_dir))
        shutil.rmtree(run_dir)
    assert len(messages) > 10
    assert all(os.strerror(code) in message for message in messages)


def test_kill_while_replacing_a_step_leaves_it_valid(tmp_path, monkeypatch):
    save(tmp_path / "dry", 2)
    num_calls = count_calls(lambda: save(tmp_path / "dry", 2), monkeypatch)
    for at in range(num_calls):
        run_dir = tmp_path / f"run{at}"
        save(run_dir, 2)
        kill = lambda: os.kill(os.getpid(), 9)  # noqa: E731
        assert run_killed(lambda: count_calls(lambda: save(run_dir, 2), monkeypatch, at, kill)) == -9  # noqa: B023
        assert_whole(latest_without_warning(run_dir))


@pytest.mark.filterwarnings("ignore:.*kept as step_00000002.kept")
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "renames"])
@pytest.mark.parametrize("fails", [False, True], ids=["killed", "failing"])
def test_what_others_put_into_a_replaced_step_outlives_every_end(tmp_path, monkeypatch, exchanges, fails):
    """A save is killed, or a call of it fails, and the next one cleans up: the notes are still there."""
    if not exchanges:
        monkeypatch.setattr(durable, "_exchange", lambda first, second: False)

    def make(run_dir):
        for step in (1, 2):
            path = save(run_dir, step)
        (path / "notes.txt").write_text("mine")
        return run_dir

    def end():
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.kill(os.getpid(), 9)

    def save_again(run_dir, at):
        try:
            count_calls(lambda: save(run_dir, 2), monkeypatch, at, end)
        except CheckpointError:
            assert fails

    num_calls = count_calls(lambda: save(make(tmp_path / "dry"), 2), monkeypatch)
    assert num_calls > 20
    for at in range(num_calls):
        run_dir = make(tmp_path / f"run{at}")
        run_killed(lambda: save_again(run_dir, at))  # noqa: B023
        assert_whole(latest_without_warning(run_dir))
        save(run_dir, 1)
        notes = [path.read_text() for path in run_dir.glob("checkpoints/step_*/notes.txt")]
        assert notes == ["mine"], (at, steps(run_dir))
        shutil.rmtree(run_dir)


def test_full_disk_names_need_and_room_and_leaves_no_trace(tmp_path):
    import resource

    save(tmp_path, 1)
    before = steps(tmp_path)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            save(tmp_path, 2)
        except CheckpointError as error:
            os._exit(7 if "step 2" in str(error) and "GiB free" in str(error) else 8)

    assert run_killed(limited) == 7
    assert steps(tmp_path) == before
    assert_whole(latest_without_warning(tmp_path))


def test_interrupted_producer_leaves_no_trace(tmp_path):
    save(tmp_path, 1)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, [*make_files(2), ("x.safetensors", interrupted)], {})
    assert steps(tmp_path) == ["step_00000001"]
