"""Suggestions and numbers in messages."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

__all__ = ["counted", "did_you_mean", "divisors", "expected_one_of", "simplified"]


def counted(number: int, noun: str) -> str:
    """``"1 batch"``, ``"2 batches"`` or ``"1,024 GPUs"``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """``"; did you mean 'fsdp'?"`` for ``"FSPD"``; empty if nothing is close."""
    by_key = {simplified(choice): choice for choice in choices}
    close = get_close_matches(simplified(str(word)), by_key, n=1)
    return f"; did you mean {by_key[close[0]]!r}?" if close else ""


def simplified(name: str) -> str:
    """``"rtx4090"`` for ``"RTX-4090"``: lower case, without dashes, underscores and spaces."""
    return re.sub(r"[-_\s]", "", name.lower())


def expected_one_of(choices: Collection[str], given: object) -> str:
    """``"expected one of ddp, fsdp; did you mean 'fsdp'?"`` if ``"FSPD"`` was given."""
    return f"expected one of {', '.join(choices)}{did_you_mean(given, choices)}"


def divisors(number: int) -> str:
    """``"1, 2, 3, 6"`` for 6."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
