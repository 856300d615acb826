"""Where checkpoints are: in directories here, or in what `fsspec` reaches by a URL.

Everything else in this package looks at a checkpoint through a `Folder`, so that it need not know.
Only writing differs: into files here all ranks write in place; a store takes whole objects.
"""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Folder", "Local", "Reading", "sync"]


class Reading(Protocol):
    """A file that is open for reading."""

    def fill(self, into: memoryview, offset: int) -> bool:
        """Fill ``into`` with bytes of the file; False if it ends before."""
        ...

    def close(self) -> None: ...


class Folder(Protocol):
    """A checkpoint, or what several are in; it need not be there.

    All that is asked is what is there now, whoever has put it there. What goes wrong is an OSError
    or a CheckpointError that names the place.
    """

    read_bytes: int  # what is read at once, a power of two: small where that is quick
    num_readers: int  # threads

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> "Folder": ...

    @property
    def target(self) -> Path | str:
        """What the user calls it."""
        ...

    def __truediv__(self, name: str) -> "Folder": ...

    def exists(self) -> bool: ...

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        ...

    def sizes(self) -> dict[str, int]:
        """The bytes of each file that is there, by name, sorted."""
        ...

    def folders(self) -> "list[Folder]":
        """Those directly in it, sorted by name, symbolic links to directories included."""
        ...

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        ...

    def link_targets(self) -> set[str]:
        """The names of entries that symbolic links in it point to."""
        ...

    def age_seconds(self, name: str) -> float:
        """The time since a file was last changed; inf if files appear in one piece."""
        ...

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        """The first bytes of a file, or all."""
        ...

    def open(self, name: str) -> Reading: ...

    def make(self, marker: str, content: bytes) -> None:
        """Create it, with a file in it."""
        ...

    def publish(self, name: str, content: bytes, marker: str) -> None:
        """Let ``name`` be there, at once, in the place of ``marker``; all else is there to stay."""
        ...

    def retract(self, name: str, marker: str) -> None:
        """The reverse."""
        ...

    def remove(self, name: str) -> None: ...

    def remove_all_but(self, name: str) -> None:
        """Also the folders in it."""
        ...

    def remove_empty(self) -> None:
        """Remove it unless there is something in it."""
        ...


@dataclass(frozen=True)
class Local:
    """A directory of this machine, or of a file system that it has mounted."""

    path: Path
    read_bytes = 256 << 10  # in the processor's cache when it is checked, beside what it came from
    num_readers = 1

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> "Local":
        return Local(self.path.parent)

    @property
    def target(self) -> Path:
        return self.path

    def __truediv__(self, name: str) -> "Local":
        return Local(self.path / name)

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.is_dir()

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def sizes(self) -> dict[str, int]:
        if not self.path.is_dir():
            return {}
        return {path.name: path.stat().st_size for path in self._entries() if path.is_file()}

    def folders(self) -> list[Folder]:
        if not self.path.is_dir():
            return []
        return [Local(path) for path in self._entries() if path.is_dir()]

    @property
    def is_link(self) -> bool:
        return self.path.is_symlink()

    def link_targets(self) -> set[str]:
        root = self.path.resolve()
        targets = [path.resolve() for path in self._entries() if path.is_symlink()]
        return {
            target.relative_to(root).parts[0]
            for target in targets
            if target != root and target.is_relative_to(root)
        }

    def age_seconds(self, name: str) -> float:
        return time.time() - (self.path / name).stat().st_mtime

    def read(self, name: str, num_bytes: int | None = None) -> bytes:
        with (self.path / name).open("rb") as file:
            return file.read() if num_bytes is None else file.read(num_bytes)

    def open(self, name: str) -> Reading:
        return _Descriptor(self.path / name)

    def make(self, marker: str, content: bytes) -> None:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a Retention removed the empty directory
                (self.path / marker).write_bytes(content)
                return

    def publish(self, name: str, content: bytes, marker: str) -> None:
        with (self.path / marker).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync(self.path)
        (self.path / marker).rename(self.path / name)
        sync(self.path)
        sync(self.path.parent)

    def retract(self, name: str, marker: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            (self.path / name).rename(self.path / marker)
            sync(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_all_but(self, name: str) -> None:
        for entry in self._entries():
            if entry.name == name:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        with contextlib.suppress(OSError):  # the user put something there
            self.path.rmdir()

    def _entries(self) -> list[Path]:
        return sorted(self.path.iterdir())


class _Descriptor:
    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY)

    def fill(self, into: memoryview, offset: int) -> bool:
        while into.nbytes:
            count = os.preadv(self._number, [into], offset)
            if count == 0:
                return False
            into, offset = into[count:], offset + count
        return True

    def close(self) -> None:
        os.close(self._number)


def sync(directory: Path) -> None:
    """Bring the names of its files to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
