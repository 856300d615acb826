"""The memory of this process, and how glibc returns it to the system."""

import contextlib
import ctypes
from collections.abc import Iterator

import psutil

__all__ = ["count_growth", "growths", "release_memory", "resident_bytes", "set_mmap_threshold"]

_M_MMAP_THRESHOLD = -3  # option of mallopt(3)


growths: list[int] = []  # in bytes; per process, because libraries keep their memory


@contextlib.contextmanager
def count_growth() -> Iterator[None]:
    """Add to `growths` by how much the memory of this process grows in the body."""
    before = resident_bytes()
    yield
    growths.append(max(0, resident_bytes() - before))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def set_mmap_threshold(num_bytes: int) -> None:
    """Make glibc return blocks of at least this size to the system when they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries may lack it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)


def release_memory() -> None:
    """Make glibc return freed memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
