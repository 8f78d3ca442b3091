import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.errors import RunLockedError
from lazytrain.locking import LOCK_FILE, RunLock

HOLDER = """
import sys
from pathlib import Path
from lazytrain.locking import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_process_is_refused_and_names_the_first(tmp_path, holder):
    with pytest.raises(RunLockedError, match=f"in use by process {holder.pid} on .*, started 20.*(-c)") as caught:
        RunLock(tmp_path).__enter__()
    assert str(tmp_path) in str(caught.value)


def test_lock_left_by_kill_is_taken_over(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert f'"pid": {holder.pid}' in (tmp_path / LOCK_FILE).read_text()
    with RunLock(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()


def test_lock_is_free_after_use_and_makes_its_directory(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path / "a/b"):
            with pytest.raises(RunLockedError, match=f"process {os.getpid()}"):
                RunLock(tmp_path / "a/b").__enter__()


def test_unreadable_note_still_refuses(tmp_path):
    with RunLock(tmp_path):
        for content in (b"", b"\xff\xfe", b"[]", b'{"pid": 1}', b"[" * 1000):
            (tmp_path / LOCK_FILE).write_bytes(content)
            with pytest.raises(RunLockedError, match="in use by another process"):
                RunLock(tmp_path).__enter__()


def test_forked_child_does_not_hold_the_lock_on(tmp_path):
    lock = RunLock(tmp_path)
    lock.__enter__()
    (started, has_started), (ending, ends) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(has_started, b"x")
        os.read(ending, 1)
        os._exit(0)
    os.read(started, 1)
    with pytest.raises(RunLockedError):
        RunLock(tmp_path).__enter__()
    os.close(lock._fd)  # as when this process is killed, which unlocks nothing explicitly
    with RunLock(tmp_path):
        pass
    os.write(ends, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (started, has_started, ending, ends):
        os.close(fd)


def test_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunLockedError, match="can't be made"):
        RunLock(tmp_path / "file").__enter__()
