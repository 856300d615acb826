"""The links of a built site: pages, anchors and pictures; nothing is loaded from another host."""

from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["problems_of"]

_LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # what <link rel> only names


class _Page(HTMLParser):
    """What a page links to and loads, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {str(values[key]) for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href") is not None:
            self.links.append(str(values["href"]))
        target = values.get(_LOADED.get(tag, ""))
        if target and values.get("rel") not in _NOT_LOADED:
            self.loaded.append(target)


def problems_of(site: Path) -> list[str]:
    """One line for each link that leads nowhere, and for each file that another host would send."""
    page_of = cache(_Page)
    return [
        f"{path.relative_to(site)}: {problem}"
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"  # whose links are from the root of a host
        for problem in _problems(path, page_of(path), page_of)
    ]


def _problems(path: Path, page: _Page, page_of: Callable[[Path], _Page]) -> Iterator[str]:
    for target in page.loaded:
        if urlsplit(target).netloc:
            yield f"loads {target}"
        elif not _file_of(path, target).exists():
            yield f"{target} does not exist"
    for target in page.links:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = _file_of(path, target)
        if not file.exists():
            yield f"{target} does not exist"
        elif parts.fragment and unquote(parts.fragment) not in page_of(file).anchors:
            yield f"{target}: no such anchor"


def _file_of(page: Path, target: str) -> Path:
    path = unquote(urlsplit(target).path)
    file = (page.parent / path).resolve() if path else page
    return file / "index.html" if file.is_dir() else file
