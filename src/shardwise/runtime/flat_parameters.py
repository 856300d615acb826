"""The parameters of one layout: in shards, and whole in buffers that come and go.

::

    between steps   shard [S]   p = ShardedTensor(run of shard)
    in use          buffer [world_size * S], dense parameters view it    <- all-gather of shards
    gathered again  part [world_size * S / subgroup]                     -> all-gather in subgroup
    in backward     gradients [world_size * S], one slot a parameter     -> reduce-scatter
    after it        gradient shard [S]   p.grad = ShardedTensor(run of it)
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.plan.layout import Layout
from shardwise.plan.plan import UnitSettings
from shardwise.plan.units import UnitPlan
from shardwise.runtime import hooks
from shardwise.runtime.buffers import ChunkedBuffer, FlatBuffer, flat_buffer
from shardwise.runtime.gradients import GradientBuffer
from shardwise.runtime.memory import Pool, Pools
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter
from shardwise.schedule.events import EventKind
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharding import local_of
from shardwise.transport.api import Work
from shardwise.transport.communicator import Collectives
from shardwise.transport.device import copy_
from shardwise.transport.host.peers import INLINE_BYTES
from shardwise.transport.quantized import quantized_gather

__all__ = ["FlatParameters"]

SMALL_BYTES = INLINE_BYTES  # sent inline; shared memory needs one more message


class FlatParameters:
    """The parameters of one layout."""

    def __init__(
        self,
        layout: Layout,
        mesh: DataParallelMesh,
        pools: Pools,
        plan: UnitPlan,
        settings: UnitSettings,
        offloader: HostOffloader | None = None,
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
        self.gradients: GradientBuffer | None = None
        if layout.trainable:
            self.gradients = GradientBuffer(
                layout, self.parameters, mesh, pools, plan, settings, offloader
            )

    def _allocate(self) -> None:
        """Make the shard and the buffer."""
        layout, plan, pools = self.layout, self._plan, self._pools
        is_small = layout.gathered_bytes <= SMALL_BYTES * layout.world_size
        self._blocks = plan.gathers(layout)
        # Ranks outside the unit could reuse shared memory while some of its ranks still read it.
        is_own = plan.subgroup or plan.num_shards is not None or is_small or self._blocks
        pool = self._pool = pools.own if is_own else pools.gathered
        self._part: Tensor | None = None  # [world_size * S / subgroup]
        self._part_owner = f"part for {layout.extents[0].parameter.name}"
        compute_dtype = layout.cast.compute_dtype
        self.buffer = flat_buffer(
            layout, pool, pools.own, dtype=compute_dtype, owns_memory=self.is_whole
        )
        # In the dtype of the shard, between steps.
        self._held: FlatBuffer | ChunkedBuffer | None = None
        self.shard = self._allocate_shard()

    @cached_property
    def _own_slot(self) -> Tensor:
        """This rank's part [S] of the buffer, from the first time that it has memory."""
        return self.buffer.slot_of(self.mesh.rank)

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The gathered parameters."""
        return self.buffer.views

    @property
    def gathered_bytes(self) -> int:
        """What gathered parameters take now, those that are held between steps included."""
        buffers = (self.buffer, self._held)
        return sum(one.num_bytes for one in buffers if one is not None and one.is_acquired)

    def listen(self, position: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` for each gradient that autograd has put on a dense parameter."""
        hooks.on_gradient(self.parameters[position].dense, callback)

    def expect(self, kind: EventKind) -> None:
        """Tell the arenas what an event of the imagined step allocates or frees."""
        buffer, arenas = self.buffer, (self._pool, self._pools.own)
        match kind:
            case EventKind.BACKWARD | EventKind.REDUCE | EventKind.FINISH_REDUCE:
                if self.gradients is not None:
                    self.gradients.expect(kind)
            case _ if self.is_whole:
                pass
            case EventKind.GATHER:
                self._pool.expect(buffer.owners[0], buffer.num_bytes)
            case EventKind.WAIT if isinstance(buffer, ChunkedBuffer):
                self._pools.own.expect(buffer.owners[1], buffer.num_bytes)
                self._pool.expect_free(buffer.owners[0])
            case EventKind.FREE:
                for arena, owner in zip(arenas, buffer.owners, strict=False):
                    arena.expect_free(owner)
            case EventKind.RESHARD_TO_SUBGROUP:
                self._pool.expect(self._part_owner, buffer.num_bytes // self._plan.subgroup)
            case EventKind.FREE_SUBGROUP:
                self._pool.expect_free(self._part_owner)

    def launch_gather(self, collectives: Collectives, label: str) -> Work:
        self.buffer.acquire()
        flat, part = self.buffer.flat, self._part
        if part is not None:
            subgroup = self.mesh.subgroup(self._plan.subgroup)
            own = flat.view(subgroup.size, -1)[subgroup.index]
            return collectives.all_gather(flat, subgroup, label, partial(copy_, own, part))
        self.reclaim_locals()
        fill, shards = self._copy_shard(self._own_slot), self.mesh.shards
        if self._blocks is not None:
            return quantized_gather(collectives, self._blocks, flat, shards, label, fill)
        return collectives.all_gather(flat, shards, label, fill, self.buffer.shared_range())

    def finish_gather(self) -> None:
        """The collective has ended: have the dense parameters show the gathered values."""
        self.buffer.unpack()

    def free(self) -> None:
        """Free the gathered parameters, if there are any."""
        if self.buffer.is_acquired:
            self.buffer.release()

    def launch_subgroup_part(self, collectives: Collectives, label: str) -> Work | None:
        """Get the part from which the subgroup gathers: from the buffer, or from the other rows."""
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
        fill = self._copy_shard(own)
        if self._blocks is not None:
            return quantized_gather(collectives, self._blocks, part, column, label, fill)
        return collectives.all_gather(part, column, label, fill)

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
        """Drop the changes to held parameters, or write them back."""
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
