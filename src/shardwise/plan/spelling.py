"""Suggestions in error messages."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "divisors", "expected_one_of"]


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``"; did you mean 'fsdp'?"`` for ``"FSPD"``; empty if nothing is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = get_close_matches(str(word).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def expected_one_of(choices: Collection[str], given: object) -> str:
    """``"expected one of ddp, fsdp; did you mean 'fsdp'?"`` if ``"FSPD"`` was given."""
    return f"expected one of {', '.join(choices)}{did_you_mean(given, choices)}"


def divisors(number: int) -> str:
    """``"1, 2, 3, 6"`` for 6."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
