"""Storage for checkpoints: local directories, and any store that `fsspec` reaches by a URL.

The rest of this package reads checkpoints through a `Folder`, which need not exist and whose
content may change at any time. Its methods raise an OSError, or a CheckpointError that names the
location. Only writing differs: all ranks write to the same local files, whereas a store receives
each object as a whole from one rank.
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from shardwise.errors import CheckpointError, install

__all__ = [
    "MAX_OPEN_FILES",
    "Folder",
    "LocalFolder",
    "ReadInto",
    "errors_at",
    "folder_at",
    "open_unlinked",
    "sync",
]

# Files of a component that are open at once; processes are often limited to 1024.
MAX_OPEN_FILES = 128
# Fills memory with the bytes of a file from an offset on; returns False if the file ends before.
ReadInto = Callable[[memoryview, int], bool]

_ABSENT = (FileNotFoundError, NotADirectoryError)


def folder_at(place: str | os.PathLike[str]) -> "Folder":
    """The folder at a path or URL, which need not exist. Relative paths are resolved immediately.

    Stores take their options, such as credentials, from fsspec's configuration. Raise a
    CheckpointError if ``place`` is neither, or if fsspec cannot open the URL.
    """
    if not isinstance(place, str | os.PathLike) or not isinstance(os.fspath(place), str):
        hint = "; sw.latest found no checkpoint" if place is None else ""
        raise CheckpointError(f"expected the path or URL of a checkpoint, got {place!r}{hint}")
    url = os.fspath(place)
    if not url:
        raise CheckpointError("expected the path or URL of a checkpoint, got an empty string")
    if "://" not in url:
        path = str(Path(url).absolute()).rstrip("/")  # "" is the root
        return LocalFolder(LocalFileSystem(), path, path)
    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        missing = getattr(error.__cause__ or error, "name", None)
        is_extra = url.startswith(("s3:", "s3a:"))
        advice = install("s3") if is_extra else f"pip install {missing}" if missing else ""
        raise CheckpointError(f"{url}: {error}{f' ({advice})' if advice else ''}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{url}: {error}; expected a directory or a URL that fsspec knows, such as "
            "s3://bucket/run/step-100"
        ) from error
    return Folder(store, path.rstrip("/"), url.rstrip("/"))


@dataclass(frozen=True)
class Folder:
    """The objects of a store whose names begin with ``path``, or a directory of a remote system.

    An object appears as a whole or not at all, so nothing is renamed. fsspec caches listings; the
    cache is dropped before each use.
    """

    store: Any  # an ``fsspec.AbstractFileSystem``
    path: str  # within the store
    url: str  # the path or URL as the user wrote it
    read_bytes = 4 << 20  # at once, a power of two
    num_readers = 8  # threads that should read at once; most of a request is waiting

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Self:
        return replace(self, path=self.path.rpartition("/")[0], url=self.url.rpartition("/")[0])

    @property
    def target(self) -> Path | str:
        """A path, or a URL."""
        return self.url

    @property
    def is_link(self) -> bool:
        return False

    def __truediv__(self, name: str) -> Self:
        return replace(self, path=f"{self.path}/{name}", url=f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        return bool(self._entries())

    def has(self, name: str) -> bool:
        with errors_at(self / name):
            self.store.invalidate_cache()
            try:
                return bool(self.store.info(f"{self.path}/{name}")["type"] == "file")
            except _ABSENT:
                return False

    def sizes(self) -> dict[str, int]:
        """The size in bytes of each file in the folder, sorted by name."""
        return {name: x["size"] for name, x in self._entries().items() if x["type"] != "directory"}

    def folders(self) -> list[Self]:
        """The folders in this one, sorted by name, including symbolic links to directories."""
        return [self / name for name, x in self._entries().items() if x["type"] == "directory"]

    def link_targets(self) -> set[str]:
        """The names of entries that symbolic links in the folder point to."""
        return set()

    def links(self) -> list[str]:
        """The names in the folder that are symbolic links, whose targets may be missing."""
        entries = self._entries().items()
        return [name for name, x in entries if x.get("islink") or x["type"] == "link"]

    def age_seconds(self, name: str) -> float:  # noqa: ARG002 - an object appears in one piece
        """The time since a file was last changed; inf if files appear as a whole."""
        return math.inf

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        """The first bytes of a file, or all of them."""
        with errors_at(self / name):
            span = {} if num_bytes is None else {"start": 0, "end": num_bytes}
            content: bytes = self.store.cat_file(f"{self.path}/{name}", **span)
            return content

    def open(self, name: str, cleanup: contextlib.ExitStack) -> ReadInto:  # noqa: ARG002
        """Return a function that reads a file, which stays open until ``cleanup`` ends.

        Each call sends one request.
        """
        return partial(_read_range, self / name)

    def create(self, marker: str, content: bytes) -> None:
        """Create the folder with one file, ``marker``, in it."""
        with errors_at(self):
            try:
                self.store.pipe_file(f"{self.path}/{marker}", content)
            except FileNotFoundError:  # the store has directories, or the bucket is missing
                _make_directory(self.store, self.path)
                self.store.pipe_file(f"{self.path}/{marker}", content)

    def put(self, name: str, content: bytes) -> None:
        with errors_at(self / name):
            self.store.pipe_file(f"{self.path}/{name}", content)

    def publish(self, name: str, content: bytes, marker: str) -> None:
        """Replace ``marker`` by a file atomically, after all other files are on disk."""
        self.put(name, content)
        with contextlib.suppress(CheckpointError):  # a marker next to a manifest is ignored
            self.remove(marker)

    def retract(self, name: str, marker: str) -> None:
        """Replace a file by ``marker``, the inverse of `publish`."""
        self.put(marker, b"")
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if it still exists."""
        with errors_at(self / name), contextlib.suppress(FileNotFoundError):
            self.store.rm_file(f"{self.path}/{name}")

    def remove_all_but(self, name: str) -> None:
        for folder in self.folders():
            folder.remove_all_but("")
            folder.remove_empty()
        for found in self.sizes():
            if found != name:
                self.remove(found)

    def remove_empty(self) -> None:
        # Most stores have no directories to remove. At the top level, this would be the bucket.
        if "/" in self.path and not self._entries():
            with contextlib.suppress(Exception):
                self.store.rmdir(self.path)

    def _entries(self) -> Mapping[str, Mapping[str, Any]]:
        """The ``type`` and ``size`` of each entry of the folder, by name."""
        with errors_at(self):
            self.store.invalidate_cache()
            try:
                entries = self.store.ls(self.path, detail=True)
            except _ABSENT:
                return {}
        found = {entry["name"].rstrip("/"): entry for entry in entries}
        inside = {path.rsplit("/", 1)[-1]: x for path, x in found.items() if path != self.path}
        return dict(sorted(inside.items()))


