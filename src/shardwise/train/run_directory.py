"""What a run leaves behind."""

import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from shardwise.train.config import Config
from shardwise.train.errors import ConfigError
from shardwise.train.records import Record, Summary
from shardwise.train.settings import to_toml

__all__ = ["RunDirectory", "claim_new", "open_run"]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run; the directory exists and the configuration is in it."""

    path: Path

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

    def write_summary(self, summary: Summary) -> None:
        fields = {name: value for name, value in vars(summary).items() if name != "ledger"}
        for name in ("rank", "process"):
            fields[name] = asdict(fields[name])
        self.summary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        summary.ledger.save(self.timeline)


class MetricsFile:
    """Writes a line a step, each flushed, so that a run that is killed leaves its steps."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8", buffering=1)

    def append(self, record: Record) -> None:
        fields = {name: value for name, value in asdict(record).items() if value is not None}
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._file.close()


def open_run(config: Config) -> RunDirectory:
    """Make the directory of a run and write the configuration into it.

    Raises:
        ConfigError: it cannot be written, or it already holds files and may not be overwritten.
    """
    try:
        run = RunDirectory(_claim(config))
        for stale in (run.metrics, run.picture, run.summary, run.timeline):
            stale.unlink(missing_ok=True)
        run.config.write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        place = error.filename or config.run.directory
        raise ConfigError(f"run.directory: {place} cannot be written: {error.strerror}") from None
    return run


def _claim(config: Config) -> Path:
    if not config.run.directory:
        return claim_new(Path("runs"), f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    path = Path(config.run.directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()) and not config.run.overwrite:
        raise ConfigError(
            f"run.directory={config.run.directory!r} already holds files; "
            "choose another, or set run.overwrite=true"
        )
    return path


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
