"""Options as texts: "24 GB", "300B" tokens, or "gather=int8,reduce=int4"."""

import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.optim.outer import Outer
from shardwise.plan.spelling import did_you_mean
from shardwise.plan.wire import UNQUANTIZED, Wire

__all__ = ["bytes_of", "number_of", "options_of", "parse_outer", "parse_wire"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}  # powers of 1000, or of 1024 in "GiB"
_BOOLEANS = {"true": True, "false": False}


def parse_wire(text: str | None) -> Wire:
    """Parse the options of `Wire`; None: nothing is quantized.

    Raises:
        ConfigError: the text is malformed.
        PlanError: a format is unknown, or a number is out of range.
    """
    if text is None:
        return UNQUANTIZED
    known = [field.name for field in fields(Wire)]
    return Wire(**options_of("wire", text, known, "gather=int8,reduce=int4"))


def parse_outer(text: str) -> tuple[Outer, int]:
    """Parse the options of `Outer` and ``replicas=``; return them and the number of replicas.

    Raises:
        ConfigError: the text is malformed.
        PlanError: an option is out of range.
    """
    known = ["replicas", *(one.name for one in fields(Outer) if one.name != "optimizer")]
    found = options_of("outer", text, known, "every=32,replicas=2")
    replicas = found.pop("replicas", 2)
    if not isinstance(replicas, int) or replicas < 2:  # noqa: PLR2004 - several
        raise ConfigError(f"--outer {text}: expected replicas to be 2 or more, got {replicas}")
    return Outer(**found), replicas


def options_of(option: str, text: str, known: Collection[str], example: str) -> dict[str, Any]:
    """Parse "name=value,name=value"; values are numbers, booleans or other texts.

    Raises:
        ConfigError: a name is not in ``known``, is given twice, or has no value, or there is none.
            The message has the ``example``.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{option}={text!r}: expected a text, such as {example!r}")
    found: dict[str, Any] = {}
    # Not at the commas of a regular expression, such as "{1,2}".
    parts = [part.strip() for part in re.split(r",(?![^{[(]*[}\])])", text)]
    for part in filter(None, parts) if any(parts) else [""]:
        name, _, value = part.partition("=")
        if name not in known or not value:
            raise ConfigError(
                f"--{option} {text}: expected one or more of {'=, '.join(known)}=, such as "
                f"{example}; got {part!r}{did_you_mean(name, known)}"
            )
        if name in found:
            raise ConfigError(f"--{option} {text}: {name} is given twice")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return _BOOLEANS.get(text, text)


def bytes_of(text: int | str, option: str = "budget=") -> int:
    """Parse bytes such as "24 GB", "24GiB" or a number, given as ``option``.

    Raises:
        PlanError: ``text`` does not have this form.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
    if found is None:
        raise PlanError(f"{option}{text!r}: expected bytes, such as '24 GB' or '24 GiB'")
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
