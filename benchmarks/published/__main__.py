"""``python -m benchmarks.published``: errors of the forecast on published measurements.

``measurements.json`` has 181 training runs with their sources. ``--rows`` also prints each row.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published.score import Prediction, measured_tokens, score

ROWS = Path(__file__).with_name("measurements.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=ROWS, help="rows (default: ours)")
    parser.add_argument("--rows", action="store_true", help="print each row")
    options = parser.parse_args()
    found = score(options.file)
    if options.rows:
        print("\n".join(map(_line, found.predictions)), end="\n\n")  # noqa: T201
    print(found.text())  # noqa: T201


def _line(one: Prediction) -> str:
    return f"{one.row.id:42} {', '.join(_figures(one)) or one.reason}"


def _figures(one: Prediction) -> Iterator[str]:
    tokens = measured_tokens(one.row)
    if one.error is not None and tokens is not None:
        yield f"{tokens:,.0f} tokens/s: {one.error:+.1%}"
    if one.memory_error is not None:
        yield f"{one.row.measured.peak_mem_gib:.1f} GiB: {one.memory_error:+.1%}"
    if one.fits is not None:
        yield f"{'fits' if one.fits else 'does not fit'} ({one.row.outcome})"


if __name__ == "__main__":
    main()
