"""Reading a configuration from a TOML file and ``section.key=value`` overrides, and writing it."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from shardwise.errors import ConfigError
from shardwise.train.config import Config

__all__ = ["read_config", "to_toml"]

_KEYS = {
    section: list(type(field.default).model_fields)
    for section, field in Config.model_fields.items()
}


def read_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read ``path``, overridden by ``section.key=value`` texts.

    Raises:
        ConfigError: the file cannot be read, or a key or a value is not valid.
    """
    values: dict[str, dict[str, Any]] = {}
    for text in overrides:
        section, key, value = _parse_override(text)
        values.setdefault(section, {})[key] = value
    if not path.exists():
        raise ConfigError(f"{path}: no such file; expected a TOML configuration")
    try:
        path.read_bytes().decode()  # the settings source ignores what it cannot open
        layered = type("Layered", (Config,), {}, toml_file=path)(**values)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; expected a TOML configuration") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(_explain(error, path, values)) from None
    return Config.model_validate(layered.model_dump())


def to_toml(config: Config) -> str:
    """The configuration as TOML, from which `read_config` gives an equal one."""
    return tomli_w.dumps(config.model_dump())


def _parse_override(text: str) -> tuple[str, str, object]:
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"--set {text}: expected section.key=value, such as train.steps=100")
    known = [f"{section}.{key}" for section, keys in _KEYS.items() for key in keys]
    if name not in known:
        raise ConfigError(f"--set {text}: unknown key {name!r}{_hint(name, known)}")
    section, key = name.split(".")
    field = type(Config.model_fields[section].default).model_fields[key]
    return section, key, _parse_value(raw, is_text=field.annotation is str)


def _parse_value(raw: str, *, is_text: bool) -> object:
    """A TOML value, or the text itself if it is not TOML or the key takes text (a name 7)."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    value = parsed["value"]
    is_one_value = len(parsed) == 1 and (isinstance(value, str) or not is_text)
    return value if is_one_value else raw


def _explain(error: ValidationError, path: Path, overrides: dict[str, dict[str, Any]]) -> str:
    """All errors in one line; those of the file start with its name."""
    problems: dict[str, list[str]] = {}  # of a union type there are several for one key
    got: dict[str, str] = {}
    for detail in error.errors():
        section, *rest = (str(part) for part in detail["loc"][:2])
        is_override = section in overrides and (not rest or rest[0] in overrides[section])
        name = ("" if is_override else f"{path}: ") + ".".join([section, *rest])
        problem = _problem(section, rest, dict(detail))
        if problem.startswith("expected"):
            got[name] = f", got {detail['input']!r}"
        problems.setdefault(name, []).append(problem)
    lines = []
    for name, (first, *others) in problems.items():
        expected = [first, *(other.removeprefix("expected ") for other in others)]
        lines.append(f"{name}: {' or '.join(expected)}{got.get(name, '')}")
    return "; ".join(lines)


def _problem(section: str, rest: Sequence[str], detail: dict[str, Any]) -> str:
    match detail["type"]:
        case "extra_forbidden" if rest:
            return f"unknown key{_hint(rest[0], _KEYS[section])}"
        case "extra_forbidden":
            return f"unknown section{_hint(section, list(_KEYS))}"
        case "value_error":  # raised by a validator of ours, whose message is complete
            return str(detail["ctx"]["error"])
        case "model_type":
            return f"expected a table [{section}]"
        case "missing":
            return "expected one more value"
        case _:
            expected = detail["msg"].replace("Input should be ", "expected ")
            return re.sub(r"expected (?=greater|less)", "expected a number ", expected)


def _hint(name: str, known: Sequence[str]) -> str:
    in_other_sections = [candidate for candidate in known if candidate.endswith(f".{name}")]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    for candidate in [*in_other_sections, *close]:
        return f"; did you mean {candidate}?"
    return f"; expected one of {', '.join(known)}"
