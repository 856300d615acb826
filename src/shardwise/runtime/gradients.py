"""Gradients on their way from autograd to the shards."""

import math
import weakref
from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from shardwise._private import num_tensor_references
from shardwise.errors import StepError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import UnitSettings
from shardwise.plan.units import UnitPlan
from shardwise.runtime.buffers import ChunkedBuffer, FlatBuffer, flat_buffer
from shardwise.runtime.gradient_shards import GradientShard
from shardwise.runtime.memory import CAN_SWAP, Arena, Pool, Pools
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter
from shardwise.schedule.events import EventKind
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.transport.api import Reduction, Work
from shardwise.transport.communicator import Collectives
from shardwise.transport.device import copy_, is_accelerator
from shardwise.transport.quantized import QuantizedSums

__all__ = ["GradientBuffer", "GradientState"]

_DOMINANT = 7 / 8  # of a buffer


class GradientState(StrEnum):
    """Where the gradients of one layout are."""

    IDLE = "idle"  # with the parameters, or nowhere; maybe summed over this rank's row
    FILLING = "filling"  # autograd yields them into the buffer
    REDUCING = "reducing"  # the buffer is being reduced
    OFFLOADING = "offloading"  # reduced, on their way to the host


_TRANSITIONS = {
    GradientState.IDLE: {GradientState.FILLING},
    GradientState.FILLING: {GradientState.REDUCING, GradientState.IDLE},
    GradientState.REDUCING: {GradientState.OFFLOADING, GradientState.IDLE},
    GradientState.OFFLOADING: {GradientState.IDLE},
}


