"""The page of `shardwise report`: one HTML file that needs nothing else, and no network.

Words and tables are written here, so that they can be read without a script. The script draws the
timeline, memory and the run from the columns of `columns`; its modules are data URLs.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from shardwise.diagnose.bars import BarKind, Timeline, Track
from shardwise.diagnose.page.columns import CATEGORIES, Labels, encode_step
from shardwise.diagnose.page.metrics import Chart
from shardwise.diagnose.page.tables import findings_section, ranks_table, tiles, units_table
from shardwise.diagnose.recording import RankRecording
from shardwise.diagnose.summary import Finding, Summary

__all__ = ["render"]

MAX_STEPS = 60  # whose timelines are in the page; means are over all
MAX_FACT = 40  # characters of what the header shows of a recording's info
_MODULES = ("charts", "data", "memory", "painter", "tables", "timeline", "tracks", "view")


def render(
    title: str,
    ranks: Sequence[RankRecording],
    summary: Summary,
    findings: Sequence[Finding],
    charts: Sequence[Chart],
) -> str:
    """The page as text.

    Args:
        title: of the run.
        ranks: its recording.
        summary: of that.
        findings: the most costly one first.
        charts: what changed over the run.
    """
    header = ranks[0].header
    labels = Labels([unit.label for unit in header.units])
    lines = [Timeline(rank) for rank in ranks]
    steps = [encode_step(lines, step, labels) for step in _drawn_steps(summary.steps, lines)]
    index = {
        "labels": labels.names,
        "numUnits": len(header.units),
        "kinds": {kind.name: kind.value for kind in BarKind},
        "tracks": [track.name.lower() for track in Track],
        "categories": CATEGORIES,
        "ranks": [rank.header.rank for rank in ranks],
        "steps": [step.index for step in steps],
        "charts": [chart.as_json() for chart in charts],
    }
    facts = [
        f"{header.world_size} ranks",
        header.device,
        f"strategy {header.strategy}",
        f"prefetch {header.prefetch}",
        *(
            f"{name.replace('_', ' ')} {value}"
            for name, value in header.info.items()
            if _is_short(value)
        ),
    ]
    return Template(_read("report.html")).substitute(
        title=escape(title),
        facts=" · ".join(escape(fact) for fact in facts),
        style=_read("report.css"),
        tiles=tiles(summary, header),
        findings=findings_section(findings, summary),
        units=units_table(summary),
        ranks=ranks_table(summary),
        index=_json(index),
        columns="\n".join(
            f'<script type="text/plain" id="step-{number}">{step.columns}</script>'
            for number, step in enumerate(steps)
        ),
        modules=_json({"imports": {name: _module_url(name) for name in _MODULES}}),
        main=_read("main.js"),
    )


def _drawn_steps(steps: Sequence[int], lines: Sequence[Timeline]) -> Sequence[int]:
    """All, or of a long run some that are evenly spaced, and the slowest."""
    if len(steps) <= MAX_STEPS:
        return steps
    num_slowest = MAX_STEPS // 5
    by_time = sorted(steps, key=lambda step: max(line.totals(step).seconds for line in lines))
    spacing = len(steps) / (MAX_STEPS - num_slowest)
    spaced = {steps[int(number * spacing)] for number in range(MAX_STEPS - num_slowest)}
    return sorted(spaced | set(by_time[-num_slowest:]))


def _is_short(value: object) -> bool:
    return isinstance(value, str | int | float) and len(str(value)) <= MAX_FACT


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _module_url(name: str) -> str:
    source = base64.b64encode(_read(f"{name}.js").encode()).decode()
    return f"data:text/javascript;base64,{source}"


def _json(value: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element that it is in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
