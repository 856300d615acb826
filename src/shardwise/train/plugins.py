"""Finds the parts of a run that a configuration names: built-in, entry points, dotted names."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan.spelling import did_you_mean

__all__ = ["resolve"]


def resolve(key: str, name: str, known: Mapping[str, Any], group: str = "") -> Any:
    """The object that ``name`` refers to; a ConfigError names the ``key`` of the configuration.

    ``name`` is one of ``known``, an entry point of ``group``, or ``package.module:attribute``.
    """
    if name in known:
        return known[name]
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            return getattr(import_module(module), attribute)
        found = entry_points(group=group, name=name) if group else ()
        for entry in found:
            return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}={name!r}: {error}") from None
    if not known:
        raise ConfigError(f"{key}={name!r}: expected package.module:attribute")
    choices = did_you_mean(name, known) or f"; expected one of {', '.join(known)}"
    raise ConfigError(f"{key}={name!r} is not known{choices}, or package.module:attribute")
