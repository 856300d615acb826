"""Puts the buffers of all collectives of a model into memory that their backend has registered."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from shardwise.errors import PlanError
from shardwise.plan.wire import EXACT
from shardwise.runtime.memory import Allocator, Pools
from shardwise.runtime.unit import Unit, plan_memory
from shardwise.schedule.events import Event
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.transport.api import RankGroup
from shardwise.transport.communicator import Collectives, communicator
from shardwise.transport.process_group import ProcessGroupCollectives
from shardwise.transport.registered_memory import MemoryKind, check_memory

__all__ = ["use_memory"]


def use_memory(
    kind: MemoryKind,
    units: Sequence[Unit],
    pools: Pools,
    mesh: DataParallelMesh,
    events: Callable[[], Iterable[Event]],
) -> None:
    """Between steps: have all collectives of a model work in memory of this kind.

    Args:
        kind: which the backend of ``mesh`` has to have.
        units: of the model.
        pools: of the model.
        mesh: of the model.
        events: of an imagined step.

    Raises:
        PlanError: the backend has none, or some units have ranks of their own.
        StepError: a step is under way.
    """
    if kind is pools.kind or mesh.num_ranks == 1:
        return
    if any(unit.plan.wire != EXACT for unit in units):
        raise PlanError(
            f"a model with a Wire cannot have the memory of its collectives in {kind} memory: what "
            "they send is encoded elsewhere; leave the call out, or the wire"
        )
    check_memory(kind, mesh.world, pools.device)
    if any(flat.mesh.shards != mesh.shards for unit in units for flat in unit.flats):
        raise PlanError(
            "units with other ranks than the model (experts) cannot have the memory of their "
            f"collectives in {kind} memory; leave the call out"
        )
    links = communicator(mesh.world, pools.device)
    reduced = next((s.group for s in mesh.reduction if s.group.size > 1), mesh.row)
    allocators = [
        _allocator(queue, kind, group, only_moves=queue is links.gather)
        for queue, group in ((links.gather, mesh.shards), (links.reduce, reduced))
    ]
    pools.use(kind, *allocators)
    for gradients in chain.from_iterable(unit.gradients for unit in units):
        gradients.use_memory_of(None if kind is MemoryKind.OWN else pools.registered_gradients)
    plan_memory(units, events())


def _allocator(
    queue: Collectives, kind: MemoryKind, group: RankGroup, *, only_moves: bool
) -> Allocator | None:
    assert isinstance(queue, ProcessGroupCollectives), "`check_memory` was called"
    queue.use_memory(kind, only_moves=only_moves)
    if kind is MemoryKind.OWN or group.size == 1:
        return None
    return lambda num_bytes, what: queue.allocate(num_bytes, group, what)
