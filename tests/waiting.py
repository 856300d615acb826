"""Waiting for what another thread does in its own time."""

import time
from collections.abc import Callable

__all__ = ["PATIENCE_SECONDS", "eventually"]

PATIENCE_SECONDS = 60.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` holds by now, or before patience ends."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return condition()
