"""Gradients on their way from autograd to the shards."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.plan.layout import Layout
from shardwise.runtime.memory import CAN_SWAP, FlatBuffer, Pool, is_shared
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.offload import Ferry
from shardwise.runtime.parameters import FSDPParameter, split_shard
from shardwise.runtime.tensor import (
    ShardedTensor,
    apply_gradient_hooks,
    run_accumulated_hooks,
)
from shardwise.transport.api import Collectives, Reduction, Work
from shardwise.transport.device import copy_scaled_

__all__ = ["Gradients"]

_MOST = 7 / 8  # of a buffer


class Gradients:
    """The gradients of one layout, from the moment autograd yields them to ``p.grad``::

    buffer [world_size * S]   one slot a parameter, written as autograd yields
    partial [row * S]         summed over this rank's row, waiting for the sum over columns
    reduced [S]               summed over all ranks, and what ``p.grad`` views
    landing [S]               the same on its way to the host, if shards are there

    Where a shard is the whole, as in data-parallel training, the buffer of a unit that encloses no
    others is in the memory of ``reduced`` from the first moment on, unless there are gradients to
    add to. On the CPU that memory is kept for the next backward, as malloc would take other memory
    for it each time, and the process would grow.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[FSDPParameter],
        axis: DataParallelMesh,
        pool: Pool,
        ferry: Ferry | None = None,
        *,
        owns_buffer: bool = False,
        has_child_units: bool = False,
    ) -> None:
        self.parameters = parameters  # in the order of the layout's extents
        self._axis = axis
        self._pool = pool
        self._ferry = ferry
        self._landing: _Landing | None = None
        self.owns_buffer = owns_buffer
        reduce_dtype = layout.cast.reduce_dtype
        self._buffer = FlatBuffer(layout, pool, dtype=reduce_dtype, owns_memory=owns_buffer)
        self._dtype: torch.dtype = getattr(torch, layout.dtype)  # of the shards
        can_move = CAN_SWAP and ferry is None and not has_child_units and not owns_buffer
        self._can_be_in_place = can_move and layout.is_whole_sum
        is_on_cpu = pool.device.type == "cpu"
        self._keeps_shard = ferry is not None or (self._can_be_in_place and is_on_cpu)
        self.divide_by(axis.num_ranks)
        self._written = [False] * len(layout.extents)
        # By position: a gradient on its way in memory that `claim` gave, while autograd holds it.
        self._claimed: dict[int, weakref.ref[Tensor]] = {}
        self._aliases: list[weakref.ref[Tensor]] = []  # of slots
        self.used = [False] * len(layout.extents)
        self._is_in_place = False  # the buffer is in the memory of `_shard`
        self._is_stepped = False  # in backward: then they are dropped there, by `drop`
        self._is_handed_over = False
        self._fresh: list[int] = []  # positions whose .grad was None before this backward
        self.reduced_hook: Callable[[Tensor], None] | None = None  # called with [S], may change it
        # [S], until it is handed over; if it is kept, until somebody holds the last .grad
        self._shard: Tensor | None = None
        self._reduced: Tensor | None = None
        self._partial: Tensor | None = None
        self._borrowed: list[torch.UntypedStorage] = []

    def divide_by(self, divisor: float) -> None:
        """By what the sum over all ranks is divided; their number makes it the average."""
        before = _divisor_before_the_sum(self._buffer.flat.dtype, divisor)
        self._scale_before, self._scale_after = 1.0 / before, before / divisor

    def claim(self, position: int, *, waits: bool, in_slot: bool) -> tuple[Tensor, bool] | None:
        """Where to compute a gradient, and whether to add it to what is there; None: elsewhere.

        That is its slot, for `write` to find it there, if nothing is in it and all uses of the
        parameter would be added there (``in_slot``). One that ``waits`` while other units compute
        is there only if the buffer is little larger.
        """
        managed = self.parameters[position]
        if self._reduced is not None or managed.dense.grad is not None:
            return None
        if position in self._claimed:
            before = self._claimed[position]()
            # If it was added to a gradient from elsewhere, it is held no more, or by a user alone.
            if before is None or before._use_count() != 2:  # type: ignore[attr-defined]  # noqa: PLR2004
                return None
            return before, True
        slot = self._buffer.views[position]
        is_most = slot.numel() > _MOST * self._layout.num_elements
        is_place = managed.dense.dtype == slot.dtype and not self._written[position]
        if is_place and (is_most or not waits) and in_slot:
            self._open()
            place = slot.detach()  # a tensor of its own, or autograd would copy it
            self._aliases.append(weakref.ref(place))
        else:
            place = torch.empty_like(managed.dense)
        self._claimed[position] = weakref.ref(place)
        return place, False

    def write(self, position: int, gradient: Tensor) -> None:
        """Put a gradient into its slot of the reduce buffer, divided as far as is done here."""
        assert self._reduced is None, "its last reduction is under way"
        self._open()
        slot = self._buffer.views[position]
        scale = self._scale_before
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._written[position]:
            slot.add_(gradient, alpha=scale)
        else:
            if gradient.data_ptr() != slot.data_ptr():  # it was not computed there
                self._evict(slot)
                slot.copy_(gradient)
            if scale != 1.0:
                slot.mul_(scale)
        self._claimed.pop(position, None)
        self._written[position] = True

    def launch_reduce(self, collectives: Collectives, label: str, *, crosses: bool) -> Work:
        """Reduce what was written; slots that nothing was written to count as zeros."""
        assert self._reduced is None, "its last reduction is under way"
        self._open()
        for position, view in enumerate(self._buffer.views):
            self._evict(view)
            if not self._written[position]:
                view.zero_()
        self._written = [False] * len(self._written)
        self._claimed = {}
        carried = self._partial
        if carried is not None:
            self._borrowed.append(carried.untyped_storage())
            self._partial = None
        flat, row = self._buffer.flat, self._axis.row
        stages = self._axis.reduction if crosses else self._axis.reduction[:1]
        out: Tensor | None = None
        if crosses and self._is_in_place and not self._has_gradients:
            out, self._reduced = flat, self._shard
        elif crosses:
            out = self._reduced = self._target()
        is_cast = out is not None and out.dtype != flat.dtype
        if out is None:
            inner = self._partial = self._pool.allocate_tensor(len(flat) // row.size, flat.dtype)
        elif is_cast or self._axis.is_two_level:
            inner = flat.view(row.size, -1)[row.index]
        else:
            inner = out
        num_scratch = collectives.capabilities.reduction_scratch(len(flat), stages, is_cast=is_cast)
        scratch = self._borrow(num_scratch, flat.dtype)
        reduction = Reduction(flat, inner, carried, out, scratch, stages, self._scale_reduced)
        return collectives.reduce(reduction, label)

    def collect(self) -> None:
        """Hand the reduced gradients, if they are complete, to the parameters."""
        self._close()
        if self._reduced is not None:
            if self._ferry is not None:
                self._landing = self._ship(self._ferry, self._reduced)
            else:
                self._hand_over(self._reduced)
            self._reduced = None
        self._give_back()

    def land(self) -> None:
        """Hand over what has arrived at the host."""
        if self._landing is not None:
            self._landing.mark.synchronize()
            arrived = self._landing.arrived
            copy_scaled_(arrived, arrived, self._scale_after / self._scale_reduced)
            self._hand_over(arrived)
            self._end_landing()

    def _ship(self, ferry: Ferry, reduced: Tensor) -> "_Landing":
        size = self._layout.shard_elements
        is_added = self._has_gradients
        to = ferry.staging.allocate_tensor(size, self._dtype) if is_added else self._own_shard()
        return _Landing(reduced, to, ferry.take(to, reduced))

    def _end_landing(self) -> None:
        landing, self._landing = self._landing, None
        if landing is None or self._ferry is None:
            return
        self._pool.free(landing.reduced.untyped_storage())
        if landing.arrived is not self._shard:
            self._ferry.staging.free(landing.arrived.untyped_storage())

    def _hand_over(self, reduced: Tensor) -> None:
        if self.reduced_hook is not None:
            self.reduced_hook(reduced)
        is_own = reduced is self._shard
        runs = split_shard(reduced, self._layout, self._axis.rank)
        with torch.no_grad():
            for position, (parameter, run) in enumerate(zip(self.parameters, runs, strict=True)):
                if not parameter.sharded.requires_grad:
                    continue
                own = run if is_own or parameter.sharded.grad is not None else run.clone()
                gradient = ShardedTensor(own.to(self._dtype), parameter.sharding)
                if _accumulate(parameter, apply_gradient_hooks(parameter.sharded, gradient)):
                    self._fresh.append(position)
        if not self._is_stepped and not self._keeps_shard:
            self._shard = None  # it is freed with the gradients
        self._is_handed_over = True

    def settle(self, used_anywhere: Sequence[bool]) -> None:
        """A parameter that no rank used keeps the gradient it had, which may be None."""
        if not self._is_handed_over:
            return
        for position in self._fresh:
            if not used_anywhere[position]:
                self.parameters[position].sharded.grad = None
        for parameter, used in zip(self.parameters, used_anywhere, strict=True):
            if used and parameter.sharded.requires_grad:
                run_accumulated_hooks(parameter.sharded)
        self.forget()

    def fill_with_zeros(self) -> None:
        """Where there is no gradient, as in a unit that did not run."""
        for parameter in self.parameters:
            if parameter.sharded.requires_grad and parameter.sharded.grad is None:
                parameter.sharded.grad = torch.zeros_like(parameter.sharded)

    def step_in_backward(self, is_stepped: bool) -> None:
        """Whether gradients, of which there are none now, live until `drop`, in a pool's memory."""
        self._is_stepped = is_stepped
        self._shard = None

    def drop(self) -> None:
        """The optimizer has had the gradients: free them."""
        for parameter in self.parameters:
            parameter.sharded.grad = None
        shard, self._shard = self._shard, None
        if shard is not None:
            # A hook, or the optimizer, may have kept a gradient.
            part_with = self._home_pool.disown if is_shared(shard, 1) else self._home_pool.free
            part_with(shard.untyped_storage())

    def forget(self) -> None:
        """The backward is over; what it left unreduced, and of which parameters, stays."""
        self._fresh = []
        if self._is_handed_over:
            self._is_handed_over = False
            self.used = [False] * len(self.used)

    def discard(self) -> None:
        """Drop what is under way."""
        self._written = [False] * len(self._written)
        self._claimed = {}
        self._reduced = None
        if self._partial is not None:
            self._borrowed.append(self._partial.untyped_storage())
            self._partial = None
        if self._landing is not None:
            self._landing.mark.synchronize()
            self._end_landing()
        self._give_back()
        self._is_handed_over = True
        self.forget()
        if self._is_stepped:
            self.drop()
        elif self._ferry is None:
            self._shard = None

    @property
    def _layout(self) -> Layout:
        return self._buffer.layout

    @property
    def _home_pool(self) -> Pool:
        """Where gradients that are not kept live, beside their parameters."""
        return self._pool if self._ferry is None else self._ferry.staging

    @property
    def _scale_reduced(self) -> float:
        """What sums are scaled with where they are; after a cast it rounds less."""
        is_cast_later = self._ferry is not None and self._buffer.flat.dtype != self._dtype
        return 1.0 if is_cast_later else self._scale_after

    def _open(self) -> None:
        if self.owns_buffer or self._buffer.is_acquired:
            return
        is_kept = not self._is_stepped and not self._has_gradients
        self._is_in_place = self._can_be_in_place and is_kept
        self._buffer.acquire(self._own_shard().untyped_storage() if self._is_in_place else None)

    def _close(self) -> None:
        if self._buffer.is_acquired:
            for view in self._buffer.views:
                self._evict(view)
            self._buffer.release()
            if self._is_in_place and self._reduced is not self._shard and not self._keeps_shard:
                self._shard = None
        self._aliases = []

    def _evict(self, slot: Tensor) -> None:
        """Move a gradient to memory of its own that was computed in ``slot`` and is held still.

        By autograd, which is to add that of an earlier call, or by a hook of the user's.
        """
        for alias in self._aliases:
            gradient = alias()
            if gradient is not None and gradient.data_ptr() == slot.data_ptr():
                gradient.data = gradient.clone()

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.sharded.grad is not None for parameter in self.parameters)

    def _target(self) -> Tensor:
        """Where to reduce to [S]: what will be the gradients, or memory to add to them from."""
        size = self._layout.shard_elements
        if self._ferry is not None:
            return self._pool.allocate_tensor(size, self._buffer.flat.dtype)  # until it has landed
        if self._has_gradients:
            return self._borrow(size, self._dtype)
        return self._own_shard()

    def _own_shard(self) -> Tensor:
        size = self._layout.shard_elements
        if self._is_stepped:
            if self._shard is None:
                self._shard = self._home_pool.allocate_tensor(size, self._dtype)
        elif self._shard is None or is_shared(self._shard, own_references=1):
            if self._ferry is None:
                self._shard = self._buffer.flat.new_empty(size, dtype=self._dtype)
            else:
                self._shard = self._ferry.host_shard(self._layout)  # page-locked, which takes long
        return self._shard

    def _borrow(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Memory until `collect`."""
        tensor = self._pool.allocate_tensor(num_elements, dtype)
        self._borrowed.append(tensor.untyped_storage())
        return tensor

    def _give_back(self) -> None:
        self._close()
        for storage in self._borrowed:
            self._pool.free(storage)
        self._borrowed = []


@dataclass(frozen=True, slots=True)
class _Landing:
    """Reduced gradients on their way to the host."""

    reduced: Tensor  # [S], on the device, of the pool
    arrived: Tensor  # [S], on the host
    mark: Work


def _divisor_before_the_sum(dtype: torch.dtype, divisor: float) -> float:
    """By what gradients are divided before they are summed; after it, by the rest.

    After the sum there is less to divide. But large sums of float16 would have become infinite, and
    before it a division takes small numbers below the least there is. The square root shares the 40
    powers of two of float16 out between both, as a power of two, which does not round.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (math.isqrt(max(1, int(divisor))).bit_length() - 1)


def _accumulate(parameter: FSDPParameter, gradient: Tensor) -> bool:
    """Add ``gradient`` to the parameter's; whether it is the first."""
    sharded = parameter.sharded
    if sharded.grad is None:
        sharded.grad = gradient
        return True
    if not isinstance(sharded.grad, ShardedTensor):
        raise PlanError(
            f"{parameter.name}.grad is a {type(sharded.grad).__name__} of the user's, not a "
            "ShardedTensor; set it to None before backward"
        )
    sharded.grad.add_(gradient)
    return False