def _read_range(file: Folder, content: memoryview, offset: int) -> bool:
    with errors_at(file):
        found = file.store.cat_file(file.path, start=offset, end=offset + content.nbytes)
    if len(found) != content.nbytes:
        return False
    content[:] = found
    return True


class LocalFolder(Folder):
    """A directory of this machine, or of a file system mounted on it.

    All ranks write to the same files, which are synced to disk before the manifest is renamed.
    The directory may be a symbolic link, and so may files that are read. No file is written through
    a link.
    """

    read_bytes = 256 << 10  # fits in the processor's cache while its checksum is computed
    num_readers = 1  # sources close files between two reads

    @property
    def target(self) -> Path:
        return Path(self.path or "/")

    @property
    def is_link(self) -> bool:
        return self.target.is_symlink()

    def exists(self) -> bool:
        return self.target.is_dir()

    def has(self, name: str) -> bool:
        return (self.target / name).is_file()

    def link_targets(self) -> set[str]:
        root = self.target.resolve()
        targets = [path.resolve() for path in self._paths() if path.is_symlink()]
        return {
            target.relative_to(root).parts[0]
            for target in targets
            if target != root and target.is_relative_to(root)
        }

    def links(self) -> list[str]:
        return [path.name for path in self._paths() if path.is_symlink()]

    def age_seconds(self, name: str) -> float:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - (self.target / name).stat().st_mtime
        return 0.0

    def open(self, name: str, cleanup: contextlib.ExitStack) -> ReadInto:
        file = cleanup.enter_context((self.target / name).open("rb", buffering=0))
        return partial(_read_local, file.fileno())

    def create(self, marker: str, content: bytes) -> None:
        while True:
            new = [path for path in (self.target, *self.target.parents) if not path.exists()]
            self.target.mkdir(parents=True, exist_ok=True)
            for path in new:
                sync(path.parent)
            with contextlib.suppress(FileNotFoundError):  # a Retention removed the empty directory
                with open(self.target / marker, "wb", opener=open_unlinked) as file:
                    file.write(content)
                return

    def publish(self, name: str, content: bytes, marker: str) -> None:
        with open(self.target / marker, "wb", opener=open_unlinked) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync(self.target)
        (self.target / marker).rename(self.target / name)
        sync(self.target)
        sync(self.target.parent)

    def retract(self, name: str, marker: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process is also removing it
            (self.target / name).rename(self.target / marker)
            sync(self.target)

    def remove_all_but(self, name: str) -> None:
        for path in self._paths():
            if path.name == name:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        with contextlib.suppress(OSError):  # it is not empty
            self.target.rmdir()

    def _entries(self) -> Mapping[str, Mapping[str, Any]]:
        found = {}
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if path.is_dir():
                    found[path.name] = {"type": "directory", "size": 0}
                elif path.is_file():  # and not a broken link
                    found[path.name] = {"type": "file", "size": path.stat().st_size}
        return found

    def _paths(self) -> list[Path]:
        try:
            return sorted(self.target.iterdir())
        except _ABSENT:
            return []


def _read_local(descriptor: int, content: memoryview, offset: int) -> bool:
    while content.nbytes:
        count = os.preadv(descriptor, [content], offset)
        if count == 0:
            return False
        content, offset = content[count:], offset + count
    return True


def open_unlinked(path: str | os.PathLike[str], flags: int) -> int:
    """Like `os.open`, but raise an OSError if ``path`` is a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def errors_at(place: Folder) -> Iterator[None]:
    """Turn a store's errors, whose types differ between stores, into a CheckpointError."""
    try:
        yield
    except Exception as error:
        if isinstance(place, LocalFolder):  # an OSError, which names the path
            raise
        reason = str(error) or "the store gave no reason"
        raise CheckpointError(f"{place}: {type(error).__name__}: {reason}") from error


def _make_directory(store: Any, path: str) -> None:
    """Like ``mkdir --parents``, but never create a bucket, whose name may be misspelled."""
    parent = path.rpartition("/")[0]
    if not parent:
        return
    _make_directory(store, parent)
    with contextlib.suppress(FileExistsError):
        store.mkdir(path, create_parents=False)
