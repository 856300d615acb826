"""The directory of a checkpoint: complete, or the remains of a save that did not end.

It is complete if it has a manifest. Before anything else a save puts a marker there, which becomes
the manifest when everything is on disk: by a rename, so at once. A directory with a marker and
without a manifest is what a killed process left behind.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.manifest import MANIFEST
from shardwise.errors import CheckpointError

__all__ = [
    "Retention",
    "commit",
    "complete",
    "discard",
    "is_complete",
    "latest",
    "prepare",
    "remove_remains",
    "sync",
]

MARKER = MANIFEST + ".partial"
_OURS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay beside a new one: its siblings whose names end with a number.

    Attributes:
        last: the newest so many, by number, the new one included.
        every: and those whose number is a multiple of it; None for no others.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise CheckpointError(f"{self}: expected numbers from 1 on")

    def apply(self, root: Path) -> None:
        """Remove the others under ``root``, and remains of saves that did not end."""
        for path in _directories(root):
            if not is_complete(path):
                remove_remains(path, whole=True)
                _remove_empty(path)
        numbered = sorted((n, path) for path in complete(root) if (n := _number(path)) is not None)
        for number, path in numbered[: -self.last]:
            if self.every is None or number % self.every:
                discard(path)


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint under ``root`` whose name ends with the highest number, if any."""
    found = [path for path in complete(Path(root)) if _number(path) is not None]
    return max(found, key=lambda path: (_number(path), path.name), default=None)


def complete(root: Path) -> Iterator[Path]:
    """The complete checkpoints directly under ``root``."""
    return (path for path in _directories(root) if is_complete(path))


def is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def prepare(path: Path) -> None:
    """Make an empty checkpoint of ``path``; what a killed save left there is removed.

    Raises:
        CheckpointError: something else is there.
    """
    if is_complete(path):
        raise CheckpointError(
            f"{path}: a complete checkpoint is there already and is not written over; save to "
            "another path, such as one with the number of the step, and keep the last ones with "
            "retention=sw.Retention(last=2)"
        )
    remove_remains(path)
    foreign = _ours_in(path)
    if foreign:
        raise CheckpointError(
            f"{path}: has {foreign[0].name}, which is no checkpoint's; choose another"
        )
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER).touch()


def commit(path: Path, manifest: bytes) -> None:
    """Let the checkpoint exist: everything that ``manifest`` names is on disk by now."""
    with (path / MARKER).open("wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    sync(path)
    (path / MARKER).rename(path / MANIFEST)
    sync(path)
    sync(path.parent)


def discard(path: Path) -> None:
    """Remove a complete checkpoint; first of all it is none any more, whatever happens next."""
    (path / MANIFEST).rename(path / MARKER)
    sync(path)
    remove_remains(path, whole=True)


def remove_remains(path: Path, *, whole: bool = False) -> None:
    """Remove what a save left that did not end; nothing if it did, or if none was begun.

    The files of a checkpoint, or with ``whole`` the directory with all that is in it.
    """
    if is_complete(path) or not (path / MARKER).exists():
        return
    # The marker goes last, so that whoever is killed here leaves remains, too.
    for entry in path.iterdir() if whole else _ours_in(path):
        if entry.name == MARKER:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (path / MARKER).unlink()
    with contextlib.suppress(OSError):  # the user put something else there
        path.rmdir()


def sync(directory: Path) -> None:
    """Bring the names of its files to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ours_in(path: Path) -> list[Path]:
    """What looks like a file of a checkpoint."""
    return sorted(found for pattern in _OURS for found in path.glob(pattern))


def _directories(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _remove_empty(path: Path) -> None:
    """What a save leaves that is killed before its marker is there, or after it has gone."""
    if _number(path) is not None and path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _number(path: Path) -> int | None:
    found = re.search(r"\d+$", path.name)
    return int(found[0]) if found else None
