"""A test that leaves something running fails, and says what."""

import subprocess
import threading

import pytest

from tests.leaks import fail_on_leaks


def test_a_thread_left_behind_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="late")
    with pytest.raises(pytest.fail.Exception, match="thread 'late'"), fail_on_leaks(0.05):
        thread.start()
    stop.set()
    thread.join()


def test_a_process_left_behind_is_named() -> None:
    processes = []
    with pytest.raises(pytest.fail.Exception, match=r"process \d+: sleep"), fail_on_leaks(0.05):
        processes.append(subprocess.Popen(["sleep", "30"]))
    processes[0].kill()
    processes[0].wait()


def test_daemons_and_what_ends_by_itself_may_stay() -> None:
    stop = threading.Event()
    with fail_on_leaks():
        threading.Thread(target=stop.wait, daemon=True).start()
        threading.Timer(0.05, stop.set).start()
