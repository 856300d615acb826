"""Counts of calls and lines, which unlike times do not depend on the machine."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import shardwise

__all__ = ["PACKAGE", "follow_lines", "lines_by_function", "num_calls"]

PACKAGE = Path(shardwise.__file__).parent


def num_calls(function: Callable[[], object]) -> int:
    """Return the number of calls of Python and C functions that ``function`` makes here."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def lines_by_function(function: Callable[[], object]) -> Counter[str]:
    """Count the lines of the package that ``function`` runs here, by the function they are in."""
    found: Counter[str] = Counter()

    def count(frame: FrameType) -> None:
        found[f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}"] += 1

    follow_lines(function, count)
    return found


def follow_lines(function: Callable[[], object], note: Callable[[FrameType], None]) -> None:
    """Call ``note`` for each line of the package that ``function`` runs on this thread."""
    root = f"{PACKAGE}/"

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(root):
            return None
        if event == "line":
            note(frame)
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
