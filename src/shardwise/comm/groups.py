"""Creation of process groups, and what their backends are called."""

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise._private import group_timeout, new_nccl_group, new_registered_group
from shardwise.comm.api import RankGroup
from shardwise.comm.backends import capabilities_of
from shardwise.comm.device import own_device

__all__ = [
    "accelerator_type",
    "backend_of",
    "backends_of",
    "becomes_true",
    "new_group",
    "rank_device",
]

_PAUSE_SECONDS = 0.01, 0.5  # between two looks at the store: at first, and at most


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """Return the backend of ``group`` for ``device_type``: "gloo", "nccl", "fake", ... or None."""
    return backends_of(group).get(device_type)


def accelerator_type(group: dist.ProcessGroup | None) -> str | None:
    """Return the type of accelerators that ``group`` has a backend for, or None."""
    backends = backends_of(group).items()
    return next((kind for kind, name in backends if capabilities_of(name).is_stream_ordered), None)


def rank_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the accelerator that ``group`` or the job is bound to, or `own_device`."""
    for one in (group, dist.group.WORLD):
        if one is not None and one.bound_device_id is not None:
            return one.bound_device_id
    return own_device()


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of ``group`` by device type."""
    if group is None:
        return {}
    pairs = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in pairs)


def new_group(
    group: RankGroup, backend: str | None, name: str, *, without_kernels: bool = False
) -> dist.ProcessGroup:
    """Create a process group of the ranks of ``group``, in the order of their slots.

    Only these ranks call this, with the same ``name``, which no other group of theirs has.
    `torch.distributed.new_group` derives the name from the number of existing groups, so ranks that
    have created other groups would wait forever; it also sorts the ranks, and ignores the timeout
    of the job.
    """
    parent, world = group.parent, dist.group.WORLD
    assert parent is not None
    assert world is not None
    members = dist.get_process_group_ranks(parent)
    ranks = [members[rank] for rank in group.ranks]
    name = f"{parent.group_name}/{name}/{group.digest}"
    timeout = group_timeout(parent)
    # In a job that is bound to devices, torch would split the communicator of all its ranks.
    is_bound = world.bound_device_id is not None and len(ranks) < world.size()
    if backend == "nccl" and is_bound:
        return new_nccl_group(ranks, name, timeout, without_kernels=without_kernels)
    backend = backend or dist.get_backend_config(parent)
    return new_registered_group(ranks, backend, name, timeout, without_kernels=without_kernels)


def becomes_true(condition: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Whether ``condition``, which reads the store, becomes true in the next ``seconds``.

    It polls: after a `Store.wait` that times out just as its key is set, the same connection may
    get no answers any more.
    """
    until, pause = time.monotonic() + seconds, _PAUSE_SECONDS[0]
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])
    return True
