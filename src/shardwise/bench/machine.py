"""The machine: what it is, and how busy it was with other things than this."""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = [
    "Clock",
    "Machine",
    "Peak",
    "allocated_bytes",
    "available_bytes",
    "describe_machine",
    "high_water_bytes",
    "reference_seconds",
    "reset_high_water",
    "resident_bytes",
    "set_mmap_threshold",
]

REFERENCE_WIDTH, REFERENCE_TURNS = 768, 2
_M_MMAP_THRESHOLD = -3  # of mallopt(3)


@dataclass(frozen=True, slots=True)
class Machine:
    """What ran it."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    shardwise: str  # "" where it runs from its source
    deepspeed: str  # "" where it is not compared
    malloc: str  # what the environment sets of it; "" as it comes


def describe_machine(*, with_deepspeed: bool) -> Machine:
    return Machine(
        processor=_field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=_kilobytes(Path("/proc/meminfo"), "MemTotal"),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        shardwise=_version("shardwise"),
        deepspeed=_version("deepspeed") if with_deepspeed else "",
        malloc=_malloc_settings(os.environ),
    )


def _malloc_settings(environment: Mapping[str, str]) -> str:
    """Those of glibc: `MALLOC_MMAP_THRESHOLD_` and its like."""
    names = sorted(n for n in environment if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES")
    return " ".join(f"{name}={environment[name]}" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def available_bytes() -> int:
    """Memory that can be had without swapping; 0 where nothing says."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


@dataclass(frozen=True, slots=True)
class Clock:
    """A moment; times in seconds."""

    now: float
    own: float  # of CPU, this process
    all: float  # of CPU, the whole machine; 0 where there is no /proc/stat

    @classmethod
    def read(cls) -> "Clock":
        return cls(time.perf_counter(), time.process_time(), _busy_seconds())


def reference_seconds() -> float:
    """How long a fixed product of matrices takes on all ranks: longer where others compute."""
    one = torch.ones(REFERENCE_WIDTH, REFERENCE_WIDTH)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(REFERENCE_TURNS):
        one @ one
    dist.barrier()
    return time.perf_counter() - began


# -- this process's memory -----------------------------------------------------------------------


def set_mmap_threshold(num_bytes: int) -> None:
    """Have glibc give blocks of this size and more back to the system when they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library may have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2``; those of its fields that count here have names of their own."""

    _fields_ = (
        ("_before", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),
        ("_between", ctypes.c_size_t * 2),
        ("in_heaps", ctypes.c_size_t),
        ("_after", ctypes.c_size_t * 2),
    )


def _find_malloc_info() -> Callable[[], _MallocInfo] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2  # glibc 2.33 and later
    except (AttributeError, OSError, TypeError):
        return None
    found.restype = _MallocInfo
    info: Callable[[], _MallocInfo] = found
    return info


_malloc_info = _find_malloc_info()


def allocated_bytes() -> int:
    """What malloc has given out, to any thread, and not got back; 0 where nothing says."""
    if _malloc_info is None:
        return 0
    info = _malloc_info()
    return int(info.mapped + info.in_heaps)


class Peak:
    """The most that ``read()`` says while it is open, above what it said before.

    Args:
        read: bytes; called on a thread.
        seconds: between two calls.
    """

    def __init__(self, read: Callable[[], int], seconds: float) -> None:
        self.bytes = 0
        self._read = read
        self._seconds = seconds
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._run)

    def __enter__(self) -> "Peak":
        self._before = self._read()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watch.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.bytes = max(self.bytes, self._read() - self._before)


def reset_high_water() -> None:
    """Forget the peak of resident memory, where the kernel lets us (Linux, proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def high_water_bytes() -> int:
    return _kilobytes(Path("/proc/self/status"), "VmHWM")


def resident_bytes() -> int:
    return _kilobytes(Path("/proc/self/status"), "VmRSS")


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory of this process that others may have mapped as well; in bytes, as it is now."""

    resident: int
    share: int  # where each page counts by the number of processes that have it: 1/2, 1/3

    @classmethod
    def read(cls) -> "Shared":
        resident = _kilobytes(Path("/proc/self/status"), "RssShmem")
        rollup = Path("/proc/self/smaps_rollup")
        if not _field(rollup, "Pss_Shmem"):  # Linux before 5.9
            return cls(resident, resident)
        return cls(resident, _kilobytes(rollup, "Pss_Shmem"))


# -- /proc ---------------------------------------------------------------------------------------


def _busy_seconds() -> float:
    """CPU time of the whole machine that was not idle: /proc/stat, all but idle and iowait."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return 0.0
    ticks = [int(field) for field in first.split()[1:9]]  # guests are in user time already
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _kilobytes(path: Path, name: str) -> int:
    return int((_field(path, name) or "0").split()[0]) * 1024


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
