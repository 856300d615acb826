"""Starts local ranks with torch's elastic launcher, and finds the one that failed first."""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import ConfigError, RankError
from shardwise.launch.environment import read_rank_env
from shardwise.launch.stop_signal import STOP_SIGNALS
from shardwise.launch.world import World, join_world
from shardwise.local_devices import num_local_accelerators

__all__ = [
    "check_num_ranks",
    "default_num_ranks",
    "end_with_launcher",
    "first_failure",
    "run_on_local_ranks",
]

_LAUNCHER_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")

_RANKS_ON_CPU = 2

# Signals that the launcher passes on to ranks. Others would end it, and with it the ranks.
_FORWARDED = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
# Time for a checkpoint after a signal; a second signal kills the ranks at once.
STOP_SECONDS = 600
# torch 2.11 has no such option; it waits for 30 s.
_HAS_SHUTDOWN = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
_SHUTDOWN: dict[str, Any] = {"shutdown_timeout": STOP_SECONDS} if _HAS_SHUTDOWN else {}

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def run_on_local_ranks(
    num_ranks: int, function: Callable[[World, *Arguments], T], *args: *Arguments
) -> list[T]:
    """Call ``function(world, *args)`` in ``num_ranks`` new processes; return the results by rank.

    The function, its arguments and its results are pickled. Raise a RankError if a rank raised or
    died, KeyboardInterrupt after SIGINT, and SystemExit after another signal.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as logs, _quiet_launcher():
        launch = elastic_launch(_launch_config(num_ranks, Path(logs)), _run_rank)
        try:
            results = launch(function, *args)
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            if code - 128 in STOP_SIGNALS:  # a rank got the signal, and all have stopped
                raise SystemExit(code) from None
            raise first_failure(error, Path(logs)) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
    return [results[rank] for rank in range(num_ranks)]


def default_num_ranks() -> int:
    """Return the number of ranks of a command that names none: one for each GPU, or 2 on CPUs."""
    return num_local_accelerators() or _RANKS_ON_CPU


def check_num_ranks(num_ranks: int, option: str) -> None:
    """Raise a ConfigError, which names ``option``, if this machine cannot start that many ranks."""
    if num_ranks < 1:
        raise ConfigError(f"{option}: expected 1 or more ranks")
    count = num_local_accelerators()
    if 0 < count < num_ranks:
        raise ConfigError(f"{option}: this machine has {count} GPU(s), and each rank needs its own")


def _run_rank(function: Callable[..., T], *args: object) -> T:
    """The entry point of a rank; the launcher calls it in a new process."""
    end_with_launcher()
    # The launcher stops ranks. Python's handler would only run after a wait in Gloo has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    env = read_rank_env(os.environ)
    assert env is not None
    with join_world(env) as world:
        return function(world, *args)


def _launch_config(num_ranks: int, logs: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        run_id="shardwise",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",  # the host name may not resolve
        max_restarts=0,
        signals_to_handle=",".join(one.name for one in _FORWARDED),
        **_SHUTDOWN,
    )


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's logs, which repeat our messages, and restore our signal handlers."""
    loggers = [logging.getLogger(name) for name in _LAUNCHER_LOGGERS]
    silence = logging.NullHandler()
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {stop: signal.getsignal(stop) for stop in _FORWARDED}
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, propagated, strict=True):
            logger.propagate = propagates
            logger.removeHandler(silence)
        if in_main_thread:
            for stop, handler in handlers.items():
                signal.signal(stop, handler)


def first_failure(error: ChildFailedError, logs: Path) -> RankError:
    """The error of the rank that failed first, from the files <logs>/.../<rank>/error.json.

    The launcher reports the rank whose exit it saw first. This may be a different rank, because
    every rank that waits for a failed rank fails too. The order is given by the modification times
    of the files that ranks write when they raise.
    """
    files = sorted(logs.glob("**/error.json"), key=lambda file: file.stat().st_mtime_ns)
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankError(f"rank {rank} was killed by {name} (pid {failure.pid})")
    if not files:
        return RankError(f"rank {rank} exited with code {failure.exitcode} and no traceback")
    message = json.loads(files[0].read_text(encoding="utf-8"))["message"]
    traceback = message["extraInfo"]["py_callstack"].rstrip()
    return RankError(f"rank {files[0].parent.name} failed:\n{traceback}")


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
