"""Starting the ranks: joining those that a launcher has started, or launching local ones."""

import os

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.errors import PlanError
from shardwise.train.build import check
from shardwise.train.config import Config
from shardwise.train.display import Display
from shardwise.train.errors import ConfigError
from shardwise.train.local_ranks import as_rank, check_gpus, check_nproc, on_local_ranks
from shardwise.train.loop import train
from shardwise.train.ranks import Place, Ranks, find_place
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
    check_gpus(config.shard.nproc, f"shard.nproc={config.shard.nproc}")
    directory = open_run(config)
    try:
        on_local_ranks(config.shard.nproc, run_local_rank, config, directory)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was measured so far is in {directory.path}") from None
    finally:
        Console().show_cursor()  # a rank that was stopped has left its bar as it was


def run_local_rank(ranks: Ranks, config: Config, directory: RunDirectory) -> None:
    """What each of the launched ranks does."""
    train(config, ranks, _observer(ranks, directory))


def join(config: Config, place: Place, nproc: int | None) -> None:
    """Be one of the ranks that a launcher started; the first one tells what is wrong for all."""
    try:
        check_nproc(nproc, place)
        _join(config.on(place.num_ranks), place)
    except (ConfigError, PlanError):
        if place.rank == 0:
            raise
        raise SystemExit(2) from None


@record
def _join(config: Config, place: Place) -> None:
    check(config)
    with as_rank(place) as ranks:
        directory = ranks.agree(lambda: open_run(config))
        train(config, ranks, _observer(ranks, directory))


def _observer(ranks: Ranks, directory: RunDirectory) -> Observer:
    return Display(Console(), directory) if ranks.is_first else Silent()
