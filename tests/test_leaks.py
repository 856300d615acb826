"""A test that leaves something running fails, and says what."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.leaks import fail_on_leaks


def test_a_thread_left_behind_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="late")
    with pytest.raises(pytest.fail.Exception, match="thread 'late'"), fail_on_leaks(0.05):
        thread.start()
    stop.set()
    thread.join()


def start_sleep() -> subprocess.Popen[bytes]:
    """Start a process, and wait until it has a command line: at first, it has none."""
    process = subprocess.Popen(["sleep", "30"])
    while not Path(f"/proc/{process.pid}/cmdline").read_text():
        time.sleep(0.01)
    return process


def test_a_process_left_behind_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match="sleep 30"), fail_on_leaks(0.05):
        process = start_sleep()
    process.kill()
    process.wait()


def test_a_process_without_a_command_line_yet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    read = leaks._read
    monkeypatch.setattr(leaks, "_read", lambda at: "" if at.name == "cmdline" else read(at))
    with pytest.raises(pytest.fail.Exception, match=r"process \d+: sleep"), fail_on_leaks(0.05):
        process = subprocess.Popen(["sleep", "30"])
    process.kill()
    process.wait()


def test_daemons_and_what_ends_by_itself_may_stay() -> None:
    stop = threading.Event()
    with fail_on_leaks():
        threading.Thread(target=stop.wait, daemon=True).start()
        threading.Timer(0.05, stop.set).start()
