"""The life cycle of a checkpoint's directory: in progress, complete, removed.

A directory is a checkpoint if it contains a manifest. A save first creates a marker that names its
owner. Once every file is on disk, the manifest replaces the marker. A directory that contains a
marker but no manifest belongs to a save that is in progress or that was killed; the owner named in
the marker tells which.
"""

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import SupportsIndex, overload

import psutil

from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.stores import Folder, folder_at
from shardwise.errors import CheckpointError

__all__ = [
    "MARKER",
    "Owner",
    "Retention",
    "check_shared",
    "checkpoint_files",
    "commit",
    "complete",
    "discard",
    "is_complete",
    "latest",
    "prepare",
    "remove_remains",
]

MARKER = MANIFEST + ".partial"
# How long the files of a save on another host are kept, since it is unknown whether it still runs.
FOREIGN_HOST_SECONDS = 24 * 3600.0
# How long a local marker may be empty before it counts as abandoned: it is created, then filled.
EMPTY_MARKER_SECONDS = 10.0
# How long a rank waits until it sees the marker of rank 0; network file systems cache directories.
VISIBLE_SECONDS = 10.0
_SUFFIXES = (".safetensors", ".safetensors.index.json")

# Tokens of the saves in progress in this process, whichever rank or model they belong to.
_in_progress: set[str] = set()


@dataclass(frozen=True)
class Owner:
    """The save that created a marker.

    A process is identified by its host, PID and start time, because PIDs are reused. A token
    identifies the save within the process.
    """

    host: str
    pid: int
    created: float  # start time of the process, in seconds since the epoch
    token: str
    saved_at: float

    @staticmethod
    def current() -> "Owner":
        """A new save by this process."""
        created = psutil.Process().create_time()
        return Owner(_host(), os.getpid(), created, uuid.uuid4().hex, time.time())

    @staticmethod
    def of(folder: Folder) -> "Owner | None":
        """The owner named in the marker of ``folder``; None if there is none."""
        try:
            return Owner(**json.loads(folder.read(MARKER)))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return None

    @property
    def is_on_this_host(self) -> bool:
        return self.host == _host()

    @property
    def has_ended(self) -> bool:
        """Whether the save has ended; on another host, whether that is safe to assume."""
        if not self.is_on_this_host:
            return time.time() - self.saved_at > FOREIGN_HOST_SECONDS
        try:
            process = psutil.Process(self.pid)
            is_other = abs(process.create_time() - self.created) > 1.0
            if is_other or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        return self.pid == os.getpid() and self.token not in _in_progress


@dataclass(frozen=True)
class Retention:
    """Which older checkpoints stay when a new one is saved.

    It applies to the series of the new checkpoint: the directories next to it whose names differ
    from its name only in the number at the end. Checkpoints with higher numbers, as after a
    rollback, and symbolic links are neither counted nor removed. A checkpoint that a link in the
    same directory points to (``best -> step-300``) is kept.

    Attributes:
        last: how many checkpoints to keep, including the new one: those with the highest numbers
            up to its number.
        every: also keep checkpoints whose number is a multiple of this; None keeps no others.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        numbers = [self.last] if self.every is None else [self.last, self.every]
        if not all(isinstance(number, SupportsIndex) and number >= 1 for number in numbers):
            raise CheckpointError(f"{self}: expected positive integers")

    def apply(self, saved: Folder) -> None:
        """Remove older checkpoints of the series of ``saved``, and the files of killed saves."""
        root = saved.parent
        linked = root.link_targets()
        for folder in root.folders():
            if not folder.is_link and not is_complete(folder):
                _remove_if_abandoned(folder)
        for number, folder in self._older(saved):
            is_kept = self.every is not None and number % self.every == 0
            if not is_kept and folder.name not in linked:
                discard(folder)

    def _older(self, saved: Folder) -> list[tuple[int, Folder]]:
        """The checkpoints of the series that are older than the ``last`` ones, by number."""
        series, number = _split(saved.name)
        if number is None:
            return []
        found = [
            (own_number, folder)
            for own_number, folder in _numbered(saved.parent)
            if _split(folder.name)[0] == series and own_number <= number and not folder.is_link
        ]
        return found[: -self.last]


@overload
def latest(root: os.PathLike[str]) -> Path | None: ...


@overload
def latest(root: str) -> Path | str | None: ...


def latest(root: str | os.PathLike[str]) -> Path | str | None:
    """The complete checkpoint under ``root`` whose name ends with the highest number, or None.

    Returns a path, or a URL if ``root`` is one.

    Raises:
        CheckpointError: ``root`` is a checkpoint itself, so a program would start anew.
    """
    folder = folder_at(root)
    found = _numbered(folder)
    if not found and is_complete(folder):
        raise CheckpointError(
            f"{folder}: is a checkpoint; pass the directory that contains it to sw.latest, or load "
            "it by its own path"
        )
    return found[-1][1].target if found else None


def _numbered(root: Folder) -> list[tuple[int, Folder]]:
    """The complete checkpoints whose names end with a number, in the order of number and name."""
    numbered = [(_split(folder.name)[1], folder) for folder in complete(root)]
    found = [(number, folder) for number, folder in numbered if number is not None]
    return sorted(found, key=lambda each: (each[0], each[1].name))


def complete(root: Folder) -> Iterator[Folder]:
    return (folder for folder in root.folders() if is_complete(folder))


def is_complete(folder: Folder) -> bool:
    return folder.has(MANIFEST)


def checkpoint_files(folder: Folder) -> list[str]:
    """The names in ``folder`` that files of a checkpoint may have."""
    return [name for name in folder.sizes() if name.endswith(_SUFFIXES)]


def prepare(folder: Folder) -> Owner:
    """Begin a checkpoint in ``folder`` and remove the files of a killed save from it.

    Raise a CheckpointError if the directory holds a checkpoint, other files, a save in progress, or
    a symbolic link in place of a file.
    """
    if is_complete(folder):
        raise CheckpointError(
            f"{folder}: contains a complete checkpoint, which is never overwritten; save to "
            "another path, such as one that ends with the number of the step, and limit the "
            "number of checkpoints with retention=sw.Retention(last=2)"
        )
    _refuse_links(folder)
    _refuse_if_in_progress(folder)
    remove_remains(folder)
    others = checkpoint_files(folder)
    if others:
        raise CheckpointError(
            f"{folder}: contains {others[0]}, which is not from an unfinished save; choose another "
            "path"
        )
    owner = Owner.current()
    _in_progress.add(owner.token)
    try:
        folder.create(MARKER, json.dumps(asdict(owner)).encode())
    except BaseException:
        release(owner)
        raise
    return owner


def check_shared(folder: Folder, token: str) -> None:
    """Raise a CheckpointError if ``folder``, on this rank, is not the one prepared on rank 0.

    The ``token`` is that of the owner.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        owner = Owner.of(folder) if folder.has(MARKER) else None
        if owner is not None and owner.token == token:
            return
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{folder}: not the directory on this rank that rank 0 has prepared; save to a "
                "file system that all hosts share, or to a URL such as s3://bucket/run/step-100"
            )
        time.sleep(0.1)
        folder.links()  # lists the directory, so that a network file system looks for new files


