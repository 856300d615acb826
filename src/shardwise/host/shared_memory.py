"""Memory that ranks of one host share: one copy of a gathered unit per host, not one per rank.

Every rank allocates its gathered buffers in anonymous files in memory. If all ranks that gather a
unit use the same buffers at that time, all of them compute in the range of the first rank, which
sends its open file and the offset: each rank writes its shard there, and nothing else is copied.
The other ranges are never touched, so they take no memory.

A range is written only when all ranks have entered this all-gather, so all have freed its earlier
contents. If they do not use the same buffers, for example because an exception on one rank has
freed a buffer that another rank still uses, each rank gathers in private memory.
"""

import contextlib
import mmap
import os
import secrets
import struct
import weakref
from typing import NamedTuple

import torch

from shardwise.host.peers import Descriptor

__all__ = ["Place", "SharedMemory", "is_offered"]

_MAX_SEGMENTS = 16  # each takes two file descriptors, of which a process may have 1024


class Place(NamedTuple):
    """The position of a buffer in the shared memory of a process; ``number`` 0: nowhere."""

    in_use: int  # the buffers in use
    owner: int = 0  # id of the `SharedMemory`
    number: int = 0  # of the segment
    oldest: int = 0  # lowest number of a segment that the owner still has
    offset: int = 0

    def pack(self) -> bytes:
        return struct.pack("<5q", *self)

    @staticmethod
    def unpack(message: bytes) -> "Place":
        return Place(*struct.unpack("<5q", message))


# If the system has such files but forbids them, memory is private.
is_offered = hasattr(os, "memfd_create")


class _Segment(mmap.mmap):
    """A mapped file in memory that can be passed to other processes."""

    file: Descriptor
    number: int


def _make_segment(num_bytes: int) -> _Segment:
    file = Descriptor(os.memfd_create("shardwise"))
    os.ftruncate(file.number, num_bytes)
    segment = _Segment(file.number, num_bytes)
    segment.file = file
    return segment


class SharedMemory:
    """Memory of this process that other processes use, and theirs that this one uses."""

    def __init__(self) -> None:
        self._id = secrets.randbits(62)
        self._num_segments = 0
        self._own: weakref.WeakValueDictionary[int, _Segment] = weakref.WeakValueDictionary()
        # Segments of other processes, by device and inode of the file.
        self._opened: dict[tuple[int, int], tuple[Place, mmap.mmap]] = {}

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate memory whose pages are taken when written to; private if there are too many."""
        segment: _Segment | None = None
        if len(self._own) < _MAX_SEGMENTS:
            with contextlib.suppress(OSError):  # too many open files, or they are forbidden
                segment = _make_segment(num_bytes)
        if segment is None:
            return torch.UntypedStorage(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
        self._num_segments += 1
        segment.number = self._num_segments
        storage = _storage(segment, 0, num_bytes)
        self._own[storage.data_ptr()] = segment
        return storage

    def locate(self, address: int, in_use: int) -> tuple[Place, int]:
        """Return the place of memory from `allocate`, and its file, for other processes.

        Call it where `allocate` is called. The file is -1 if there is none.
        """
        segments = dict(self._own)
        start = max((start for start in segments if start <= address), default=0)
        if not start or address >= start + len(segments[start]):
            return Place(in_use), -1
        oldest = min(segment.number for segment in segments.values())
        segment = segments[start]
        place = Place(in_use, self._id, segment.number, oldest, address - start)
        return place, segment.file.number

    def open(self, file: Descriptor, place: Place, num_bytes: int) -> torch.UntypedStorage:
        """Return the memory at ``place`` in the ``file`` of another process.

        Raises:
            OSError: the file cannot be mapped.
            ConnectionError: the file is smaller than the other process says.
        """
        status = os.fstat(file.number)
        end = place.offset + num_bytes
        if place.offset < 0 or end > status.st_size:
            raise ConnectionError(
                f"bytes {place.offset} to {end} are not in a file of {status.st_size}"
            )
        key = status.st_dev, status.st_ino  # unique while the file is mapped
        if key not in self._opened:
            self._forget(place)
        opened = self._opened.pop(key, None) or (place, mmap.mmap(file.number, 0))
        self._opened[key] = opened  # now the most recently used
        return _storage(opened[1], place.offset, num_bytes)

    def _forget(self, place: Place) -> None:
        """Drop segments that the owner has freed, and the least recently used if there are many."""
        for key, (opened, _) in list(self._opened.items()):
            if opened.owner == place.owner and opened.number < place.oldest:
                del self._opened[key]
        if len(self._opened) >= _MAX_SEGMENTS:
            del self._opened[next(iter(self._opened))]


def _storage(memory: mmap.mmap, offset: int, num_bytes: int) -> torch.UntypedStorage:
    """Return a storage that keeps ``memory`` mapped."""
    part = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=num_bytes)
    return part.untyped_storage()
