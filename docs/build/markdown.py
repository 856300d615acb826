"""Markdown as GitHub reads it: sections, links and the anchors of headings."""

import re
from collections.abc import Callable, Iterator
from itertools import count

__all__ = ["anchors_of", "links_of", "outside_code", "sections_of", "slug"]

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` applied to what is not code."""
    parts = _CODE.split(text)  # every second one is code
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def sections_of(text: str) -> dict[str, str]:
    """What is under each heading, up to the next one that is not below it.

    The section of the title is what comes before the first other heading.
    """
    blank = _FENCE.sub(lambda found: " " * len(found[0]), text)  # `# train.py` is no heading
    headings = list(_HEADING.finditer(blank))
    ends = [
        next((n.start() for n in headings[i + 1 :] if _ends(one, n)), len(text))
        for i, one in enumerate(headings)
    ]
    return {
        one[2]: text[one.end() : end].strip() + "\n"
        for one, end in zip(headings, ends, strict=True)
    }


def _ends(one: re.Match[str], other: re.Match[str]) -> bool:
    return len(one[1]) == 1 or len(other[1]) <= len(one[1])


def slug(heading: str) -> str:
    """The anchor of a heading."""
    words = re.sub(r"[^\w\- ]", "", heading.lower())
    return words.replace(" ", "-")


def anchors_of(text: str) -> set[str]:
    """The anchors of a page: a heading that comes again gets a number."""
    found: set[str] = set()
    for heading in _HEADING.finditer(_FENCE.sub("", text)):
        name = slug(heading[2])
        candidates = (name if n == 0 else f"{name}-{n}" for n in count())
        found.add(next(one for one in candidates if one not in found))
    return found


def links_of(text: str) -> Iterator[str]:
    """The targets of the links and pictures outside of code."""
    yield from _LINK.findall(_CODE.sub("", text))
