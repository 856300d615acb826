"""The directory of a run: its files, and the checkpoint from which it resumes."""

import itertools
import json
import math
import shutil
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import tree
from shardwise.checkpoint.directory import complete, discard, latest
from shardwise.checkpoint.read import read_manifest
from shardwise.checkpoint.stores import Folder, folder_at
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.claim import JOB_FILE, check_owner, claimed, is_requeued
from shardwise.train.config import Config, TrainConfig, changed_config, to_toml
from shardwise.train.data import Corpus, open_corpus
from shardwise.train.huggingface import are_same_settings
from shardwise.train.optimizer import spec_of
from shardwise.train.sinks import StepMetrics, forget_run, read_history, replace_text
from shardwise.train.source import source_of

__all__ = ["RunDirectory", "identity", "make_new_directory", "open_run", "replace_text"]

_LATER_KEYS = ("train.optimizer", "model.lora_targets")  # of `identity`; old checkpoints lack them


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of a run, and the checkpoint that it resumes from."""

    path: Path
    checkpoint: Path | str | None = None
    step: int = 0  # last step of the checkpoint
    best_step: int = 0  # the one with the lowest validation loss so far; 0 if there is none
    history: tuple[StepMetrics, ...] = ()  # metrics of the steps up to the checkpoint
    store: str = ""  # an absolute path or a URL, if the checkpoints are not in the run directory
    owner: str = ""  # the token of the job that has claimed the directory, if one has

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of the run; a run directory that contains this one is resumed."""
        return self.path / "checkpoints"

    @property
    def saves_to(self) -> Path | str:
        return self.store or self.checkpoints

    @property
    def saves_best_to(self) -> Path | str:
        """Where the checkpoint with the lowest validation loss is saved."""
        return f"{self.store.rstrip('/')}-best" if self.store else self.path / "best"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step: the fields of `StepMetrics`."""
        return self.path / "metrics.jsonl"

    @property
    def exported(self) -> Path:
        """The model in a format that transformers can load, if model.path is set."""
        return self.path / "model"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def summary(self) -> Path:
        """One JSON object: the fields of `summary.Summary`. Written last."""
        return self.path / "summary.json"

    def discard_best(self, first: str) -> None:
        """Remove the best checkpoints from the one named ``first`` on.

        A run that was killed may leave them and resume from an earlier step.
        """
        self.check_owner()
        for checkpoint in complete(folder_at(self.saves_best_to)):
            if checkpoint.name >= first:
                discard(checkpoint)

    def check_owner(self) -> None:
        """Raise a ConfigError if another job has taken the directory over."""
        if self.owner:
            check_owner(self.path, self.owner)

    def is_finished(self, train: TrainConfig) -> bool:
        """Whether all steps are trained and summarized, here or in another run directory."""
        is_summarized = self.summary.exists() or not self.history
        return is_summarized and train.is_over(self.step, self.best_step)


def open_run(
    config: Config, *, is_restart: bool = False, held: ExitStack | None = None
) -> RunDirectory:
    """Create the directory of a run and write its configuration, or resume an existing run.

    With ``is_restart``, a launcher restarted the ranks, so that existing files belong to the run,
    as they do if SLURM has queued the job again. With ``held``, no other job can use the directory
    until it ends. Raise a ConfigError if the directory cannot be used.
    """
    try:
        is_restart = is_restart or _is_requeued(config)
        path = _make_directory(config, is_restart=is_restart)
        owner, refused = "", None
        try:
            owner = "" if held is None else held.enter_context(claimed(path))
            if held is not None:
                _claim_store(path, _store_of(config), held)
        except OSError as error:  # a finished run may be in a directory that cannot be written
            refused = error
        run = RunDirectory(path, store=_store_of(config), owner=owner)
        if is_restart or not config.run.overwrite:
            run = _resume(run, config)
        if not run.is_finished(config.train):
            if refused is not None:
                raise refused
            _prepare(run, config)
    except OSError as error:
        place = error.filename or config.run.directory
        raise ConfigError(f"run.directory: {place} cannot be written: {error.strerror}") from None
    except CheckpointError as error:
        key = "checkpoint.directory" if config.checkpoint.directory else "run.directory"
        raise ConfigError(f"{key}: {error}") from None
    return run


def _is_requeued(config: Config) -> bool:
    directory = config.run.directory
    return bool(directory) and is_requeued(Path(directory).expanduser())


def _make_directory(config: Config, *, is_restart: bool) -> Path:
    if not config.run.directory:
        name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return make_new_directory(Path("runs"), name)
    path = Path(config.run.directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    is_resumed = is_restart or RunDirectory(path).checkpoints.is_dir()
    has_files = any(not file.name.startswith(JOB_FILE) for file in path.iterdir())
    if has_files and not is_resumed and not config.run.overwrite:
        raise ConfigError(
            f"run.directory={config.run.directory!r} already has files, but no checkpoints to "
            "resume from; choose another, or set run.overwrite=true"
        )
    return path


def _absolute(directory: str) -> str:
    """``checkpoint.directory`` as an absolute path, unless it is a URL or empty."""
    is_path = directory and "://" not in directory
    return str(Path(directory).expanduser().absolute()) if is_path else directory


def _store_of(config: Config) -> str:
    """Where the run saves, if not in its own directory; each replica has a folder of its own."""
    store, replicas = _absolute(config.checkpoint.directory), config.replicas
    return f"{store.rstrip('/')}/{replicas.number}" if store and replicas.lighthouse else store


def _claim_store(run: Path, store: str, held: ExitStack) -> None:
    """Keep jobs of other run directories out of the directory ``store``, if it is local."""
    if not store or "://" in store or Path(store).resolve() == run.resolve():
        return
    with suppress(OSError):  # `_check_store` reports what cannot be written
        Path(store).mkdir(parents=True, exist_ok=True)
        held.enter_context(claimed(Path(store), "checkpoint.directory"))


def _resume(run: RunDirectory, config: Config) -> RunDirectory:
    """``run`` with its last checkpoint, if it has one."""
    checkpoint = latest(run.saves_to)
    if checkpoint is None:
        return run
    step, best_step = _check_same_run(checkpoint, config)
    if step > config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}: {checkpoint} is from a later step; choose another "
            "run.directory, or set run.overwrite=true to start over"
        )
    history = read_history(run.metrics, step)
    return replace(run, checkpoint=checkpoint, step=step, best_step=best_step, history=history)


def _check_same_run(checkpoint: Path | str, config: Config) -> tuple[int, int]:
    """Return the step of a checkpoint, and the one with the lowest validation loss until then.

    A ConfigError names what differs of its model or data. The number of ranks, the strategy, the
    number of steps and the learning rate may differ. This reads only the manifest, because
    `sw.load` would need all ranks.
    """
    component = read_manifest(folder_at(checkpoint)).components.get("run")
    state: Any = component and tree.decode(component.tree, lambda _: torch.empty(0))
    match state:
        case {"step": int(step), "shared": dict(saved)}:
            best_step = state.get("best", (0, math.inf))[0]
        case _:
            raise CheckpointError(f"{checkpoint}: was not saved by `shardwise train`")
    for key, value in identity(config, open_corpus(config)).items():
        if saved.get(key) == value or (key in _LATER_KEYS and key not in saved):
            continue
        if key == "model.path" and key in saved and are_same_settings(saved[key], value):
            continue
        differs = f"{key}={value} differs from that of {checkpoint}, which has {saved.get(key)}"
        if key == "data":
            differs = f"data: the text differs from that of {checkpoint}"
        if key == "model.path":  # its value is the whole configuration of a model
            differs = f"model.path: the config.json differs from that of {checkpoint}"
        raise ConfigError(
            f"{differs}; choose another run.directory, or set run.overwrite=true to start over"
        )
    return step, best_step


def identity(config: Config, corpus: Corpus) -> dict[str, Any]:
    """The values that must not change when a run is resumed; saved in its checkpoints."""
    order = {f"train.{key}": getattr(config.train, key) for key in ("seed", "global_batch")}
    optimizer = {"train.optimizer": spec_of(config.train).path}
    return {**source_of(config).identity, **order, **optimizer, "data": corpus.digest}


def _prepare(run: RunDirectory, config: Config) -> None:
    """Remove the files that the run will write again after the step from which it resumes."""
    if config.checkpoint.every:  # first, so that a run that is killed here can be resumed
        run.checkpoints.mkdir(exist_ok=True)
    if config.checkpoint.every and run.store:
        _check_store(folder_at(run.store))
    if run.checkpoint is None:
        for place in (run.saves_to, run.saves_best_to):
            for checkpoint in complete(folder_at(place)):
                discard(checkpoint)
        forget_run(run.path)
    lines = (json.dumps(record.known()) + "\n" for record in run.history)
    replace_text(run.metrics, "".join(lines))
    for stale in (run.loss_plot, run.summary):
        stale.unlink(missing_ok=True)
    shutil.rmtree(run.path / "recording", ignore_errors=True)  # it may have files of more ranks
    for recording in run.path.glob("tensor-[0-9]*/recording"):
        shutil.rmtree(recording, ignore_errors=True)
        with suppress(OSError):  # it has files that are not of the run
            recording.parent.rmdir()
    # The written configuration resumes this run: with its directories, without run.overwrite.
    directory = config.run.directory or str(run.path.resolve())
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": directory, "overwrite": False},
        "checkpoint": {"directory": _absolute(config.checkpoint.directory)},
    }
    replace_text(run.config, to_toml(changed_config(config, changes)))


def _check_store(store: Folder) -> None:
    """Raise a ConfigError if nothing can be saved in ``checkpoint.directory``."""
    probe = f"{uuid.uuid4().hex}.probe"
    try:
        store.create(probe, b"")
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"checkpoint.directory: cannot be written: {error}") from None
    with suppress(OSError, CheckpointError):  # some stores allow no removal
        store.remove(probe)


def make_new_directory(parent: Path, name: str) -> Path:
    """Create a directory that no other process uses, even one that starts in the same second."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")
