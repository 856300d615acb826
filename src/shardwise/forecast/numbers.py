"""Parses numbers with suffixes: "24 GB", "300B" tokens."""

import re

from shardwise.errors import ConfigError, PlanError

__all__ = ["bytes_of", "number_of"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}  # powers of 1000, or of 1024 in "GiB"


def bytes_of(text: int | str) -> int:
    """Parse bytes such as "24 GB", "24GiB" or a number.

    Raises:
        PlanError: ``text`` does not have this form.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None:
        raise PlanError(f"budget={text!r}: expected bytes, such as '24 GB' or '24 GiB'")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2]])


def number_of(option: str, text: str) -> float:
    """Parse a number such as "300B", "1T" or "2e12", given as ``--option``.

    Raises:
        ConfigError: ``text`` does not have this form, or the number is not above 0.
    """
    suffix = text[-1:].lower() if text[-1:].isalpha() else ""
    try:
        number: float = float(text[:-1] if suffix else text) * 1000.0 ** _POWERS[suffix]
    except (KeyError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--{option} {text}: expected a number such as 300B, 1T or 2e12")
    return number
