"""The machine that runs a benchmark: its description, its load, and this process's memory."""

import ctypes
import functools
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from shardwise.forecast.memory.process import resident_bytes, set_mmap_threshold

__all__ = [
    "Peak",
    "SharedMemoryUse",
    "allocated_bytes",
    "available_bytes",
    "busy_seconds",
    "describe_machine",
    "high_water_bytes",
    "reference_seconds",
    "reset_high_water",
    "resident_bytes",
    "set_mmap_threshold",
]

REFERENCE_WIDTH, REFERENCE_TURNS = 768, 2


def describe_machine() -> dict[str, str | int]:
    """Return hardware and versions for the JSON results; "" for missing parts."""
    return {
        "processor": read_field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": psutil.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardwise": _version("shardwise"),
        "deepspeed": _version("deepspeed"),
        "malloc": _malloc_settings(os.environ),
    }


def available_bytes() -> int:
    """Memory available without swapping."""
    return int(psutil.virtual_memory().available)


def busy_seconds() -> float:
    """CPU time of all processes on the machine."""
    cpu = psutil.cpu_times()
    # On Linux, guest time is part of user and nice time, and waiting for I/O is idle time.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(getattr(cpu, name) for name in cpu._fields if name not in idle))


def reference_seconds() -> float:
    """Time a fixed matrix product on all ranks at once; the time grows with other load."""
    matrix = torch.ones(REFERENCE_WIDTH, REFERENCE_WIDTH)
    barrier = dist.barrier if dist.is_initialized() else lambda: None
    barrier()
    began = time.perf_counter()
    for _ in range(REFERENCE_TURNS):
        matrix @ matrix
    barrier()
    return time.perf_counter() - began


def read_field(path: Path, name: str) -> str:
    """Return the value of a line ``name: value`` in a file of /proc; "" if there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _malloc_settings(environment: Mapping[str, str]) -> str:
    """Return settings of glibc's malloc, such as `MALLOC_MMAP_THRESHOLD_`."""
    names = sorted(n for n in environment if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES")
    return " ".join(f"{name}={environment[name]}" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


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
