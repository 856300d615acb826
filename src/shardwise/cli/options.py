"""Paths and names in the options of several commands."""

from pathlib import Path

from shardwise.errors import ConfigError

__all__ = ["check_outputs", "split_names"]


def check_outputs(*paths: Path | None) -> None:
    """Raise a ConfigError if no file can be written at ``paths``, before work that takes long."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: {path.parent} is not a directory")
        if path.is_dir():
            raise ConfigError(f"{path}: cannot be written: it is a directory")


def split_names(text: str) -> tuple[str, ...]:
    """Split at commas, and omit empty names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
