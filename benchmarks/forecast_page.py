"""The table of `benchmarks.forecast` in the documentation."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_table"]

BEGIN, END = "<!-- table of benchmarks.forecast -->", "<!-- end of the table -->"
CLOSE = 0.15  # relative error of the time
_COLUMNS = (
    "model, ranks, strategy",
    "sent in a step, MB",
    "peak of live memory, MB: predicted, measured",
    "error",
    "step, ms: predicted, measured",
    "error",
    "range over rounds",
)
_HEAD = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"

Row = Mapping[str, Any]


def write_table(page: Path, rows: Mapping[str, Row]) -> None:
    """Replace the text between `BEGIN` and `END` in a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n{END}{after}", encoding="utf-8")


def table(rows: Mapping[str, Row]) -> str:
    """Format the rows as a Markdown table with a summary."""
    return _HEAD + "".join(_lines(rows)) + "\n" + _summary(rows)


def _lines(rows: Mapping[str, Row]) -> Iterable[str]:
    for name, row in rows.items():
        sent = f"{row['sent_bytes'] / 1e6:.1f}" if "sent_bytes" in row else "-"
        cells = [
            name,
            sent,
            f"{row['predicted live_peak'] / 1e6:.0f}, {row['live_peak'] / 1e6:.0f}",
            f"{row['live_peak error']:+.1%}",
            f"{row['predicted seconds'] * 1e3:.0f}, {row['seconds'] * 1e3:.0f}",
            f"{row['seconds error']:+.0%}",
            _range(row),
        ]
        yield f"| {' | '.join(cells)} |\n"


def _range(row: Row) -> str:
    ratios = [predicted / measured - 1 for predicted, measured in row["rounds"]]
    return f"{min(ratios):+.0%} to {max(ratios):+.0%} of {len(ratios)}"


def _summary(rows: Mapping[str, Row]) -> str:
    def worst(figure: str) -> str:
        return max(rows, key=lambda name: abs(rows[name][figure]))

    close = sum(abs(row["seconds error"]) <= CLOSE for row in rows.values())
    slow, large = worst("seconds error"), worst("live_peak error")
    counted = [row for row in rows.values() if "sent_bytes" in row]
    exact = sum(row["sent_bytes"] == row["predicted sent_bytes"] for row in counted)
    return (
        f"Time: {close} of {len(rows)} cases are within {CLOSE:.0%}; the worst is {slow} "
        f"({rows[slow]['seconds error']:+.0%}).\n"
        f"Memory: the worst is {large} ({rows[large]['live_peak error']:+.1%}). Bytes: exact in "
        f"{exact} of {len(counted)} cases.\n"
    )
