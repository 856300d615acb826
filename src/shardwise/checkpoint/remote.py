"""What `fsspec` reaches by a URL: object stores, and file systems of other machines.

An object is there as a whole or not at all, so nothing is renamed and nothing is brought to disk.
Stores with listings that lag behind are not what they were; those of fsspec, kept in memory, are
dropped before each look.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from shardwise.checkpoint.storage import Folder, Local, Reading
from shardwise.errors import CheckpointError

__all__ = ["Remote", "Upload", "folder_at"]

PART_BYTES = 8 << 20  # of an upload; S3 wants 5 MiB at least
_MAX_PARTS = 9000  # S3 takes 10,000
_ABSENT = (FileNotFoundError, NotADirectoryError)


def folder_at(place: str | os.PathLike[str]) -> Folder:
    """What is at a path or a URL, or will be. Options of a store are those that fsspec is set to.

    Raises:
        CheckpointError: nobody knows the protocol, or its package is not installed.
    """
    if not isinstance(place, str | os.PathLike) or not isinstance(os.fspath(place), str):
        hint = "; sw.latest found no checkpoint" if place is None else ""
        raise CheckpointError(f"expected the path or URL of a checkpoint, got {place!r}{hint}")
    url = str(os.fspath(place))
    if not url:
        raise CheckpointError("expected the path or URL of a checkpoint, got an empty string")
    if "://" not in url:
        return Local(Path(url).absolute())
    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        missing = getattr(error.__cause__ or error, "name", None)
        advice = f" (pip install {missing})" if missing else ""
        raise CheckpointError(f"{url}: {error}{advice}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{url}: {error}; expected a directory or a URL that fsspec knows, such as "
            "s3://bucket/run/step-100"
        ) from error
    return Remote(store, path.rstrip("/"), url.rstrip("/"))


@dataclass(frozen=True)
class Remote:
    """All that has the same beginning; where the store has directories, one of them."""

    store: Any
    path: str  # as the store has it
    url: str
    read_bytes = 4 << 20
    num_readers = 8  # requests wait for the store more than they take

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> "Remote":
        return Remote(self.store, self.path.rpartition("/")[0], self.url.rpartition("/")[0])

    @property
    def target(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self.store, f"{self.path}/{name}", f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        return bool(self._list())

    def has(self, name: str) -> bool:
        with _named(f"{self.url}/{name}"):
            self.store.invalidate_cache()
            try:
                return bool(self.store.info(f"{self.path}/{name}")["type"] == "file")
            except _ABSENT:
                return False

    def sizes(self) -> dict[str, int]:
        return {name: x["size"] for name, x in self._list().items() if x["type"] != "directory"}

    def folders(self) -> list[Folder]:
        return [self / name for name, x in self._list().items() if x["type"] == "directory"]

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        with _named(f"{self.url}/{name}"):
            span = {} if num_bytes is None else {"start": 0, "end": num_bytes}
            content: bytes = self.store.cat_file(f"{self.path}/{name}", **span)
            return content

    def open(self, name: str) -> Reading:
        return _Ranges(self / name)

    is_link = False

    def link_targets(self) -> set[str]:
        return set()

    def age_seconds(self, name: str) -> float:  # noqa: ARG002 - an object appears in one piece
        return math.inf

    def make(self, marker: str, content: bytes) -> None:
        with _named(self.url):
            try:
                self.store.pipe_file(f"{self.path}/{marker}", content)
            except FileNotFoundError:  # there are directories, or the bucket is missing
                _make_directory(self.store, self.path)
                self.store.pipe_file(f"{self.path}/{marker}", content)

    def put(self, name: str, content: bytes) -> None:
        """Store an object of that name, in one request."""
        with _named(f"{self.url}/{name}"):
            self.store.pipe_file(f"{self.path}/{name}", content)

    def publish(self, name: str, content: bytes, marker: str) -> None:
        self.put(name, content)
        with contextlib.suppress(CheckpointError):  # of no account beside the other
            self.remove(marker)

    def retract(self, name: str, marker: str) -> None:
        self.put(marker, b"")
        self.remove(name)

    def remove(self, name: str) -> None:
        with _named(f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            self.store.rm_file(f"{self.path}/{name}")

    def remove_all_but(self, name: str) -> None:
        for folder in self.folders():
            folder.remove_all_but("")
            folder.remove_empty()
        for found in self.sizes():
            if found != name:
                self.remove(found)

    def remove_empty(self) -> None:
        # Elsewhere there is nothing left to remove; at the top it would be the bucket.
        if "/" in self.path and not self._list():
            with contextlib.suppress(Exception):
                self.store.rmdir(self.path)

    def _list(self) -> Mapping[str, Mapping[str, Any]]:
        with _named(self.url):
            self.store.invalidate_cache()
            try:
                entries = self.store.ls(self.path, detail=True)
            except _ABSENT:
                return {}
        found = {entry["name"].rstrip("/"): entry for entry in entries}
        inside = {path.rsplit("/", 1)[-1]: x for path, x in found.items() if path != self.path}
        return dict(sorted(inside.items()))


class Upload:
    """A file on its way to the store, which has it once it is closed."""

    def __init__(self, folder: Remote, name: str, num_bytes: int) -> None:
        self._url = f"{folder.url}/{name}"
        part_bytes = max(PART_BYTES, -(-num_bytes // _MAX_PARTS))
        with _named(self._url):
            self._file = folder.store.open(f"{folder.path}/{name}", "wb", block_size=part_bytes)

    def write(self, content: memoryview | bytes) -> None:
        with _named(self._url):
            self._file.write(content)

    def close(self) -> None:
        with _named(self._url):
            self._file.close()

    def discard(self) -> None:
        """Let go of it. Not every store can forget it; there, half a file is left to be removed."""
        for end in (self._file.discard, self._file.close):  # or the collector would close it, later
            with contextlib.suppress(Exception):
                end()


class _Ranges:
    def __init__(self, file: Remote) -> None:
        self._file = file

    def fill(self, into: memoryview, offset: int) -> bool:
        stop = offset + into.nbytes
        with _named(self._file.url):
            content = self._file.store.cat_file(self._file.path, start=offset, end=stop)
        if len(content) != into.nbytes:
            return False
        into[:] = content
        return True

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Every store has errors of its own."""
    try:
        yield
    except Exception as error:
        reason = str(error) or "no reason is given"
        raise CheckpointError(f"{url}: {type(error).__name__}: {reason}") from error


def _make_directory(store: Any, path: str) -> None:
    """As mkdir --parents, and never a bucket, whose name may be misspelt."""
    parent = path.rpartition("/")[0]
    if not parent:
        return
    _make_directory(store, parent)
    with contextlib.suppress(FileExistsError):
        store.mkdir(path, create_parents=False)
