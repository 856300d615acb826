"""Access to what watches the ranks."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from shardwise.comm.communicator import Communicator, parts
from shardwise.watch.monitor import Monitor, Patience
from shardwise.watch.ranks import RankWatch


def watch_of(comm: Communicator) -> RankWatch:
    """Return what watches the ranks of ``comm``."""
    assert isinstance(comm.watch, RankWatch)
    return comm.watch


def monitor_of(comm: Communicator) -> Monitor:
    """Return what reads the heartbeats and reports of other ranks, which nobody else sees."""
    monitor = watch_of(comm)._monitor
    assert monitor is not None
    return monitor


def is_silent(comm: Communicator) -> bool:
    """Whether a rank of ``comm`` gives no sign of life."""
    return bool(monitor_of(comm)._silence())


def error_of(comm: Communicator) -> BaseException | None:
    """Return the error that the next use of ``comm`` raises."""
    return watch_of(comm)._error


def watch_with(patience: Patience) -> AbstractContextManager[Any]:
    """Have the ranks of communicators that are made meanwhile wait so long."""
    return mock.patch.object(parts, "new_watch", partial(RankWatch, patience=patience))


@contextmanager
def quick_to_lose(comm: Communicator) -> Iterator[None]:
    """Have this rank lose the next one after two seconds without a sign of life.

    Begin it when that rank has stopped or died: a busy machine may hold up any process as long.
    """
    monitor = monitor_of(comm)
    patience = replace(monitor._patience, silent_seconds=2.0)
    with mock.patch.object(monitor, "_patience", patience):
        yield


def without_frames() -> AbstractContextManager[Any]:
    """Have heartbeats read no frames: while one does, the variables of a frame stay alive."""
    return mock.patch.object(sys, "_current_frames", dict)
