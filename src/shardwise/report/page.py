"""The page of `shardwise report`."""

from collections.abc import Sequence

from shardwise.page.charts import Chart
from shardwise.page.document import Drawing, document
from shardwise.page.timeline import Timeline
from shardwise.plan.spelling import counted
from shardwise.recording.format import RankRecording
from shardwise.report.findings import Finding
from shardwise.report.sections import findings_section, ranks_table, tiles, units_table
from shardwise.report.summary import Summary

__all__ = ["render"]

MAX_STEPS = 60  # steps whose timelines the page contains; means are over all steps
MAX_FACT = 40  # characters of a value in the recording's info that the header shows


def render(
    title: str,
    ranks: Sequence[RankRecording],
    summary: Summary,
    findings: Sequence[Finding],
    charts: Sequence[Chart],
) -> str:
    """Render the page as HTML; ``charts`` are values over the steps of the run."""
    header = ranks[0].header
    lines = [Timeline(rank) for rank in ranks]
    shown = {"findings": bool(findings), "run": bool(charts)}
    return document(
        "report",
        Drawing(lines, _drawn_steps(summary.steps, lines), charts),
        title=title,
        facts=[
            counted(header.world_size, "rank"),
            header.device,
            f"strategy {header.strategy}",
            f"prefetch {header.prefetch}",
            *(
                f"{name.replace('_', ' ')} {value}"
                for name, value in header.info.items()
                if isinstance(value, str | int | float) and len(str(value)) <= MAX_FACT
            ),
        ],
        sections={
            section: section.capitalize()
            for section in ("findings", "timeline", "memory", "units", "ranks", "run")
            if shown.get(section, True)
        },
        tiles=tiles(summary, header),
        findings=findings_section(findings, summary),
        units=units_table(summary),
        ranks=ranks_table(summary),
    )


def _drawn_steps(steps: Sequence[int], lines: Sequence[Timeline]) -> Sequence[int]:
    """Return all steps or, for a long run, evenly spaced steps and the slowest ones."""
    if len(steps) <= MAX_STEPS:
        return steps
    num_slowest = MAX_STEPS // 5
    by_time = sorted(steps, key=lambda step: max(line.totals(step).seconds for line in lines))
    spacing = len(steps) / (MAX_STEPS - num_slowest)
    spaced = {steps[int(number * spacing)] for number in range(MAX_STEPS - num_slowest)}
    return sorted(spaced | set(by_time[-num_slowest:]))
