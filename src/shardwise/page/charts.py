"""Charts of values over a run, from metrics.jsonl and from the recording."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from shardwise.recording.attendance import changes_of_replicas
from shardwise.recording.format import RankRecording

__all__ = ["Chart", "read_charts", "read_metrics"]

MAX_POINTS = 2000  # points per line; longer runs are averaged in chunks
_CHARTS = (
    ("Loss", "", {"loss": "training", "validation_loss": "validation"}),
    ("Throughput", "tokens/s", {"tokens_per_second": "tokens/s"}),
    ("MFU", "%", {"mfu": "MFU"}),
    ("Gradient norm", "", {"grad_norm": "norm"}),
    ("Replicas", "", {"replicas": "in the step"}),
    ("Goodput", "%", {"goodput": "so far"}),
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart, or unconnected points."""

    label: str
    x: list[float]
    y: list[float]
    names: list[str] = field(default_factory=list)  # names of the points
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the steps of a run or over another quantity."""

    title: str
    unit: str  # "", "tokens/s", "%" (values are shares), "bytes" or "s"
    lines: list[Series]
    x_name: str = "step"
    x_unit: str = ""  # one of the values of `unit`
    log_x: bool = False
    limit: float | None = None  # value of x to mark
    note: str = ""  # shown instead of the last values


def read_charts(directory: Path, ranks: Sequence[RankRecording]) -> list[Chart]:
    """Make charts of the metrics that `shardwise train` logged, if any, and of step times."""
    records = list(read_metrics(directory))
    note = "; ".join(changes_of_replicas(records)[-1:])
    charts = []
    for title, unit, names in _CHARTS:
        lines = [_line(label, _points(records, name)) for name, label in names.items()]
        if lines := [line for line in lines if line.x]:
            charts.append(Chart(title, unit, lines, note=note if title == "Goodput" else ""))
    return [*charts, *_recorded(ranks)]


def read_metrics(directory: Path) -> Iterator[Mapping[str, Any]]:
    """The records of the run in ``directory`` that `shardwise train` logged, if any."""
    path = directory / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # a line that a kill truncated
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
        lines = [_line("slowest rank", slowest)]
        waits = [(step, [own[step].exposed_seconds for own in by_rank]) for step in steps]
        exposed = [(step, mean(known)) for step, all_ranks in waits if (known := _known(all_ranks))]
        lines += [_line("exposed", exposed)] if exposed else []
        yield Chart("Time of a step", "s", lines)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _line(label: str, points: Sequence[tuple[float, float]]) -> Series:
    width = -(-len(points) // MAX_POINTS) or 1
    chunks = [points[first : first + width] for first in range(0, len(points), width)]
    return Series(
        label,
        [float(chunk[-1][0]) for chunk in chunks],
        [mean(value for _, value in chunk) for chunk in chunks],
    )
