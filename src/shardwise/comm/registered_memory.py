"""Memory that a backend has registered: collectives need no copies, and fewer multiprocessors.

`ProcessGroupCollectives.allocate` returns it. *Registered* memory comes from the backend's own
allocator. *Symmetric* memory (torch's ``symm_mem``, through NCCL) has the same offset in one window
on all ranks, so they allocate it together and in the same order.
"""

from enum import StrEnum

import torch

from shardwise._private import can_swap_storages, has_symmetric_memory, tensor_allocator
from shardwise.comm.api import RankGroup
from shardwise.errors import PlanError

__all__ = ["MemoryKind", "check_memory"]


class MemoryKind(StrEnum):
    """The memory of the buffers of collectives."""

    OWN = "own"  # from torch's allocator
    REGISTERED = "registered"
    SYMMETRIC = "symmetric"


def check_memory(kind: MemoryKind, world: RankGroup, device: torch.device) -> None:
    """Raise an error if the backend of ``world`` does not have memory of this kind.

    Raises:
        PlanError: names the backend, or what torch lacks, and what to do.
    """
    if kind is MemoryKind.OWN or world.parent is None:
        return
    backend = world.parent.name()
    if not can_swap_storages():
        raise PlanError(
            f"memory that {backend} allocates cannot be used with torch {torch.__version__}, which "
            "cannot swap the memory of storages: install torch 2.12 or newer, or leave the call out"
        )
    if kind is MemoryKind.REGISTERED and tensor_allocator(world.parent, device) is None:
        raise PlanError(
            f"set_allocate_memory_from_process_group_for_comm(True): {backend} allocates no "
            f"tensors on {device}; use a backend that does (NCCL), or leave the call out"
        )
    if kind is MemoryKind.SYMMETRIC and not has_symmetric_memory(world.parent, device):
        raise PlanError(
            f"set_symm_mem_for_comm(): {backend} has no symmetric memory on {device}; use NCCL "
            "between GPUs, or leave the call out"
        )
