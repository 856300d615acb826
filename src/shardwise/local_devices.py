"""The devices of this machine: that of this rank, what it is called, and how much memory it has."""

import resource
import sys

import torch
import torch.distributed as dist

from shardwise.comm.backends import capabilities_of
from shardwise.comm.device import ON_HOST, own_device

__all__ = [
    "allocated_bytes",
    "local_device",
    "name_of",
    "num_allocation_failures",
    "num_local_accelerators",
    "peak_memory_bytes",
    "release_cached_memory",
    "total_memory_bytes",
]


def num_local_accelerators() -> int:
    """Return the number of this machine's accelerators; 0 if ranks compute on the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    if backend is None or not capabilities_of(backend).is_stream_ordered:
        return 0  # for example MPS, which has no collectives
    return torch.accelerator.device_count()


def local_device() -> torch.device:
    """Return this rank's device: an accelerator, which is made current, or the CPU."""
    if not num_local_accelerators():
        return torch.device("cpu")
    device = own_device()
    torch.accelerator.set_device_index(device.index)
    return device


def name_of(device: torch.device) -> str:
    """Return the name of a device, such as "cpu" or "NVIDIA H100"."""
    if device.type in ON_HOST:
        return device.type
    return str(torch.get_device_module(device).get_device_name(device))


def allocated_bytes(device: torch.device) -> int:
    """Return the memory of tensors on an accelerator."""
    return torch.accelerator.memory_allocated(device)


def release_cached_memory(device: torch.device) -> None:
    """Return idle memory of torch's allocator to an accelerator, for other processes."""
    if device.type not in ON_HOST:
        torch.accelerator.empty_cache()


def total_memory_bytes(device: torch.device) -> int | None:
    """Return the memory of an accelerator; None on the CPU."""
    return None if device.type in ON_HOST else torch.accelerator.get_memory_info(device)[1]


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: of tensors on an accelerator, or resident."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def num_allocation_failures(device: torch.device) -> int:
    """Return how often this process has run out of an accelerator's memory; 0 on the CPU."""
    if device.type in ON_HOST:
        return 0
    return int(torch.accelerator.memory_stats(device).get("num_ooms", 0))
