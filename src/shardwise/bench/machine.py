"""The machine that runs a benchmark: its description and its load."""

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

__all__ = [
    "describe_machine",
    "read_field",
    "reference_seconds",
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
