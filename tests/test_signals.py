import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lazytrain.signals import GracefulStop

ROOT = Path(__file__).resolve().parents[1]
CODES = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]

# Steps until the flag is set, then says that it saves and leaves with the exit code.
LOOP = """
import sys, time
from lazytrain.signals import GracefulStop
with GracefulStop(lambda: 42.4) as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saved", flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
sys.exit(stop.exit_code)
"""
# Inside compiled code that never comes back to Python: the second lock of one mutex.
COMPILED = """
import ctypes, sys
from lazytrain.signals import GracefulStop
with GracefulStop() as stop:
    print("ready", flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
AT_ONCE = """
import time
from lazytrain.signals import GracefulStop
with GracefulStop() as stop:
    with stop.at_once():
        try:
            print("ready", flush=True)
            while True:
                time.sleep(0.01)
        finally:
            print("cleaned", flush=True)
"""


def start(code, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), CODES)
def test_first_signal_saves_and_exits_with_its_code(number, code):
    process = start(LOOP)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == "saved\n"
    assert err.count(signal.Signals(number).name) == 1
    assert "within about 42 s" in err


@pytest.mark.parametrize(("number", "code"), CODES)
def test_second_signal_exits_at_once(number, code):
    process = start(LOOP, "wait")
    process.send_signal(number)
    assert process.stdout.readline() == "saved\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code


def test_second_signal_exits_from_inside_compiled_code():
    process = start(COMPILED)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: stopping" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 143


@pytest.mark.parametrize(("number", "code"), CODES)
def test_phase_with_nothing_to_save_exits_cleanly_at_once(number, code):
    process = start(AT_ONCE)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == "cleaned\n"
    assert "nothing to save" in err
    assert "Traceback" not in err


def test_flag_is_set_at_once_and_old_handlers_come_back(capfd):
    before = [signal.getsignal(number) for number, _ in CODES]
    with GracefulStop() as stop:
        assert (stop.requested, stop.exit_code) == (False, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.requested, stop.exit_code) == (True, 143)
        with pytest.raises(SystemExit, match="143"):
            with stop.at_once():
                pytest.fail("the phase must not start")
    assert [signal.getsignal(number) for number, _ in CODES] == before
    assert signal.set_wakeup_fd(-1) == -1
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "A second signal exits at once" in lines[0]


def test_outside_the_main_thread_nothing_happens():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with GracefulStop() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_signals_of_forked_workers_do_not_count():
    with GracefulStop() as stop:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert not stop.requested
