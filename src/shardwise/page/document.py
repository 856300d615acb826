"""A page as one self-contained HTML file that needs no network.

Text and tables are plain HTML, so that they can be read without scripts. The script draws the
timeline, memory and charts from the columns of `columns`; its modules are data URLs.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from shardwise.page.charts import Chart
from shardwise.page.columns import Labels, encode_step
from shardwise.page.timeline import BarKind, Timeline, Track
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
