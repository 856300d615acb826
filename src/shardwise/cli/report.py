"""``shardwise report``."""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import check_outputs

MIN_WIDTH = 100  # in characters, which the tables need


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The run directory that has a recording/.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page to write (default: RUN_DIR/report.html)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a trace for https://ui.perfetto.dev."),
    ] = None,
) -> None:
    """Show where the time and the memory of a recorded run went, and what to change.

    Prints findings, units and ranks, and writes them with a timeline of each step to a single HTML
    page that works without a network.
    """
    check_outputs(output, trace)
    from rich.console import Console  # noqa: PLC0415 (torch takes seconds)

    from shardwise.report.report import report as write  # noqa: PLC0415

    console = Console(width=max(MIN_WIDTH, Console().width))
    for path in write(run, output, trace, console):
        typer.echo(f"{path}: written")