class GradientBuffer:
    """The gradients of one layout, from the moment autograd yields them to ``p.grad``::

    buffer [world_size * S]   one extent a parameter, written as autograd yields
    partial [row * S]         summed over this rank's row, waiting for the sum over columns
    reduced [S]               summed over all ranks; a `GradientShard` hands it to ``p.grad``

    Where a shard is the whole, as in data-parallel training, the buffer of a unit without child
    units is in the memory of ``reduced`` from the start, unless there are gradients to add to.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[FSDPParameter],
        mesh: DataParallelMesh,
        pools: Pools,
        plan: UnitPlan,
        settings: UnitSettings,
        offloader: HostOffloader | None,
    ) -> None:
        self.state = GradientState.IDLE
        self.parameters = parameters  # in the order of the layout's extents
        self._owns_buffer = plan.holds_gradients
        # In ``.grad`` until the reduction: there is no buffer while child units compute.
        self._waits = plan.has_child_units and not plan.holds_gradients
        self._layout = layout
        self._mesh = mesh
        pool = pools.outer_gradients if plan.has_child_units else pools.gradients
        self._own_pool = pool
        self._settings = settings
        self._use_buffer_of(pool)
        self._quantized: QuantizedSums | None = None
        if (blocks := plan.reduces(layout)) is not None:
            wire = plan.wire
            self._quantized = QuantizedSums(blocks, wire.ranks_per_host, wire.error_feedback)
        is_replaceable = offloader is None and not (plan.has_child_units or self._owns_buffer)
        self._can_be_in_place = CAN_SWAP and is_replaceable and layout.is_whole_sum
        self.shard = GradientShard(
            layout,
            parameters,
            mesh,
            pool,
            settings,
            offloader,
            keeps_memory=self._can_be_in_place and not is_accelerator(pool.device),
        )
        self._written = [False] * len(layout.extents)
        # By position: a gradient on its way in memory that `claim` gave, while autograd holds it.
        self._claimed: dict[int, weakref.ref[Tensor]] = {}
        self._aliases: list[weakref.ref[Tensor]] = []  # of extents
        self._is_in_place = False  # the buffer is in the memory of the shard
        self._reduced: Tensor | None = None  # [S]
        self._partial: Tensor | None = None  # [M]
        self._scratch: list[torch.UntypedStorage] = []  # of the pool, until `collect`

    def use_memory_of(self, pool: Arena | None) -> None:
        """Between steps: have reductions work in memory of ``pool``, or as in the beginning."""
        if self.state is not GradientState.IDLE or self._partial is not None:
            raise StepError("the memory of reductions cannot be replaced while one is under way")
        self._use_buffer_of(pool or self._own_pool)
        self.shard.reduce_pool = self._pool

    def _use_buffer_of(self, pool: Pool) -> None:
        self._pool = pool
        self._buffer: FlatBuffer | ChunkedBuffer = flat_buffer(
            self._layout,
            pool,
            self._own_pool,
            dtype=self._layout.cast.reduce_dtype,
            owns_memory=self._owns_buffer,
            fills_views=True,
        )

    def expect(self, kind: EventKind) -> None:
        """Tell the arena what an event of the imagined step allocates or frees."""
        pool, owner = self._pool, self._buffer.owners[0]
        if not isinstance(pool, Arena) or self._owns_buffer:
            return
        is_late = self._waits or isinstance(self._buffer, ChunkedBuffer)
        if kind is EventKind.FINISH_REDUCE:
            pool.expect_free(owner)
        elif not (is_late and kind is EventKind.BACKWARD):
            pool.expect(owner, self._buffer.num_bytes)

    @property
    def _divisors(self) -> tuple[float, float]:
        """Of gradients before the sum over ranks, and of the sum."""
        divisor = self._settings.gradient_divisor or self._mesh.num_ranks
        if self._settings.reduce_hook is not None:
            divisor = 1.0
        before = _divisor_before_the_sum(self._buffer.flat.dtype, divisor)
        return before, divisor / before

    def claim(self, position: int, *, in_slot: bool) -> tuple[Tensor, bool] | None:
        """Where to compute a gradient, and whether to add it to an earlier one; None for anywhere.

        The gradient may be computed in its place in the buffer, where `write` finds it, if that is
        empty and all uses of the parameter are added there (``in_slot``). One that waits while
        other units compute is put there only if the buffer is little larger.
        """
        parameter = self.parameters[position]
        if self.state is GradientState.REDUCING or parameter.dense.grad is not None:
            return None
        if position in self._claimed:
            before = self._claimed[position]()
            # If autograd added it to another gradient, it holds it no longer; a user may.
            if before is None or num_tensor_references(before) != 2:  # noqa: PLR2004
                return None
            return before, True
        view = self._buffer.views[position]
        dominates = view.numel() > _DOMINANT * self._layout.num_elements
        fits = parameter.dense.dtype == view.dtype and not self._written[position]
        if fits and in_slot and (dominates or not self._waits):
            self._fill()
            place = view.detach()  # a new tensor, or autograd would copy it
            self._aliases.append(weakref.ref(place))
        else:
            place = torch.empty_like(parameter.dense)
        self._claimed[position] = weakref.ref(place)
        return place, False

    def accept(self, position: int) -> None:
        """Autograd has put a gradient on a dense parameter: take it, now or when it is reduced."""
        self.shard.used[position] = True
        if not self._waits:
            self.write(position, self.parameters[position].take_gradient())

    def write_kept(self) -> None:
        """Take the gradients that are on dense parameters."""
        for position, parameter in enumerate(self.parameters):
            if parameter.dense.grad is not None:
                self.write(position, parameter.take_gradient())

    def write(self, position: int, gradient: Tensor) -> None:
        """Write a gradient into its extent of the buffer, divided by the divisor before the sum."""
        self._fill()
        view = self._buffer.views[position]
        scale = 1.0 / self._divisors[0]
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._written[position]:
            view.add_(gradient, alpha=scale)
        else:
            if gradient.data_ptr() != view.data_ptr():  # it was not computed there
                self._evict(view)
                view.copy_(gradient)
            if scale != 1.0:
                view.mul_(scale)
        self._claimed.pop(position, None)
        self._written[position] = True

    def launch_reduce(self, collectives: Collectives, label: str) -> Work:
        """Reduce the buffer; extents that were not written count as zeros."""
        self.write_kept()
        self._fill()
        for position, view in enumerate(self._buffer.views):
            self._evict(view)
            if not self._written[position]:
                view.zero_()
        self._written = [False] * len(self._written)
        self._claimed = {}
        self._buffer.pack()
        self._move(GradientState.REDUCING)
        self.shard.scale = 1.0 / self._divisors[1]
        if self._settings.reduce_hook is not None:
            return self._call_hook(self._settings.reduce_hook)
        all_reduces = self._settings.all_reduce_grads
        carried, self._partial = self._partial, None
        if carried is not None:
            self._scratch.append(carried.untyped_storage())
        flat, row = self._buffer.flat, self._mesh.row
        stages = self._mesh.reduction if all_reduces else self._mesh.reduction[:1]
        out = self._target() if all_reduces else None
        is_cast = out is not None and out.dtype != flat.dtype
        stays_in_flat = self._pool is not self._own_pool
        if out is None:
            inner = self._partial = self._allocate_tensor(len(flat) // row.size, flat.dtype, "rows")
        elif is_cast or stays_in_flat or self._mesh.is_two_level:
            inner = flat.view(row.size, -1)[row.index]
        else:
            inner = out
        scale, only_sums = self.shard.scale_on_device, self._settings.only_sums
        reduction = Reduction(flat, inner, carried, out, stages, scale, only_sums, stays_in_flat)
        if self._quantized is None:
            return collectives.reduce(reduction, label)
        _zero_padding(flat, self._layout)  # or it would set the scales of blocks
        return self._quantized.reduce(collectives, reduction, label)

    @torch.no_grad()
    def _call_hook(self, hook: Callable[..., None]) -> Work:
        """Have ``hook`` reduce the buffer, padding included."""
        flat = self._buffer.flat.detach()  # whose `.data` it may replace
        _zero_padding(flat, self._layout)
        if self._mesh.size == 1:
            reduced = flat
            hook(flat)
        else:
            reduced = flat.new_empty(self._layout.shard_elements)
            hook(flat, reduced)
        copy_(self._target(), reduced)
        work = Work(job=lambda: None)
        work.run()
        return work

    def collect(self) -> None:
        """Hand the reduced gradients, if they are complete, to the parameters."""
        self._close()
        reduced, self._reduced = self._reduced, None
        is_offloading = reduced is not None and self.shard.deliver(reduced)
        self._move(GradientState.OFFLOADING if is_offloading else GradientState.IDLE)
        self._free_scratch()

    def finish_offload(self) -> None:
        """Hand over gradients that have arrived at the host."""
        if self.state is GradientState.OFFLOADING:
            self.shard.finish_offload()
            self._move(GradientState.IDLE)

    def discard(self) -> None:
        """Drop everything that is under way, after an error."""
        self._written = [False] * len(self._written)
        self._claimed = {}
        self._reduced = None
        if self._partial is not None:
            self._scratch.append(self._partial.untyped_storage())
            self._partial = None
        self._close()
        self._free_scratch()
        if self._quantized is not None:
            self._quantized.residual = None
        self.shard.discard()
        self.state = GradientState.IDLE

    def _fill(self) -> None:
        """Open the buffer, if it is not open yet."""
        assert self.state is not GradientState.REDUCING, "its last reduction is under way"
        self.finish_offload()
        if self.state is GradientState.FILLING:
            return
        self._move(GradientState.FILLING)
        if not self._owns_buffer:
            is_own = self._pool is self._own_pool
            self._is_in_place = is_own and self._can_be_in_place and self.shard.is_free
            if self._is_in_place and isinstance(self._buffer, FlatBuffer):
                self._buffer.acquire(self.shard.memory().untyped_storage())
            else:
                self._buffer.acquire()

    def _close(self) -> None:
        if self._buffer.is_acquired:
            for view in self._buffer.views:
                self._evict(view)
            self._buffer.release()
            if self._is_in_place and self._reduced is not self.shard.current:
                self.shard.release_memory()
        self._aliases = []

    def _evict(self, view: Tensor) -> None:
        """Copy a gradient that was computed in ``view``, and is still referenced, to new memory.

        Autograd may hold it, to add that of an earlier call, or a hook of the user's.
        """
        for alias in self._aliases:
            gradient = alias()
            if gradient is not None and gradient.data_ptr() == view.data_ptr():
                gradient.data = gradient.clone()

    def _target(self) -> Tensor:
        """Where to reduce to [S]: the memory of the gradients, or scratch that is added to them."""
        size, flat = self._layout.shard_elements, self._buffer.flat
        if self._is_in_place and self.shard.is_empty:
            self._reduced = self.shard.current  # which has its memory back when the buffer closes
            return flat
        if self.shard.offloader is not None:  # until it has arrived at the host
            self._reduced = self._allocate_tensor(size, flat.dtype, "shard on the device")
        elif self.shard.is_empty:
            self._reduced = self.shard.memory()
        else:
            self._reduced = self._allocate_tensor(size, self.shard.dtype, "shard to add")
            self._scratch.append(self._reduced.untyped_storage())
        return self._reduced

    def _allocate_tensor(self, num_elements: int, dtype: torch.dtype, what: str) -> Tensor:
        owner = f"{what} of {self._buffer.owners[0]}"
        return self._pool.allocate_tensor(num_elements, dtype, owner)

    def _free_scratch(self) -> None:
        for storage in self._scratch:
            self._pool.free(storage)
        self._scratch = []

    def _move(self, to: GradientState) -> None:
        assert to in _TRANSITIONS[self.state], f"gradients: {self.state} -> {to}"
        self.state = to


def _divisor_before_the_sum(dtype: torch.dtype, divisor: float) -> float:
    """What gradients are divided by before the sum; the rest of the division comes after it.

    To divide after the sum is cheaper. But large sums of float16 would overflow, and to divide by
    everything before it would make small numbers underflow. A power of two near the square root
    balances both, and does not round.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (math.isqrt(max(1, int(divisor))).bit_length() - 1)


def _zero_padding(flat: Tensor, layout: Layout) -> None:
    """Fill the padding with zeros."""
    for rank, shard in enumerate(flat.view(layout.world_size, -1)):
        end = 0
        for extent in layout.extents:
            start = layout.offset_in_shard(extent, rank)
            shard[end:start].zero_()
            end = start + layout.num_owned(extent, rank)
        shard[end:].zero_()
