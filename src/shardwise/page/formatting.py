"""Formats numbers for the terminal and the page."""

from collections.abc import Iterable, Sequence
from html import escape

from rich.filesize import decimal

__all__ = ["NOTHING", "bytes_text", "cell", "figure_tiles", "percent", "seconds_text", "table"]

NOTHING = "-"
_SCALES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))


def seconds_text(seconds: float) -> str:
    """Format with three digits, such as 41.3 ms; zero is a dash."""
    if not seconds:
        return NOTHING
    _, unit, factor = next(scale for scale in _SCALES if abs(seconds) >= scale[0])
    value = seconds * factor
    digits = max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:.{digits}f} {unit}"


def bytes_text(num_bytes: float) -> str:
    """Format bytes, such as 180.4 MB; zero is a dash."""
    return decimal(round(num_bytes)) if num_bytes else NOTHING


def percent(share: float) -> str:
    return f"{share:.1%}" if share else NOTHING


def figure_tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    return "\n".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in figures
    )


def table(name: str, caption: str, headings: Sequence[str], rows: Iterable[str]) -> str:
    """Render a table whose columns can be sorted."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button>{heading}</button></th>' for heading in headings
    )
    return (
        f'<table id="{name}-table"><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def cell(value: float, text: str, css: str = "") -> str:
    """Render a cell that is sorted by ``value``."""
    attribute = f' class="{css}"' if css else ""
    return f'<td data-value="{value:.9g}"{attribute}>{text}</td>'
