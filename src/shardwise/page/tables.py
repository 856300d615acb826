"""Figures and sortable tables as HTML."""

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["cell", "figure_tiles", "table"]


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