def commit(folder: Folder, manifest: bytes, owner: Owner) -> None:
    """Make the checkpoint complete. Every file that ``manifest`` names must be on disk."""
    if not is_owned(folder, owner):
        raise CheckpointError(
            f"{folder}: another process began a save to this path or removed it; save each model "
            "to its own path"
        )
    folder.publish(MANIFEST, manifest, MARKER)


def is_owned(folder: Folder, owner: Owner) -> bool:
    """Whether the unfinished checkpoint in ``folder`` belongs to ``owner``."""
    found = Owner.of(folder)
    return found is not None and found.token == owner.token


def release(owner: Owner) -> None:
    """Mark the save of ``owner`` as ended, so that files it may have left can be removed."""
    _in_progress.discard(owner.token)


def discard(folder: Folder) -> None:
    """Remove a complete checkpoint; if it is a symbolic link, only the link.

    The manifest is removed first, so that an interrupted removal leaves no damaged checkpoint.
    """
    if folder.is_link:
        folder.parent.remove(folder.name)
        return
    if MARKER in folder.links():
        folder.remove(MARKER)  # a store would write the marker through the link
    folder.retract(MANIFEST, MARKER)
    remove_remains(folder, whole=True)


def remove_remains(folder: Folder, *, whole: bool = False) -> None:
    """Remove the files of an unfinished save, or with ``whole`` everything in the directory."""
    if is_complete(folder) or not folder.has(MARKER):
        return
    # The marker is removed last, so that an interrupted removal can be finished later.
    if whole:
        folder.remove_all_but(MARKER)
    for name in checkpoint_files(folder):
        folder.remove(name)
    folder.remove(MARKER)
    folder.remove_empty()


def _refuse_links(folder: Folder) -> None:
    """Raise if a save might write a file through a symbolic link out of the directory."""
    for name in folder.links():
        if name in (MANIFEST, MARKER) or name.endswith(_SUFFIXES):
            raise CheckpointError(
                f"{folder / name}: a symbolic link, through which a save writes nothing; remove "
                "it, or choose another path"
            )


def _refuse_if_in_progress(folder: Folder) -> None:
    """Raise if another save on this host is writing to this path.

    An unfinished save of another host is replaced, because a job that restarts elsewhere saves the
    same steps to the same paths. If that save is still running, it fails in `commit`.
    """
    owner = Owner.of(folder) if folder.has(MARKER) else None
    if owner is None or not owner.is_on_this_host or owner.has_ended:
        return
    if owner.pid == os.getpid():
        raise CheckpointError(
            f"{folder}: another save to this path is in progress; wait for it, or choose another "
            "path"
        )
    raise CheckpointError(
        f"{folder}: process {owner.pid} is writing a checkpoint to this path; choose another path"
    )


def _remove_if_abandoned(folder: Folder) -> None:
    if not folder.has(MARKER):
        # A save that was killed before it created its marker leaves an empty directory.
        if _split(folder.name)[1] is not None:
            folder.remove_empty()
        return
    owner = Owner.of(folder)
    if owner is None:
        is_abandoned = folder.age_seconds(MARKER) > EMPTY_MARKER_SECONDS
    else:
        is_abandoned = owner.has_ended
    if is_abandoned:
        remove_remains(folder, whole=True)


def _host() -> str:
    """The host name and PID namespace, which distinguishes containers."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def _split(name: str) -> tuple[str, int | None]:
    """Split ``name`` into the part before the number at its end, and the number."""
    found = re.search(r"\d+$", name)
    return (name[: found.start()], int(found[0])) if found else (name, None)
