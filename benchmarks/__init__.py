"""Benchmarks of single parts of the engine: ``python -m benchmarks.NAME``.

The scripts use the harness of `shardwise bench` (`shardwise.bench.harness`): cases take turns in
rounds, ratios are taken within a round, and JSON results include the command and the machine.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.bench.harness import Column

__all__ = ["make_parser", "print_figures"]


def make_parser(
    name: str, description: str | None, *, ranks: int | None = None, rounds: int | None = None
) -> ArgumentParser:
    """Make a parser with the options that scripts share.

    Args:
        name: name of the script.
        description: docstring of the script.
        ranks: default of ``--ranks``; None: the script has no such option.
        rounds: default of ``--rounds``; None: the script has no such option.
    """
    parser = ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks, help="number of local CPU ranks")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="number of measured rounds")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def print_figures(
    title: str,
    columns: "Sequence[Column]",
    rows: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    **document: Any,
) -> None:
    """Print a table and, unless ``out`` is None, write ``document`` and the rows there."""
    from shardwise.bench import harness  # noqa: PLC0415 - scripts on a GPU may lack its packages

    harness.make_console().print(harness.make_table(title, columns, rows))
    if out is not None:
        harness.write_json(out, {**document, "rows": rows})
