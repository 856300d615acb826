"""Becoming ranks: as one that a launcher has started, or by starting local ones."""

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.launch.errors import ConfigError
from shardwise.launch.failure import find_failure
from shardwise.launch.ranks import Place, Ranks, find_place, process_group
from shardwise.transport.device import num_local_gpus

__all__ = ["as_rank", "check_gpus", "check_nproc", "on_local_ranks"]

_LAUNCHER_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")

STOP_SECONDS = 600  # after a signal, for a checkpoint; a second one ends the ranks at once

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def on_local_ranks(
    num_ranks: int, function: Callable[[Ranks, *Arguments], T], *args: *Arguments
) -> list[T]:
    """Call ``function(ranks, ...)`` in ``num_ranks`` new processes; the results, by rank.

    Args:
        num_ranks: on this machine, 1 or more.
        function: of a module; it, its arguments and its results are pickled.
        args: for the function.

    Raises:
        RankError: a rank raised or died; the others were stopped.
        KeyboardInterrupt: the user stopped it.
        SystemExit: somebody else did.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as logs, _quiet_launcher():
        ranks = elastic_launch(_launch_config(num_ranks, Path(logs)), _be_local_rank)
        try:
            results = ranks(function, *args)
        except ChildFailedError as error:
            raise find_failure(error, Path(logs)) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stop.sigval) from None
    return [results[rank] for rank in range(num_ranks)]


def check_gpus(num_ranks: int, option: str) -> None:
    """Refuse more ranks than there are GPUs, where there are any.

    Raises:
        ConfigError: names the ``option`` that asked for so many.
    """
    gpus = num_local_gpus()
    if 0 < gpus < num_ranks:
        raise ConfigError(
            f"{option}: this machine has {gpus} GPU(s), and a rank needs one of its own"
        )


def check_nproc(nproc: int | None, place: Place) -> None:
    """Refuse a number of ranks other than the launcher's.

    Raises:
        ConfigError: ``nproc`` was asked for, and is another.
    """
    if nproc not in (None, place.num_ranks):
        raise ConfigError(
            f"--nproc {nproc}: this process is one of {place.num_ranks} ranks that a launcher "
            "started; leave --nproc out"
        )


@contextmanager
def as_rank(place: Place) -> Iterator[Ranks]:
    """Be one of the ranks that a launcher started."""
    _share_cores(place)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))  # SLURM has a name of its own
    with process_group(place) as ranks:
        yield ranks


def _be_local_rank(function: Callable[..., T], *args: object) -> T:
    """One of the launched ranks; torch's launcher calls it in a process of its own."""
    # The launcher stops ranks. Python's handler would only run once a wait in Gloo is over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place = find_place(os.environ)
    assert place is not None
    with as_rank(place) as ranks:
        return function(ranks, *args)


def _share_cores(place: Place) -> None:
    """Give each local rank its part of the cores, unless OMP_NUM_THREADS has decided."""
    if place.num_local_ranks and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.num_local_ranks))


def _launch_config(num_ranks: int, logs: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        run_id="shardwise",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",  # the machine's own name may not resolve
        max_restarts=0,
        shutdown_timeout=STOP_SECONDS,
    )


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep torch's launcher from logging what we tell ourselves, and from keeping our signals."""
    loggers = [logging.getLogger(name) for name in _LAUNCHER_LOGGERS]
    silence = logging.NullHandler()
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    in_main_thread = threading.current_thread() is threading.main_thread()
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {stop: signal.getsignal(stop) for stop in stops}
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, propagated, strict=True):
            logger.propagate = propagates
            logger.removeHandler(silence)
        if in_main_thread:
            for stop, handler in handlers.items():
                signal.signal(stop, handler)
