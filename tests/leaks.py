"""Threads and processes that a test started and did not end."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import pool_processes

# What multiprocessing starts once and keeps: for semaphores, and to fork ranks.
SERVERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
LEAVE_SECONDS = 60.0  # what a test has ended may need a moment to be gone


@contextmanager
def fail_on_leaks(leave_seconds: float = LEAVE_SECONDS) -> Iterator[None]:
    """Fail if the block leaves a process, or a thread that keeps Python from ending, behind."""
    threads, processes = _live_threads(), _live_processes()
    yield
    left = _wait_until_empty(lambda: _describe_new(threads, processes), leave_seconds)
    if left:
        pytest.fail("left behind by this test: " + ", ".join(left), pytrace=False)


def _describe_new(threads: set[threading.Thread], processes: set[int]) -> list[str]:
    new_threads = [f"thread {thread.name!r}" for thread in _live_threads() - threads]
    new_processes = _live_processes() - processes
    children = [pid for pid in new_processes if _parent_of(pid) == os.getpid() and _command_of(pid)]
    left = sorted({*children} - pool_processes())
    return new_threads + [f"process {pid}: {_command_of(pid)}" for pid in left]


def _wait_until_empty(find: Callable[[], list[str]], seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def _live_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _live_processes() -> set[int]:
    """All of this machine, where there is a /proc; elsewhere none are known.

    The kernel's list of children, /proc/self/task/*/children, may leave some out.
    """
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def _parent_of(pid: int) -> int | None:
    """None for a process that has ended."""
    _, fields = _status_of(pid)
    return int(fields[1]) if fields else None


def _command_of(pid: int) -> str:
    """Its command line: empty for one that has ended, or that serves the whole session."""
    command = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    if not command:  # it has ended, or only begins: it may have a name before a command line
        name, fields = _status_of(pid)
        command = name if fields and fields[0] not in "ZX" else ""
    return "" if any(name in command for name in SERVERS) else command


def _status_of(pid: int) -> tuple[str, list[str]]:
    """Its name, and the fields after it: the state, the parent and others; none if it is gone."""
    start, _, fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")
    return start.partition("(")[2], fields.split()


def _read(path: Path) -> str:
    """A file of a thread or process, which may end at any moment; empty if it has."""
    try:
        return path.read_text()
    except OSError:
        return ""
