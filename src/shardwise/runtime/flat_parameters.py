"""The parameters of one layout of a unit: their shard, and the buffers that come and go.

Between steps there is the persistent ``shard`` [S] alone, which the parameters view::

    between steps   shard [S]   p = ShardedTensor(run of shard)
    in use          buffer [world_size * S], dense parameters view it    <- all-gather of shards
    to be so again  part [world_size * S / subgroup]                     -> all-gather in subgroup
    in backward     gradients [world_size * S], one slot a parameter     -> reduce-scatter
    after it        gradient shard [S]   p.grad = ShardedTensor(run of it)
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.plan.layout import Layout
from shardwise.plan.units import UnitPlan
from shardwise.runtime import hooks
from shardwise.runtime.chunked_buffer import ChunkedBuffer, flat_buffer
from shardwise.runtime.gradient_shards import ShardOffloader
from shardwise.runtime.gradients import GradientBuffer
from shardwise.runtime.memory import Arena, FlatBuffer, Pool, Pools
from shardwise.runtime.parameters import FSDPParameter
from shardwise.schedule.events import Event, EventKind
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharding import local_of
from shardwise.transport.api import Work
from shardwise.transport.communicator import Collectives
from shardwise.transport.device import copy_
from shardwise.transport.host.peers import INLINE_BYTES

__all__ = ["FlatParameters", "plan_memory"]

SMALL_BYTES = INLINE_BYTES  # a shard that is sent at once; to agree on memory takes a message more


class FlatParameters:
    """The parameters of one layout."""

    def __init__(
        self,
        layout: Layout,
        mesh: DataParallelMesh,
        pools: Pools,
        plan: UnitPlan,
        offloader: ShardOffloader | None = None,
    ) -> None:
        self.layout = layout
        self._plan = plan
        self._pools = pools
        self.offloader = offloader  # if the shard is on the host
        self.mesh = mesh
        self.is_whole = not layout.needs_gather  # the shard is the buffer: nothing to gather
        self._device_copy: Tensor | None = None  # [S], of a shard on the host
        self.device_copy_is_stale = True
        self.parameters: list[FSDPParameter] = []  # in the order of the layout's extents
        self._allocate()
        trainable = layout.extents[0].parameter.trainable
        self.gradients = (
            GradientBuffer(
                layout,
                self.parameters,
                mesh,
                pools.outer_gradients if plan.has_child_units else pools.gradients,
                offloader,
                owns_buffer=plan.holds_gradients,
                has_child_units=plan.has_child_units,
                divisor=plan.gradient_divisor,
            )
            if trainable
            else None
        )

    def _allocate(self) -> None:
        """Make the shard and the buffer."""
        layout, plan, pools = self.layout, self._plan, self._pools
        is_small = layout.gathered_bytes <= SMALL_BYTES * layout.world_size
        pool = self._pool = pools.own if plan.subgroup or is_small else pools.gathered
        self._part: Tensor | None = None  # [world_size * S / subgroup]
        self._part_owner = f"part for {layout.extents[0].parameter.name}"
        compute_dtype = layout.cast.compute_dtype
        self.buffer = flat_buffer(
            layout, pool, pools.own, dtype=compute_dtype, owns_memory=self.is_whole
        )
        # In the dtype of the shard, between steps.
        self._held: FlatBuffer | ChunkedBuffer | None = None
        self.shard = self._allocate_shard()

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The gathered parameters."""
        return self.buffer.views

    def listen(self, position: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` for each gradient that autograd has put on a dense parameter."""
        hooks.on_gradient(self.parameters[position].dense, callback)

    def expect(self, kind: EventKind, alive: defaultdict[Arena, dict[str, int]]) -> None:
        """Tell the pool what an event of the imagined step allocates; ``alive`` is updated."""
        match kind:
            case EventKind.GATHER:
                self._expect(self._pool, self.buffer.owners[0], alive)
            case EventKind.WAIT if isinstance(self.buffer, ChunkedBuffer):
                self._expect(self._pools.own, self.buffer.owners[1], alive)
                alive[self._pool].pop(self.buffer.owners[0], None)
            case EventKind.FREE:
                for pool, owner in product((self._pool, self._pools.own), self.buffer.owners):
                    alive[pool].pop(owner, None)
            case EventKind.RESHARD_TO_SUBGROUP:
                self._expect(self._pool, self._part_owner, alive, self._plan.subgroup)
            case EventKind.FREE_SUBGROUP:
                alive[self._pool].pop(self._part_owner, None)

    def _expect(
        self, pool: Arena, owner: str, alive: defaultdict[Arena, dict[str, int]], parts: int = 1
    ) -> None:
        num_bytes = self.buffer.num_bytes // parts
        pool.expect(owner, num_bytes, alive[pool])
        alive[pool][owner] = num_bytes

    def launch_gather(self, collectives: Collectives, label: str) -> Work:
        self.buffer.acquire()
        flat, part = self.buffer.flat, self._part
        if part is not None:
            subgroup = self.mesh.subgroup(self._plan.subgroup)
            own = flat.view(subgroup.size, -1)[subgroup.index]
            return collectives.all_gather(flat, subgroup, label, partial(copy_, own, part))
        self.reclaim_locals()
        own_slot = self.buffer.slot_of(self.mesh.rank)
        fill, shared = self._copy_shard(own_slot), self.buffer.shared_range()
        return collectives.all_gather(flat, self.mesh.shards, label, fill, shared)

    def finish_gather(self) -> None:
        """The collective is done: have the dense parameters show what was gathered."""
        self.buffer.unpack()

    def free(self) -> None:
        """Free what was gathered, if anything was."""
        if self.buffer.is_acquired:
            self.buffer.release()

    def launch_subgroup_part(self, collectives: Collectives, label: str) -> Work | None:
        """Get what the subgroup gathers from: out of what is gathered, or from the other rows."""
        part = self._pool.allocate_tensor(
            self.layout.num_elements // self._plan.subgroup,
            self.buffer.flat.dtype,
            self._part_owner,
        )
        self._part = part
        if not self._plan.two_level_gather:
            subgroup = self.mesh.subgroup(self._plan.subgroup)
            self.buffer.pack()
            copy_(part, self.buffer.flat.view(subgroup.size, -1)[subgroup.index])
            return None
        self.reclaim_locals()
        column = self.mesh.column
        own = part.view(column.size, -1)[column.index]
        return collectives.all_gather(part, column, label, self._copy_shard(own))

    def free_subgroup_part(self) -> None:
        if self._part is not None:
            self._pool.free(self._part.untyped_storage())
            self._part = None

    def launch_hold(self, collectives: Collectives, label: str) -> Work:
        self.reclaim_locals()
        held = self._held = flat_buffer(self.layout, Pool(self._pool.device, keep=False))
        held.acquire()
        own_slot = held.slot_of(self.mesh.rank)
        fill = partial(copy_, own_slot, self.shard)
        return collectives.all_gather(held.flat, self.mesh.shards, label, fill)

    def use_held(self) -> None:
        if self._held is not None:
            self._held.unpack()
        for parameter, view in self.held_parameters():
            parameter.use_tensor(view)

    def held_parameters(self) -> Iterator[tuple[FSDPParameter, Tensor]]:
        """Every parameter with its view [shape] of the held buffer."""
        if self._held is not None:
            yield from zip(self.parameters, self._held.views, strict=True)

    def release_hold(self, *, write_back: bool) -> None:
        """Forget what was written into the parameters that are held, or take it over."""
        if self._held is not None:
            if write_back:
                self._held.pack()
                copy_(self.shard, self._held.slot_of(self.mesh.rank))
            self._held.release()
            self._held = None

    def _allocate_shard(self) -> Tensor:
        if self.is_whole:
            return self.buffer.flat
        size, device = self.layout.shard_elements, self._pool.device
        if self.offloader is None or self._plan.offload is None:
            return torch.zeros(size, dtype=getattr(torch, self.layout.dtype), device=device)
        if not self._plan.offload.parameters:
            self._device_copy = torch.zeros(size, dtype=self.buffer.flat.dtype, device=device)
        return self.offloader.allocate_shard(self.layout, self.layout.dtype)

    def _copy_shard(self, to: Tensor) -> Callable[[], None]:
        """What a collective has to call before it sends ``to`` [S], this rank's part."""
        if self.offloader is None:
            return partial(copy_, to, self.shard)
        if self._device_copy is None:
            return self.offloader.to_device(to, self.shard)
        copy_on_device = partial(copy_, to, self._device_copy)
        if not self.device_copy_is_stale:
            return copy_on_device
        self.device_copy_is_stale = False
        refresh = self.offloader.to_device(self._device_copy, self.shard)
        return lambda: (refresh(), copy_on_device())[1]

    def reclaim_locals(self) -> None:
        """Notice parameters whose memory was replaced, as `Module.to` and `assign=True` do."""
        for parameter in self.parameters:
            current = parameter.owners[0].get()
            if isinstance(current, DTensor) and local_of(current) is parameter.local:
                continue
            if current is not None:
                parameter.adopt(current)


def plan_memory(units: Sequence[Sequence[FlatParameters]], events: Iterable[Event]) -> None:
    """Plan offsets for what ``events``, one imagined step of ``units``, allocate and free."""
    alive: defaultdict[Arena, dict[str, int]] = defaultdict(dict)
    for event in events:
        for flat in units[event.unit]:
            if not flat.is_whole:
                flat.expect(event.kind, alive)
