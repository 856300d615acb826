"""Starting the ranks: joining those that a launcher has started, or launching local ones."""

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import PlanError
from shardwise.runtime.device import num_local_gpus
from shardwise.train.build import check
from shardwise.train.config import Config
from shardwise.train.display import Display
from shardwise.train.errors import ConfigError
from shardwise.train.failure import find_failure
from shardwise.train.loop import train
from shardwise.train.ranks import Place, Ranks, find_place, process_group
from shardwise.train.records import Observer, Silent
from shardwise.train.run_directory import RunDirectory, open_run

__all__ = ["run"]


def run(config: Config, nproc: int | None = None) -> None:
    """Train as ``config`` says, on the ranks of the launcher or on local ones.

    Args:
        config: what to train.
        nproc: the number of ranks that was asked for on top of it.

    Raises:
        ConfigError: the run cannot begin; nothing has been started.
        RankError: a rank that was started here failed.
        KeyboardInterrupt: the user stopped it.
    """
    place = find_place(os.environ)
    if place is None:
        launch(config.on(config.shard.nproc if nproc is None else nproc))
    else:
        join(config, place, nproc)


def launch(config: Config) -> None:
    """Start local ranks and wait for them."""
    check(config)
    _check_gpus(config.shard.nproc)
    directory = open_run(config)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as logs, _quiet_launcher():
        ranks = elastic_launch(_launch_config(config.shard.nproc, Path(logs)), run_local_rank)
        try:
            ranks(config, directory)
        except ChildFailedError as error:
            raise find_failure(error, Path(logs)) from None
        except SignalException as stop:
            raise _as_exit(stop, directory) from None
        finally:
            Console().show_cursor()  # a rank that was stopped has left its bar as it was


def run_local_rank(config: Config, directory: RunDirectory) -> None:
    """One of the launched ranks; torch's launcher calls it in a process of its own."""
    # The launcher stops ranks. Python's handler would only run once a wait in Gloo is over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place = find_place(os.environ)
    assert place is not None
    share_cores(place)
    with process_group(place) as ranks:
        train(config, ranks, _observer(ranks, directory))


def join(config: Config, place: Place, nproc: int | None) -> None:
    """Be one of the ranks that a launcher started; the first one tells what is wrong for all."""
    try:
        _check_nproc(nproc, place)
        _join(config.on(place.num_ranks), place)
    except (ConfigError, PlanError):
        if place.rank == 0:
            raise
        raise SystemExit(2) from None


def _check_gpus(nproc: int) -> None:
    gpus = num_local_gpus()
    if 0 < gpus < nproc:
        raise ConfigError(
            f"shard.nproc={nproc}: this machine has {gpus} GPU(s), and a rank needs one of its own"
        )


def _check_nproc(nproc: int | None, place: Place) -> None:
    if nproc not in (None, place.num_ranks):
        raise ConfigError(
            f"--nproc {nproc}: this process is one of {place.num_ranks} ranks that a launcher "
            "started; leave --nproc out"
        )


@record
def _join(config: Config, place: Place) -> None:
    check(config)
    share_cores(place)
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))  # SLURM has a name of its own
    with process_group(place) as ranks:
        directory = ranks.agree(lambda: open_run(config))
        train(config, ranks, _observer(ranks, directory))


def share_cores(place: Place) -> None:
    """Give each local rank its part of the cores, unless OMP_NUM_THREADS has decided."""
    if place.num_local_ranks and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.num_local_ranks))


def _observer(ranks: Ranks, directory: RunDirectory) -> Observer:
    return Display(Console(), directory) if ranks.is_first else Silent()


def _launch_config(nproc: int, logs: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        run_id="shardwise",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",  # the machine's own name may not resolve
        max_restarts=0,
    )


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep torch's launcher from logging what we tell ourselves, and from keeping our signals."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(silence := logging.NullHandler())
    propagates, logger.propagate = logger.propagate, False
    in_main_thread = threading.current_thread() is threading.main_thread()
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {stop: signal.getsignal(stop) for stop in stops}
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(silence)
        if in_main_thread:
            for stop, handler in handlers.items():
                signal.signal(stop, handler)


def _as_exit(stop: SignalException, directory: RunDirectory) -> BaseException:
    if stop.sigval == signal.SIGINT:
        return KeyboardInterrupt(f"what was measured so far is in {directory.path}")
    return SystemExit(128 + stop.sigval)
