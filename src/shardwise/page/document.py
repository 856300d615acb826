"""A page as one self-contained HTML file that needs no network.

Text and tables are plain HTML, so that they can be read without scripts. The script draws the
timeline, memory and charts from the columns of `columns`; its modules are data URLs.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from statistics import mean
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.page.charts import Chart
from shardwise.page.timeline import Bar, BarKind, Timeline, Track
from shardwise.recording.format import MEMORY_CATEGORIES

__all__ = ["Drawing", "document"]

_MODULES = ("charts", "data", "memory", "painter", "step", "tables", "timeline", "tracks", "view")


class Drawing:
    """The data that a page's script draws: some steps of all ranks, and charts."""

    def __init__(
        self,
        lines: Sequence[Timeline],
        steps: Iterable[int],
        charts: Sequence[Chart],
    ) -> None:
        units = lines[0].header.units
        labels = Labels([unit.label for unit in units])
        encoded = [encode_step(lines, step, labels) for step in steps]
        self.columns = "\n".join(
            f'<script type="text/plain" id="step-{number}">{step.columns}</script>'
            for number, step in enumerate(encoded)
        )
        self.index: dict[str, Any] = {
            "labels": labels.names,
            "numUnits": len(units),
            "kinds": {kind.name: kind.value for kind in BarKind},
            "tracks": [track.name.lower() for track in Track],
            "categories": MEMORY_CATEGORIES,
            "ranks": [line.header.rank for line in lines],
            "steps": [step.index for step in encoded],
            "charts": [asdict(chart) for chart in charts],
        }


def document(
    name: str,
    drawing: Drawing,
    *,
    title: str,
    facts: Iterable[str],
    sections: Mapping[str, str],
    **contents: str,
) -> str:
    """Render the page of the command ``name`` from ``name.html`` and ``name.js``.

    Args:
        name: the command.
        drawing: the data that the script draws.
        title: the page's title.
        facts: short facts shown below the title.
        sections: links at the top, as section id -> link text.
        contents: HTML for the placeholders in ``name.html``.
    """
    content = Template(_read(f"{name}.html")).substitute(step=_read("step.html"), **contents)
    links = (f'<a href="#{section}">{text}</a>' for section, text in sections.items())
    return Template(_read("shell.html")).substitute(
        title=escape(title),
        command=name,
        facts=" · ".join(escape(fact) for fact in facts),
        style=_read("page.css"),
        links="\n    ".join(links),
        content=content,
        index=_json(drawing.index),
        columns=drawing.columns,
        modules=_json({"imports": {module: _module_url(module) for module in _MODULES}}),
        script=_read(f"{name}.js"),
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _module_url(name: str) -> str:
    source = base64.b64encode(_read(f"{name}.js").encode()).decode()
    return f"data:text/javascript;base64,{source}"


def _json(value: Mapping[str, Any]) -> str:
    """Serialize to JSON that cannot close the enclosing script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


# -- columns of a step -----------------------------------------------------------------------------


_TICKS = 2**32 - 1


class Labels:
    """Numbers for the names of bars: units first, then spans in order of appearance."""

    def __init__(self, units: Sequence[str]) -> None:
        self.names = list(units)
        self._numbers: dict[str, int] = {}

    def number_of(self, bar: Bar) -> int:
        if bar.unit is not None:
            return bar.unit
        if bar.name not in self._numbers:
            self._numbers[bar.name] = len(self.names)
            self.names.append(bar.name)
        return self._numbers[bar.name]


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """One step: its entry in the page's index, and its columns."""

    index: dict[str, Any]
    columns: str  # gzip, then base64


@dataclass(frozen=True, slots=True)
class _RankColumns:
    tracks: tuple[NDArray[np.float64], ...]  # rows: began, lasted, bytes, label, kind
    memory: NDArray[np.float64]  # rows: time, unit, categories


def encode_step(lines: Sequence[Timeline], step: int, labels: Labels) -> EncodedStep:
    """Encode one complete step from the timelines of all ranks."""
    found = [_rank_columns(line, step, labels) for line in lines]
    bars = np.concatenate([track for rank in found for track in rank.tracks])
    memory = np.concatenate([rank.memory for rank in found])
    began = float(bars[:, 0].min())
    seconds = max(float((bars[:, 0] + bars[:, 1]).max()) - began, 1e-9)
    ticks = _TICKS / seconds
    columns = (
        ((bars[:, 0] - began) * ticks).astype(np.uint32),
        (bars[:, 1] * ticks).astype(np.uint32),
        bars[:, 2].astype(np.float32),
        ((memory[:, 0] - began) * ticks).clip(0, _TICKS).astype(np.uint32),
        memory[:, 2:].T.astype(np.float32),
        bars[:, 3].astype(np.uint16),
        memory[:, 1].astype(np.uint16),
        bars[:, 4].astype(np.uint8),
    )
    index = {
        "step": step,
        "seconds": seconds,
        "stepSeconds": max(line.totals(step).seconds for line in lines),
        "exposedSeconds": mean(line.totals(step).exposed_seconds or 0.0 for line in lines),
        "bars": [[len(track) for track in rank.tracks] for rank in found],
        "samples": [len(rank.memory) for rank in found],
    }
    return EncodedStep(index, _compress(b"".join(column.tobytes() for column in columns)))


def _rank_columns(line: Timeline, step: int, labels: Labels) -> _RankColumns:
    tracks: tuple[list[tuple[float, ...]], ...] = tuple([] for _ in Track)
    for bar in (*line.bars(step), *line.bars_around(step)):
        row = (bar.began, bar.ended - bar.began, bar.bytes, labels.number_of(bar), bar.kind)
        tracks[bar.track].append(row)
    samples = [
        (sample.at, sample.unit, *(getattr(sample, name) for name in MEMORY_CATEGORIES))
        for sample in line.memory(step)
    ]
    return _RankColumns(
        tuple(np.array(sorted(track), dtype=np.float64).reshape(-1, 5) for track in tracks),
        np.array(samples, dtype=np.float64).reshape(-1, 2 + len(MEMORY_CATEGORIES)),
    )


def _compress(columns: bytes) -> str:
    compressor = zlib.compressobj(1, wbits=31)  # gzip format, which browsers read
    return base64.b64encode(compressor.compress(columns) + compressor.flush()).decode()
