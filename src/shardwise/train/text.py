"""Treats files as one sequence of bytes, and splits them for validation."""

import copy
import hashlib
import json
import sysconfig
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.config import DataConfig

__all__ = ["STDLIB", "Text", "find_files", "split_files"]

STDLIB = "stdlib"
# Tests are repetitive, and installed packages differ between machines.
_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class Text:
    """The concatenated bytes of files; nothing is kept in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._starts = [0, *accumulate(path.stat().st_size for path in paths)]
        self._range = range(self._starts[-1])  # this text, as a part of all bytes

    def __len__(self) -> int:
        return len(self._range)

    def read(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return ``size`` bytes from ``start`` on, uint8 [size]; a ConfigError if one changed."""
        parts = [np.empty(0, np.uint8)]
        start += self._range.start
        index = bisect_right(self._starts, start) - 1
        while size:
            path, offset = self._paths[index], start - self._starts[index]
            length = min(size, self._starts[index + 1] - start)
            try:
                part = np.fromfile(path, np.uint8, length, offset=offset)
            except OSError as error:
                reason = f"cannot be read: {error.strerror}"
                raise ConfigError(f"data.path: {path} {reason}") from None
            if len(part) != length:
                raise ConfigError(f"data.path: {path} has changed during the run")
            parts.append(part)
            start, size, index = start + length, size - length, index + 1
        return np.concatenate(parts)

    def split(self, at: int) -> tuple["Text", "Text"]:
        """Split into the first ``at`` bytes and the rest."""
        first, second = copy.copy(self), copy.copy(self)
        first._range, second._range = self._range[:at], self._range[at:]
        return first, second


_GLOBS = {"text": "**/*.py", "jsonl": "**/*.jsonl", "parquet": "**/*.parquet"}


def find_files(config: DataConfig, path: str, format_: str) -> dict[str, Path]:
    """The files of ``path``, sorted by their names relative to it.

    These names are the same on every machine.
    """
    if path == STDLIB:
        root, pattern = Path(sysconfig.get_path("stdlib")), "**/*.py"
    else:
        root, pattern = Path(path).expanduser(), config.glob or _GLOBS.get(format_, "**/*")
        if format_ == "datasets":
            pattern = "*.arrow"
    if root.is_file():
        return {root.name: root}
    key = "data.path" if path == config.path else "data.validation"
    if not root.is_dir():
        raise ConfigError(f"{key}={path!r}: no such file or directory")
    if format_ == "datasets" and (root / "state.json").exists():
        # `Dataset.map` and `filter` leave results in other files of the directory.
        try:
            state = json.loads((root / "state.json").read_text(encoding="utf-8"))
            names = [file["filename"] for file in state["_data_files"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{key}={path!r}: its state.json is not that of datasets.Dataset.save_to_disk; set "
                "data.format to what the files are"
            ) from None
        return {name: root / name for name in names}
    try:
        found = {file.relative_to(root).as_posix(): file for file in root.glob(pattern)}
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"data.glob={pattern!r}: {error}") from None
    excluded = _EXCLUDED if path == STDLIB else set()
    files = {
        name: file
        for name, file in sorted(found.items())
        if file.is_file() and excluded.isdisjoint(name.split("/"))
    }
    if not files:
        hint = "" if config.glob else "; set data.glob, such as '**/*.txt'"
        raise ConfigError(f"{key}={path!r}: no file matches data.glob={pattern!r}{hint}")
    return files


def split_files(files: dict[str, Path], share: float) -> tuple[Text, Text]:
    """Split by whole files, so that training never sees a part of a validation file.

    Files are chosen for validation in the order of the digests of their names, as long as they fit.
    This order has no pattern and is the same on every machine. If no file fits, the end of the text
    is used for validation.
    """
    text = Text(list(files.values()))
    target = left = round(share * len(text))
    chosen = set()
    for name in sorted(files, key=_digest):
        size = files[name].stat().st_size
        if 0 < size <= left:
            chosen.add(name)
            left -= size
    if not chosen:
        return text.split(len(text) - target)
    train = [path for name, path in files.items() if name not in chosen]
    return Text(train), Text([path for name, path in files.items() if name in chosen])


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
