"""From a TOML file and ``section.key=value`` words to a Config, and back to TOML."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwise.errors import ConfigError
from shardwise.train.config import Config

__all__ = ["read_config", "to_toml"]


def read_config(path: Path, settings: Iterable[str] = ()) -> Config:
    """Read ``path`` and put ``settings`` (``section.key=value``) over it.

    Raises:
        ConfigError: the file cannot be read, or a key or a value is not one that exists.
    """
    document = _parse_file(path)
    chosen = [_parse_setting(text) for text in settings]
    for setting in chosen:
        table = document.setdefault(setting.section, {})
        if isinstance(table, dict):  # else the section is wrong in the file, which is told below
            table[setting.key] = setting.value
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(error, path, chosen)) from None


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``read_config`` reads back to an equal one."""
    tables = []
    for section, values in config.model_dump().items():
        lines = [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        tables.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(tables) + "\n"


@dataclass(frozen=True, slots=True)
class _Setting:
    section: str
    key: str
    value: object


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; expected a TOML configuration") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _parse_setting(text: str) -> _Setting:
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"--set {text}: expected section.key=value, such as train.steps=100")
    known = [f"{section}.{key}" for section, keys in _sections().items() for key in keys]
    if name not in known:
        raise ConfigError(f"--set {text}: unknown key {name!r}{_hint(name, known)}")
    section, key = name.split(".")
    annotation = type(Config.model_fields[section].default).model_fields[key].annotation
    return _Setting(section, key, _parse_value(raw, keep_text=annotation is str))


def _parse_value(raw: str, *, keep_text: bool) -> object:
    """A TOML value, or the text itself where it is none (or where only text will do: a name 7)."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    value = parsed["value"]
    is_one_value = len(parsed) == 1 and (isinstance(value, str) or not keep_text)
    return value if is_one_value else raw


def _sections() -> dict[str, list[str]]:
    return {
        name: list(type(field.default).model_fields) for name, field in Config.model_fields.items()
    }


def _explain(error: ValidationError, path: Path, chosen: Sequence[_Setting]) -> str:
    """Every fault in one line; a key that came from the file is told with the file's name."""
    faults: dict[str, list[_Fault]] = {}
    for detail in error.errors():
        place = [str(part) for part in detail["loc"][:2]]
        from_words = any(
            [setting.section, setting.key][: len(place)] == place for setting in chosen
        )
        origin = "" if from_words else f"{path}: "
        faults.setdefault(origin + ".".join(place), []).append(_fault(place, dict(detail)))
    return "; ".join(f"{place}: {_joined(several)}" for place, several in faults.items())


@dataclass(frozen=True, slots=True)
class _Fault:
    expected: str
    got: str = ""


def _fault(place: Sequence[str], detail: dict[str, Any]) -> _Fault:
    got = f", got {detail['input']!r}"
    match detail["type"]:
        case "extra_forbidden":
            known = list(_sections()) if len(place) == 1 else _sections()[place[0]]
            kind = "section" if len(place) == 1 else "key"
            return _Fault(f"unknown {kind}{_hint(place[-1], known)}")
        case "value_error":  # raised by a section, which names its own keys
            return _Fault(str(detail["ctx"]["error"]))
        case "model_type":
            return _Fault(f"expected a table [{place[0]}]", got)
        case "missing":
            return _Fault("expected one value more", got)
        case _:
            expected = detail["msg"].replace("Input should be ", "expected ")
            return _Fault(re.sub(r"expected (?=greater|less)", "expected a number ", expected), got)


def _joined(faults: Sequence[_Fault]) -> str:
    """The faults of one key, of which there are several where several types would do."""
    others = [fault.expected.removeprefix("expected ") for fault in faults[1:]]
    return " or ".join([faults[0].expected, *others]) + faults[0].got


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    without_section = [candidate for candidate in known if candidate.endswith(f".{name}")]
    for candidate in [*without_section, *close]:
        return f"; did you mean {candidate}?"
    return f"; expected one of {', '.join(known)}"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # a JSON string is a TOML one, but for the control character DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    assert isinstance(value, (int, float))
    return repr(value)
