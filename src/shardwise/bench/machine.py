"""The machine that runs the comparison: its description, its load, and this process's memory."""

import ctypes
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

__all__ = [
    "Clock",
    "Machine",
    "Peak",
    "SharedMemoryUse",
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
    """Hardware and versions, as results.json records them."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    shardwise: str  # "" if it is not installed as a package
    deepspeed: str  # "" if it is not compared
    malloc: str  # malloc settings in the environment; "" for the defaults


def describe_machine(*, with_deepspeed: bool) -> Machine:
    return Machine(
        processor=_read_field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        shardwise=_version("shardwise"),
        deepspeed=_version("deepspeed") if with_deepspeed else "",
        malloc=_malloc_settings(os.environ),
    )


def available_bytes() -> int:
    """Memory available without swapping."""
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True)
class Clock:
    """A point in time, in seconds."""

    now: float
    own: float  # CPU time of this process
    all: float  # busy CPU time of the whole machine

    @classmethod
    def read(cls) -> "Clock":
        cpu = psutil.cpu_times()
        # On Linux, guest time is part of user and nice time, and waiting for I/O is idle time.
        idle = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(getattr(cpu, name) for name in cpu._fields if name not in idle)
        return cls(time.perf_counter(), time.process_time(), busy)


def reference_seconds() -> float:
    """The time of a fixed matrix product on all ranks, which grows with other load."""
    one = torch.ones(REFERENCE_WIDTH, REFERENCE_WIDTH)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(REFERENCE_TURNS):
        one @ one
    dist.barrier()
    return time.perf_counter() - began


# -- the memory of this process ------------------------------------------------------------------


def set_mmap_threshold(num_bytes: int) -> None:
    """Have glibc return blocks of at least this size to the system when they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries may lack it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2``; only the fields that are read have names."""

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
    """Bytes allocated from malloc by any thread and not freed; 0 without glibc 2.33."""
    if _malloc_info is None:
        return 0
    info = _malloc_info()
    return int(info.mapped + info.in_heaps)


class Peak:
    """The largest value of ``read()`` inside the context, minus the value before it.

    Args:
        read: returns bytes; called on a thread.
        seconds: between two calls.
    """

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
    """Reset the peak of resident memory, where the kernel allows it (Linux, proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def high_water_bytes() -> int:
    """The peak of resident memory since `reset_high_water`, which psutil does not report."""
    return _read_kilobytes(Path("/proc/self/status"), "VmHWM")


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, slots=True)
class SharedMemoryUse:
    """Resident shared memory of this process, in bytes."""

    resident: int
    share: int  # each page divided by the number of processes that map it

    @classmethod
    def read(cls) -> "SharedMemoryUse":
        resident = _read_kilobytes(Path("/proc/self/status"), "RssShmem")
        rollup = Path("/proc/self/smaps_rollup")
        if not _read_field(rollup, "Pss_Shmem"):  # Linux before 5.9
            return cls(resident, resident)
        return cls(resident, _read_kilobytes(rollup, "Pss_Shmem"))


def _malloc_settings(environment: Mapping[str, str]) -> str:
    """The settings of glibc's malloc, such as `MALLOC_MMAP_THRESHOLD_`."""
    names = sorted(n for n in environment if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES")
    return " ".join(f"{name}={environment[name]}" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read_kilobytes(path: Path, name: str) -> int:
    return int((_read_field(path, name) or "0").split()[0]) * 1024


def _read_field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
