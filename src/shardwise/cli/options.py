"""Paths and names in the options of several commands."""

from pathlib import Path

from shardwise.errors import ConfigError

__all__ = ["check_folders", "split_names"]


def check_folders(*paths: Path | None) -> None:
    """Check that files can be written at ``paths``, before work that takes long.

    Raises:
        ConfigError: the directory of a path does not exist.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: {path.parent} is not a directory")


def split_names(text: str) -> tuple[str, ...]:
    """Split at commas, and omit empty names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
