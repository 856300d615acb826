"""Measures the memory of this process, as counted by malloc and the kernel."""

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.bench.machine import read_field

__all__ = [
    "Peak",
    "SharedMemoryUse",
    "allocated_bytes",
    "high_water_bytes",
    "reset_high_water",
]


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2``; only the fields that are used have public names."""

    _fields_ = (
        ("_before", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),
        ("_between", ctypes.c_size_t * 2),
        ("in_heaps", ctypes.c_size_t),
        ("_after", ctypes.c_size_t * 2),
    )


@functools.cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2  # glibc 2.33 and later
    except (AttributeError, OSError, TypeError):
        return None
    found.restype = _MallocInfo
    info: Callable[[], _MallocInfo] = found
    return info


def allocated_bytes() -> int:
    """Return bytes allocated with malloc by any thread and not freed; 0 without glibc 2.33."""
    info = mallinfo() if (mallinfo := _mallinfo()) else _MallocInfo()
    return int(info.mapped + info.in_heaps)


class Peak:
    """The largest value of ``read()``, called on a thread, in the context, minus that before it."""

    def __init__(self, read: Callable[[], int], seconds: float) -> None:
        self.bytes = 0
        self._read = read
        self._seconds = seconds
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._run)

    def __enter__(self) -> "Peak":
        self._before = self._read()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._sampler.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.bytes = max(self.bytes, self._read() - self._before)


def reset_high_water() -> None:
    """Reset the peak of resident memory if the kernel allows it (Linux, proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def high_water_bytes() -> int:
    """Return the peak of resident memory since `reset_high_water`; psutil does not report it."""
    return _read_kilobytes(Path("/proc/self/status"), "VmHWM")


@dataclass(frozen=True, slots=True)
class SharedMemoryUse:
    resident: int
    share: int  # each page divided by the number of processes that map it

    @classmethod
    def read(cls) -> "SharedMemoryUse":
        resident = _read_kilobytes(Path("/proc/self/status"), "RssShmem")
        rollup = Path("/proc/self/smaps_rollup")
        if not read_field(rollup, "Pss_Shmem"):  # Linux before 5.9
            return cls(resident, resident)
        return cls(resident, _read_kilobytes(rollup, "Pss_Shmem"))


def _read_kilobytes(path: Path, name: str) -> int:
    return int((read_field(path, name) or "0").split()[0]) * 1024
