"""Literal blocks of docstrings, which follow ``::``, as fenced blocks of Markdown."""

import re
import textwrap
from typing import Any

import griffe

__all__ = ["LiteralBlocks"]

_LITERAL = re.compile(r"^(.*)::\n\n((?: {4}.*\n?|\n)+)", re.MULTILINE)


class LiteralBlocks(griffe.Extension):
    """An extension of griffe, which reads the docstrings for the reference."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_fenced(obj.docstring.value)


def as_fenced(docstring: str) -> str:
    """The same with fences around literal blocks; a paragraph before one ends in a colon."""

    def fenced(found: re.Match[str]) -> str:
        before = f"{found[1]}:\n\n" if found[1] else ""
        return f"{before}```python\n{textwrap.dedent(found[2]).strip()}\n```\n\n"

    return _LITERAL.sub(fenced, docstring)
