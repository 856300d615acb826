"""What changed over a run: the lines of its charts, from metrics.jsonl and from the recording."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from shardwise.diagnose.recording import RankRecording

__all__ = ["Chart", "read_charts"]

MAX_POINTS = 2000  # of a line; those of longer runs are means
_CHARTS = (
    ("Loss", "", {"loss": "training", "validation_loss": "validation"}),
    ("Throughput", "tokens/s", {"tokens_per_second": "tokens/s"}),
    ("MFU", "%", {"mfu": "MFU"}),
    ("Gradient norm", "", {"grad_norm": "norm"}),
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart, or points that are not joined."""

    label: str
    x: list[float]
    y: list[float]
    names: list[str] = field(default_factory=list)  # of the points
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the steps of a run, or over something else."""

    title: str
    unit: str  # "", "tokens/s", "%" of a share, "bytes" or "s"
    lines: list[Series]
    x_name: str = "step"
    x_unit: str = ""  # as `unit`
    log_x: bool = False
    limit: float | None = None  # a value of x that is marked
    note: str = ""  # instead of the last values

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_charts(directory: Path, ranks: Sequence[RankRecording]) -> list[Chart]:
    """Charts of what `shardwise train` logged, if it did, and of the times of steps."""
    records = list(_read_metrics(directory / "metrics.jsonl"))
    charts = []
    for title, unit, names in _CHARTS:
        lines = [_line(label, _points(records, name)) for name, label in names.items()]
        if lines := [line for line in lines if line.x]:
            charts.append(Chart(title, unit, lines))
    return [*charts, *_recorded(ranks)]


def _read_metrics(path: Path) -> Iterable[Mapping[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a kill cut it short
            continue
        if isinstance(record, dict) and "step" in record:
            yield record


def _points(records: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [(r["step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _recorded(ranks: Sequence[RankRecording]) -> Iterable[Chart]:
    complete = set.intersection(*({step.step for step in rank.steps} for rank in ranks))
    by_rank = [{s.step: s for s in rank.steps if s.step in complete} for rank in ranks]
    steps = sorted(complete)
    if len(steps) > 1:
        slowest = [(step, max(own[step].seconds for own in by_rank)) for step in steps]
        exposed = [(step, mean(own[step].exposed_seconds for own in by_rank)) for step in steps]
        lines = [_line("slowest rank", slowest), _line("exposed", exposed)]
        yield Chart("Time of a step", "s", lines)


def _line(label: str, points: Sequence[tuple[float, float]]) -> Series:
    width = -(-len(points) // MAX_POINTS) or 1
    chunks = [points[first : first + width] for first in range(0, len(points), width)]
    return Series(
        label,
        [float(chunk[-1][0]) for chunk in chunks],
        [mean(value for _, value in chunk) for chunk in chunks],
    )
