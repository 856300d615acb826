"""`shardwise report`: the page and the tables of one run."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardwise.diagnose import page, terminal
from shardwise.diagnose.page.metrics import read_charts
from shardwise.diagnose.recording import RecordingError, read_recording
from shardwise.diagnose.summary import Finding, summarize

__all__ = ["report"]


def report(
    directory: Path, output: Path | None, console: Console, findings: Sequence[Finding] = ()
) -> Path:
    """Write the page of the run in ``directory``, print what it says, and return the page's path.

    Args:
        directory: of the run.
        output: the page to write, ``directory/report.html`` by default.
        console: to print on.
        findings: to show first, the most costly one first.

    Raises:
        RecordingError: there is no recording, or none of its steps is complete on all ranks.
    """
    ranks = read_recording(directory)
    summary = summarize(ranks)
    if not summary.steps:
        raise RecordingError(
            f"{directory}: no step was recorded with its events on all ranks; record a run until "
            "at least one forward and backward has ended"
        )
    charts = read_charts(directory, ranks)
    target = output or directory / "report.html"
    title = directory.resolve().name
    target.write_text(page.render(title, ranks, summary, findings, charts), encoding="utf-8")
    terminal.show(console, summary, findings)
    return target
