"""`shardwise train`: starts local ranks or joins a launcher's, and reports the run on rank 0."""

import json
import os
import shlex
from contextlib import ExitStack
from dataclasses import asdict

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.checkpoint.directory import latest
from shardwise.errors import ConfigError, PackageMissing, RankError
from shardwise.launch.environment import RankEnv, read_rank_env
from shardwise.launch.local import check_num_ranks, default_num_ranks, run_on_local_ranks
from shardwise.launch.world import World, join_world
from shardwise.train.build import check, plan_of_rank
from shardwise.train.config import Config, TrainConfig
from shardwise.train.data import Corpus, open_corpus
from shardwise.train.display import Display, ProgressSink, draw_losses, print_line
from shardwise.train.huggingface import HuggingFace
from shardwise.train.loop import Result, train
from shardwise.train.run_directory import RunDirectory, open_run, replace_text
from shardwise.train.sinks import JsonLines, Sink, open_trackers, read_history
from shardwise.train.source import source_of

__all__ = ["num_local_ranks", "run"]


def run(config: Config, nproc: int | None = None) -> None:
    """Train on the ranks of a launcher, or on `num_local_ranks`.

    After a signal, raise SystemExit with 128 + signal, or KeyboardInterrupt after SIGINT.
    """
    env = read_rank_env(os.environ)
    if env is None:
        launch(config.with_ranks(num_local_ranks(config, nproc)))
    else:
        join(config, env, nproc)


def num_local_ranks(config: Config, nproc: int | None) -> int:
    """``nproc``, or else ``shard.nproc`` if it is set, or else `default_num_ranks`."""
    if nproc is not None:
        return nproc
    is_set = "nproc" in config.shard.model_fields_set
    return config.shard.nproc if is_set else default_num_ranks()


def launch(config: Config) -> None:
    check(config)
    check_num_ranks(config.shard.nproc, f"shard.nproc={config.shard.nproc}")
    with ExitStack() as held:
        directory = open_run(config, is_restart=_is_restart(), held=held)
        if directory.is_finished(config.train):
            _print_finished(directory, config.train)
            return
        _launch_ranks(config, directory)


def _launch_ranks(config: Config, directory: RunDirectory) -> None:
    try:
        run_on_local_ranks(config.shard.nproc, _run_rank, config, directory)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(directory)) from None
    except SystemExit:
        print_line(Console(stderr=True), f"shardwise: stopped; {_how_to_resume(directory)}")
        raise
    except RankError as error:
        directory.check_owner()  # otherwise this is the reason
        raise RankError(f"{error}\n{_how_to_resume(directory)}") from None
    finally:
        Console().show_cursor()  # the progress bar of a killed rank leaves it hidden


@record
def join(config: Config, env: RankEnv, nproc: int | None) -> None:
    def checked() -> Config:
        env.check_nproc(nproc)
        on_ranks = config.with_ranks(env.world_size)
        _check_restarts(on_ranks)
        check(on_ranks)
        return on_ranks

    with join_world(env) as world, ExitStack() as held:  # of rank 0
        config = world.check(checked)
        directory = world.on_first(lambda: open_run(config, is_restart=_is_restart(), held=held))
        if directory.is_finished(config.train):
            if world.is_first:
                _print_finished(directory, config.train)
            return
        try:
            _run_rank(world, config, directory)
        except SystemExit:
            if world.is_first:
                print_line(Console(stderr=True), f"shardwise: stopped; {_how_to_resume(directory)}")
            raise


def _is_restart() -> bool:
    """Whether torchrun has started this job before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _check_restarts(config: Config) -> None:
    """Raise a ConfigError if each restart of a torchrun job would use a new directory."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and config.checkpoint.every and not config.run.directory:
        raise ConfigError(
            "run.directory: set it, so that a restart finds the checkpoints to resume from "
            "(or set checkpoint.every=0 to start over each time)"
        )


def _run_rank(world: World, config: Config, directory: RunDirectory) -> None:
    """Train on this rank, and report on rank 0.

    After a signal, raise SystemExit. If a local rank returned instead, it would wait for its
    launcher to read the result, and the launcher waits for the rank to exit.
    """
    if world.is_first:
        result = _train_and_report(config, world, directory)
    else:
        result = train(config, world, directory)
    if result.stopped_by:
        raise SystemExit(128 + result.stopped_by)


def _train_and_report(config: Config, world: World, directory: RunDirectory) -> Result:
    corpus = open_corpus(config)
    display = Display(Console(), config, directory, corpus)
    display.show_start(plan_of_rank(config), world.device.type)
    sinks: list[Sink] = [
        ProgressSink(display.console, config.train.steps, config.run.log_every),
        JsonLines(directory.metrics),
        *open_trackers(config, directory.path),
    ]
    try:
        result = train(config, world, directory, sinks)
    finally:
        for sink in sinks:
            sink.close()
    if result.summary is None:
        return result
    records = read_history(directory.metrics, config.train.steps)
    display.show_end(result.summary, records)
    _export(config, directory, corpus, display)
    replace_text(directory.summary, json.dumps(asdict(result.summary), indent=2) + "\n")
    title = f"{config.run.name}, {config.shard.nproc} ranks"
    try:
        draw_losses(directory.loss_plot, title, records)
    except PackageMissing as missing:
        display.print_line(str(missing))
    display.show_files()
    return result


def _export(config: Config, run: RunDirectory, corpus: Corpus, display: Display) -> None:
    """Write the best or the last checkpoint to a directory that transformers can load."""
    source = source_of(config)
    checkpoint = latest(run.saves_best_to if config.checkpoint.best else run.saves_to)
    if not config.run.export or not isinstance(source, HuggingFace):
        return
    if checkpoint is None:
        every = f"checkpoint.every={config.checkpoint.every}"
        display.print_line(f"nothing to export for transformers: {every} has saved no checkpoint")
        return
    source.export(checkpoint, run.exported, corpus.tokenizer)
    display.print_line(f"exported {checkpoint} for transformers: {run.exported}")


def _how_to_resume(directory: RunDirectory) -> str:
    """A message with the command that resumes a stopped run."""
    saved = latest(directory.saves_to)
    if saved is None:
        return f"no checkpoint was saved; the metrics so far are in {directory.path}"
    command = shlex.join(["shardwise", "train", str(directory.config)])
    return f"saved {saved}; to resume:\n{command}"


def _print_finished(directory: RunDirectory, train: TrainConfig) -> None:
    """Report a finished run. The exit status is 0, so that a job that restarts itself ends."""
    reason, key = f"has all {directory.step} steps of this run", "steps"
    if directory.step < train.steps:
        reason = f"is the end of this run, with no lower loss since step {directory.best_step}"
        key = "patience"
    print_line(
        Console(),
        f"nothing to train: {directory.checkpoint} {reason}; increase train.{key} to continue, or "
        "set run.overwrite=true to start over",
    )
