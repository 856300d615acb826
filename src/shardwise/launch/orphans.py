"""Ends a rank whose launcher is gone, which would otherwise wait for it for ever."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

__all__ = ["end_with_launcher"]

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_POLL_SECONDS = 1.0


def end_with_launcher() -> None:
    """Kill this process, which the launcher has started, when the launcher ends or if it has ended.

    Even SIGKILL of the launcher is noticed, and a rank that waits in C++ is ended. torch asks for
    SIGINT instead, which a training run takes for a request to save, and it does not notice a
    launcher that was killed before.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        _end_if_orphaned(parent.pid)
    else:
        watch = threading.Thread(target=_watch, args=(parent.pid,), daemon=True)
        watch.start()


def _watch(launcher: int | None) -> None:
    while True:
        _end_if_orphaned(launcher)
        time.sleep(_POLL_SECONDS)


def _end_if_orphaned(launcher: int | None) -> None:
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
