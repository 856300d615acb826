"""Starting the ranks: joining those that a launcher has started, or launching local ones."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.errors import ConfigError
from shardwise.launch.environment import RankEnv, read_rank_env
from shardwise.launch.local import check_num_ranks, run_on_local_ranks
from shardwise.launch.world import World, join_world
from shardwise.train.build import check
from shardwise.train.config import Config
from shardwise.train.display import Display
from shardwise.train.loop import train
from shardwise.train.records import Observer, Silent
from shardwise.train.run_directory import RunDirectory, open_run
from shardwise.train.stopping import exit_code

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
        SystemExit: somebody else did, by a signal, or one of its ranks.
    """
    env = read_rank_env(os.environ)
    if env is None:
        launch(config.on(config.shard.nproc if nproc is None else nproc))
    else:
        join(config, env, nproc)


def launch(config: Config) -> None:
    """Start local ranks and wait for them."""
    check(config)
    check_num_ranks(config.shard.nproc, f"shard.nproc={config.shard.nproc}")
    directory = open_run(config)
    if directory.is_finished(config.train.steps):
        tell_finished(directory)
        return
    try:
        run_on_local_ranks(config.shard.nproc, run_local_rank, config, directory)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was measured so far is in {directory.path}") from None
    finally:
        Console().show_cursor()  # a rank that was stopped has left its bar as it was


def run_local_rank(ranks: World, config: Config, directory: RunDirectory) -> None:
    """What each of the launched ranks does.

    Raises:
        SystemExit: a signal stopped it. A rank that returned would wait until its launcher, which
            waits for it to end, has read what it returned.
    """
    stopped_by = train(config, ranks, _observer(ranks, directory), directory)
    if stopped_by:
        raise SystemExit(exit_code(stopped_by))


@record
def join(config: Config, env: RankEnv, nproc: int | None) -> None:
    """Train as one of the ranks that a launcher started."""
    restarts = Restarts.of(os.environ)

    def checked() -> Config:
        env.check_nproc(nproc)
        on_all = config.on(env.world_size)
        check(on_all)
        restarts.check(on_all)
        return on_all

    with join_world(env) as ranks:
        config = ranks.check(checked)
        directory = ranks.on_first(lambda: open_run(config, again=restarts.done > 0))
        if directory.is_finished(config.train.steps):
            if ranks.is_first:
                tell_finished(directory)
            return
        stopped_by = train(config, ranks, _observer(ranks, directory), directory)
    if stopped_by:
        raise SystemExit(exit_code(stopped_by))


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often torchrun has started these ranks again, and how often it may."""

    done: int
    most: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> "Restarts":
        names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        return Restarts(*(int(environment.get(name, 0)) for name in names))

    def check(self, config: Config) -> None:
        """Refuse a run that a restart could not find again.

        Raises:
            ConfigError: it has a new directory at each start.
        """
        if self.most and config.checkpoint.every and not config.run.directory:
            raise ConfigError(
                "run.directory: set it, for a restart goes on from the checkpoints that are there "
                "(or set checkpoint.every=0 to begin each one anew)"
            )


def tell_finished(directory: RunDirectory) -> None:
    """Say that there is nothing to do, which is no error for whoever starts jobs again."""
    line = (
        f"nothing to train: {directory.checkpoint} has all {directory.step} steps of this run; "
        "raise train.steps to continue, or set run.overwrite=true to start over"
    )
    Console().print(line, soft_wrap=True, markup=False, highlight=False)


def _observer(ranks: World, directory: RunDirectory) -> Observer:
    return Display(Console(), directory) if ranks.is_first else Silent()
