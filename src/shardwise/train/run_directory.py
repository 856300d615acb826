"""What a run leaves behind, and what it goes on from when it is started again."""

import contextlib
import itertools
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from shardwise.checkpoint.directory import complete, discard, latest
from shardwise.checkpoint.remote import folder_at
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.config import Config
from shardwise.train.records import Record, Summary
from shardwise.train.saving import check_same, step_of
from shardwise.train.settings import to_toml

__all__ = ["RunDirectory", "claim_new", "open_run"]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run; the directory exists and the configuration is in it."""

    path: Path
    checkpoint: Path | str | None = None  # what the run goes on from
    step: int = 0  # the last one in it
    store: str = ""  # where checkpoints are, if not here

    @property
    def checkpoints(self) -> Path:
        """Where there is such a directory, a run goes on when it is started again."""
        return self.path / "checkpoints"

    @property
    def saves_to(self) -> Path | str:
        return self.store or self.checkpoints

    def is_finished(self, steps: int) -> bool:
        """Whether nothing is left to do: all ``steps`` are trained, and the summary is written.

        A directory without metrics trained none of these steps, so it has nothing to summarize.
        """
        return self.step == steps and (self.summary.exists() or not self.history())

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step: the fields of `Record`."""
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def summary(self) -> Path:
        """One JSON object: the fields of `Summary`, the ledger aside."""
        return self.path / "summary.json"

    @property
    def timeline(self) -> Path:
        """The first rank's ledger, for chrome://tracing or ui.perfetto.dev."""
        return self.path / "timeline.json"

    def history(self) -> list[Record]:
        """The steps that are in the checkpoint, as far as their lines are there."""
        if not self.step or not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError):  # the machine went down while it was written
                continue
            if record.step <= self.step:
                records.append(record)
        return records

    def write_summary(self, summary: Summary) -> None:
        fields = {name: value for name, value in vars(summary).items() if name != "ledger"}
        for name in ("rank", "process"):
            fields[name] = asdict(fields[name])
        with contextlib.suppress(IndexError):  # a run that went on from its end has made no step
            summary.ledger.save(self.timeline)
        _write(self.summary, json.dumps(fields, indent=2) + "\n")


class MetricsFile:
    """Writes a line a step, each flushed, so that a run that is killed leaves its steps."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def append(self, record: Record) -> None:
        self._file.write(_line(record))

    def close(self) -> None:
        self._file.close()


def open_run(config: Config, *, again: bool = False) -> RunDirectory:
    """Make the directory of a run and write the configuration into it, or go on with one.

    Args:
        config: what to train.
        again: a launcher starts the ranks anew, so the directory is this run's own.

    Raises:
        ConfigError: it cannot be written, or it holds other files and may not be overwritten, or
            its checkpoints are those of another model or of other text.
    """
    try:
        path = _claim(config, again=again)
        run = RunDirectory(path, store=config.checkpoint.directory)
        if again or not config.run.overwrite:
            run = _go_on(run, config)
        if run.is_finished(config.train.steps):
            return run
        if config.checkpoint.every:  # first of all, for whoever is killed here goes on, too
            run.checkpoints.mkdir(exist_ok=True)
        _clear(run)
        _write(run.config, to_toml(_named(config, run)))
    except OSError as error:
        place = error.filename or config.run.directory
        raise ConfigError(f"run.directory: {place} cannot be written: {error.strerror}") from None
    except CheckpointError as error:
        raise ConfigError(f"run.directory: {error}") from None
    return run


def _claim(config: Config, *, again: bool) -> Path:
    if not config.run.directory:
        return claim_new(Path("runs"), f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    path = Path(config.run.directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    goes_on = again or RunDirectory(path).checkpoints.is_dir()
    if any(path.iterdir()) and not goes_on and not config.run.overwrite:
        raise ConfigError(
            f"run.directory={config.run.directory!r} already holds files, and no checkpoints to go "
            "on from; choose another, or set run.overwrite=true"
        )
    return path


def _go_on(run: RunDirectory, config: Config) -> RunDirectory:
    """``run``, which begins at its last checkpoint if it has one."""
    checkpoint = latest(run.saves_to)
    if checkpoint is None:
        return run
    check_same(checkpoint, config)
    run = replace(run, checkpoint=checkpoint, step=step_of(checkpoint))
    if run.step > config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}: {checkpoint} is beyond it; choose another "
            "run.directory, or set run.overwrite=true to begin anew"
        )
    return run


def _clear(run: RunDirectory) -> None:
    """Remove what the run is about to write, up to the step that it goes on from."""
    if run.checkpoint is None:
        for checkpoint in complete(folder_at(run.saves_to)):
            discard(checkpoint)
    _write(run.metrics, "".join(map(_line, run.history())))
    for stale in (run.picture, run.summary, run.timeline):
        stale.unlink(missing_ok=True)


def _named(config: Config, run: RunDirectory) -> Config:
    """The configuration that resumes ``run``: its directory, and no permission to overwrite it."""
    directory = config.run.directory or str(run.path.resolve())
    resumed = config.run.model_copy(update={"directory": directory, "overwrite": False})
    return config.model_copy(update={"run": resumed})


def _write(path: Path, text: str) -> None:
    """Write all of it, or nothing if the process is killed."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _line(record: Record) -> str:
    fields = {name: value for name, value in asdict(record).items() if value is not None}
    return json.dumps(fields) + "\n"


def claim_new(parent: Path, name: str) -> Path:
    """A directory that no other run has, even one that starts in the same second."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("counting does not end")
