"""What single parts of the engine cost: ``python -m benchmarks.NAME``.

The scripts use the harness of `shardwise bench` (`shardwise.bench.harness`): rounds in which the
cases take turns, ratios within a round, and JSON with the command and the machine.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

__all__ = ["make_parser"]


def make_parser(
    name: str, description: str | None, *, ranks: int | None = None, rounds: int | None = None
) -> ArgumentParser:
    """A parser with the options that scripts share; the numbers are defaults.

    Args:
        name: of the script.
        description: its docstring.
        ranks: for ``--ranks``; None for a script that starts none.
        rounds: for ``--rounds``, likewise.
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
