"""Puts the buffers of collectives into memory that a backend registers, or into symmetric one.

Collectives then need no copies, and fewer multiprocessors.
"""

import torch
import torch.distributed as dist

from shardwise._private import can_swap_storages, has_symmetric_memory, tensor_allocator
from shardwise.comm.api import MemoryKind, RankGroup
from shardwise.comm.communicator import Collectives, communicator
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.errors import PlanError
from shardwise.plan.wire import UNQUANTIZED
from shardwise.runtime.engine import Runtime
from shardwise.runtime.memory import Allocator

__all__ = ["use_memory"]


def use_memory(runtime: Runtime, kind: MemoryKind) -> None:
    """Between steps: put the buffers of all collectives into memory of this kind.

    Raises:
        PlanError: the backend has no such memory, or some units cannot use it.
        StepError: a step is in progress.
    """
    if kind is not runtime.pools.kind and runtime.mesh.num_ranks > 1:
        _check_memory(runtime, kind)
        _replace_memory(runtime, kind)
    for unit in runtime.units:
        unit.settings.collective_memory = kind


def _check_memory(runtime: Runtime, kind: MemoryKind) -> None:
    if any(unit.plan.options.wire != UNQUANTIZED for unit in runtime.units):
        raise PlanError(
            f"the collectives of a model with a Wire cannot use {kind} memory, because they "
            "send encoded data from other memory; leave out the call, or the wire"
        )
    group, device = runtime.mesh.world.parent, runtime.pools.device
    if kind is not MemoryKind.OWN and group is not None:
        _check_backend(kind, group, device)
    shards = runtime.mesh.shards
    if any(flat.mesh.shards != shards for unit in runtime.units for flat in unit.flats):
        raise PlanError(
            f"units with other ranks than the model (experts) cannot use {kind} memory for "
            "their collectives; leave out the call"
        )


def _check_backend(kind: MemoryKind, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise a PlanError if the backend has no such memory: it depends on its library's version."""
    backend = group.name()
    if not can_swap_storages():
        raise PlanError(
            f"memory that {backend} allocates cannot be used with torch {torch.__version__}, which "
            "cannot swap the memory of storages: install torch 2.12 or newer, or leave the call out"
        )
    if kind is MemoryKind.REGISTERED and tensor_allocator(group, device) is None:
        raise PlanError(
            f"set_allocate_memory_from_process_group_for_comm(True): {backend} allocates no "
            f"tensors on {device}; use a backend that does (NCCL), or leave the call out"
        )
    if kind is MemoryKind.SYMMETRIC and not has_symmetric_memory(group, device):
        raise PlanError(
            f"set_symm_mem_for_comm(): {backend} has no symmetric memory on {device}; use NCCL "
            "between GPUs, or leave the call out"
        )


def _replace_memory(runtime: Runtime, kind: MemoryKind) -> None:
    mesh = runtime.mesh
    comm = communicator(mesh.world, runtime.pools.device)
    reduced = next((stage.group for stage in mesh.reduction if stage.group.size > 1), mesh.row)
    runtime.pools.use(
        kind,
        _allocator(comm.gather, kind, mesh.shards, only_moves=comm.gather is not comm.reduce),
        _allocator(comm.reduce, kind, reduced, only_moves=False),
    )
    pool = None if kind is MemoryKind.OWN else runtime.pools.registered_gradients
    for gradients in runtime.scheduler.gradients:
        gradients.use_memory_of(pool)


def _allocator(
    queue: Collectives, kind: MemoryKind, group: RankGroup, *, only_moves: bool
) -> Allocator | None:
    """Switch ``queue`` to memory of this kind, and return its allocator."""
    assert isinstance(queue, ProcessGroupCollectives), "`_check_backend` was called"
    queue.use_memory(kind, only_moves=only_moves)
    if kind is MemoryKind.OWN or group.size == 1:
        return None
    return lambda num_bytes, purpose: queue.allocate(num_bytes, group, purpose)
