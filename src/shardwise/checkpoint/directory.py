"""The directory of a checkpoint: complete, or the remains of a save that did not end.

It is complete if it has a manifest. Before anything else a save puts a marker there, which becomes
the manifest when everything is on disk: by a rename, so at once, or where there is none, by putting
the manifest beside it. A directory with a marker and without a manifest is what a killed process
left behind.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.storage import Folder
from shardwise.errors import CheckpointError

__all__ = [
    "MARKER",
    "Retention",
    "commit",
    "complete",
    "discard",
    "is_complete",
    "latest",
    "ours",
    "prepare",
    "remove_remains",
]

MARKER = MANIFEST + ".partial"
_OURS = (".safetensors", ".safetensors.index.json")  # how the names of files end


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

    def apply(self, root: Folder) -> None:
        """Remove the others under ``root``, and remains of saves that did not end."""
        for folder in root.folders():
            if not is_complete(folder):
                remove_remains(folder, whole=True)
                # What a save leaves that is killed before its marker is there, or after it has gone
                if _number(folder) is not None:
                    folder.remove_empty()
        numbered = [(n, folder) for folder in complete(root) if (n := _number(folder)) is not None]
        numbered.sort(key=lambda found: (found[0], found[1].name))
        for number, folder in numbered[: -self.last]:
            if self.every is None or number % self.every:
                discard(folder)


@overload
def latest(root: os.PathLike[str]) -> Path | None: ...


@overload
def latest(root: str) -> Path | str | None: ...


def latest(root: str | os.PathLike[str]) -> Path | str | None:
    """The complete checkpoint under ``root`` whose name ends with the highest number, if any.

    A URL if ``root`` is one.
    """
    found = [folder for folder in complete(folder_at(root)) if _number(folder) is not None]
    newest = max(found, key=lambda folder: (_number(folder), folder.name), default=None)
    return None if newest is None else newest.target


def complete(root: Folder) -> Iterator[Folder]:
    """The complete checkpoints directly under ``root``."""
    return (folder for folder in root.folders() if is_complete(folder))


def is_complete(folder: Folder) -> bool:
    return folder.has(MANIFEST)


def ours(folder: Folder) -> list[str]:
    """The names there that files of a checkpoint may have."""
    return [name for name in folder.sizes() if name.endswith(_OURS)]


def prepare(folder: Folder) -> None:
    """Make an empty checkpoint of ``folder``; what a killed save left there is removed.

    Raises:
        CheckpointError: something else is there.
    """
    if is_complete(folder):
        raise CheckpointError(
            f"{folder}: a complete checkpoint is there already and is not written over; save to "
            "another path, such as one with the number of the step, and keep the last ones with "
            "retention=sw.Retention(last=2)"
        )
    remove_remains(folder)
    foreign = ours(folder)
    if foreign:
        raise CheckpointError(
            f"{folder}: has {foreign[0]}, which is no checkpoint's; choose another"
        )
    folder.make(MARKER)


def commit(folder: Folder, manifest: bytes) -> None:
    """Let the checkpoint exist: everything that ``manifest`` names is there to stay by now."""
    folder.publish(MANIFEST, manifest, MARKER)


def discard(folder: Folder) -> None:
    """Remove a complete checkpoint; first of all it is none any more, whatever happens next."""
    folder.retract(MANIFEST, MARKER)
    remove_remains(folder, whole=True)


def remove_remains(folder: Folder, *, whole: bool = False) -> None:
    """Remove what a save left that did not end; nothing if it did, or if none was begun.

    The files of a checkpoint, or with ``whole`` the directory with all that is in it.
    """
    if is_complete(folder) or not folder.has(MARKER):
        return
    # The marker goes last, so that whoever is killed here leaves remains, too.
    if whole:
        folder.remove_all_but(MARKER)
    for name in ours(folder):
        folder.remove(name)
    folder.remove(MARKER)
    folder.remove_empty()


def _number(folder: Folder) -> int | None:
    found = re.search(r"\d+$", folder.name)
    return int(found[0]) if found else None
