"""Drawings in SVG: rectangles, lines and text."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

__all__ = ["FAINT", "INK", "RANKS", "Drawing"]

INK, FAINT = "#1f2933", "#52606d"
RANKS = ("#2563a8", "#b45309")  # the color of each rank's shards
_FONT = "Helvetica, Arial, sans-serif"


@dataclass
class Drawing:
    """A picture on white, so that it can be read in a dark theme, too."""

    width: float
    height: float
    label: str  # what it shows, for those who do not see it
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, **more: str | float
    ) -> None:
        """A rectangle; ``more`` are attributes of SVG, with _ for -."""
        box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        attributes = "".join(f' {name.replace("_", "-")}="{more[name]}"' for name in more)
        self.parts.append(f'<rect {box} fill="{fill}"{attributes}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = FAINT) -> None:
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {ends} stroke="{color}" stroke-width="1.2"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        anchor: str = "middle",
        bold: bool = False,
        color: str = INK,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place}{weight} fill="{color}">{escape(text)}</text>')

    def save(self, path: Path) -> None:
        path.write_text(self.content, encoding="utf-8")

    @property
    def content(self) -> str:
        box = f'width="{self.width:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="{_FONT}" role="img" '
            f'aria-label="{escape(self.label)}">'
        )
        background = '<rect width="100%" height="100%" fill="#ffffff" rx="8"/>'
        return "\n".join([head, background, *self.parts, "</svg>\n"])
