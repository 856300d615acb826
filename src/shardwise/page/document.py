"""A page as one self-contained HTML file that needs no network.

Text and tables are plain HTML, so that they can be read without scripts. The script draws the
timeline, memory and charts from the columns of `_encode_step`; its modules are data URLs.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
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
        self, lines: Sequence[Timeline], steps: Iterable[int], charts: Sequence[Chart]
    ) -> None:
        units = lines[0].header.units
        labels = Labels([unit.label for unit in units])
        encoded = [_encode_step(lines, step, labels) for step in steps]
        self.columns = "\n".join(
            f'<script type="text/plain" id="step-{number}">{columns}</script>'
            for number, (_, columns) in enumerate(encoded)
        )
        self.index: dict[str, Any] = {
            "labels": labels.names,
            "numUnits": len(units),
            "kinds": {kind.name: kind.value for kind in BarKind},
            "tracks": [track.name.lower() for track in Track],
            "categories": MEMORY_CATEGORIES,
            "ranks": [line.header.rank for line in lines],
            "steps": [index for index, _ in encoded],
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

    ``facts`` are shown below the title, and ``sections`` (id -> text) as links at the top.
    ``contents`` are HTML for the placeholders in ``name.html``.
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


def _encode_step(
    lines: Sequence[Timeline], step: int, labels: Labels
) -> tuple[dict[str, Any], str]:
    """A complete step: its entry in the page's index, and the columns of all ranks.

    They are compressed by gzip, and then base64.
    """
    found = [_rank_columns(line, step, labels) for line in lines]
    bars = np.concatenate([track for tracks, _ in found for track in tracks])
    memory = np.concatenate([samples for _, samples in found])
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
        "bars": [[len(track) for track in tracks] for tracks, _ in found],
        "samples": [len(samples) for _, samples in found],
    }
    compressor = zlib.compressobj(1, wbits=31)  # gzip format, which browsers read
    compressed = compressor.compress(b"".join(column.tobytes() for column in columns))
    return index, base64.b64encode(compressed + compressor.flush()).decode()


def _rank_columns(
    line: Timeline, step: int, labels: Labels
) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """Bars (began, lasted, bytes, label, kind) by track, and samples (time, unit, categories)."""
    tracks: tuple[list[tuple[float, ...]], ...] = tuple([] for _ in Track)
    for bar in (*line.bars(step), *line.bars_around(step)):
        row = (bar.began, bar.ended - bar.began, bar.bytes, labels.number_of(bar), bar.kind)
        tracks[bar.track].append(row)
    samples = [
        (sample.at, sample.unit, *(getattr(sample, name) for name in MEMORY_CATEGORIES))
        for sample in line.memory(step)
    ]
    return (
        [np.array(sorted(track), dtype=np.float64).reshape(-1, 5) for track in tracks],
        np.array(samples, dtype=np.float64).reshape(-1, 2 + len(MEMORY_CATEGORIES)),
    )
