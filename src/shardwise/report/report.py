"""`shardwise report`: the page and the tables of one run."""

from pathlib import Path

from rich.console import Console

from shardwise.page.charts import read_charts, read_metrics
from shardwise.recording.attendance import changes_of_replicas
from shardwise.recording.format import RecordingError, read_recording
from shardwise.report import page
from shardwise.report.findings import find
from shardwise.report.summary import summarize
from shardwise.report.terminal import show
from shardwise.report.trace import write_trace

__all__ = ["report"]


def report(
    directory: Path, output: Path | None, trace: Path | None, console: Console
) -> list[Path]:
    """Write the page of the run in ``directory``, print its findings, and return the files written.

    The page is ``output``, by default ``report.html`` in ``directory``; ``trace`` is for Perfetto.
    """
    ranks = read_recording(directory)
    summary = summarize(ranks)
    if not summary.steps:
        raise RecordingError(
            f"{directory}: no step was recorded with its events on all ranks; record at least one "
            "complete forward and backward"
        )
    found = find(ranks)
    charts = read_charts(directory, ranks)
    target = output or directory / "report.html"
    title = directory.resolve().name
    target.write_text(page.render(title, ranks, summary, found, charts), encoding="utf-8")
    show(console, summary, found)
    for line in changes_of_replicas(read_metrics(directory)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if trace is None:
        return [target]
    write_trace(ranks, trace)
    return [target, trace]
