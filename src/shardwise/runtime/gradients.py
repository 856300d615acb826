"""Gradients from autograd to ``p.grad``."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._private import num_tensor_references
from shardwise.comm.api import Reduction, Work
from shardwise.comm.communicator import Collectives
from shardwise.comm.device import (
    DeviceWork,
    copy_,
    copy_scaled_,
    is_accelerator,
    join_streams,
    note_stream,
)
from shardwise.comm.quantized import QuantizedSums
from shardwise.errors import PlanError, StepError
from shardwise.plan.layout import Layout
from shardwise.plan.options import UnitSettings
from shardwise.plan.units import UnitPlan
from shardwise.runtime.accumulation import AccumulatedGradients, UnreducedGradient, reduced_part_of
from shardwise.runtime.buffers import ChunkedBuffer, FlatBuffer, flat_buffer
from shardwise.runtime.hooks import apply_gradient_hooks, run_accumulated_hooks
from shardwise.runtime.memory import CAN_SWAP, Arena, Pool, Pools, is_shared
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["GradientState", "Gradients"]

_DOMINANT_SHARE = 7 / 8  # of a buffer


class GradientState(StrEnum):
    """Where the gradients of one layout are."""

    IDLE = "idle"  # in ``p.grad``, or none; some may be accumulated
    FILLING = "filling"  # autograd writes them into the buffer
    REDUCING = "reducing"  # the buffer is being reduced
    OFFLOADING = "offloading"  # reduced, on their way to the host


_TRANSITIONS = {
    GradientState.IDLE: {GradientState.FILLING},
    GradientState.FILLING: {GradientState.REDUCING, GradientState.IDLE},
    GradientState.REDUCING: {GradientState.OFFLOADING, GradientState.IDLE},
    GradientState.OFFLOADING: {GradientState.IDLE},
}


class Gradients:
    """The life of the gradients of one layout, from autograd to ``p.grad``::

    buffer [world_size * S]         one extent per parameter, written when autograd has its gradient
    accumulated                     what earlier backwards have left, see `AccumulatedGradients`
    reduced [S]                     summed over all ranks; handed to ``p.grad``

    In order: `accept` or `write`, `launch_reduce`, `collect`, `finish_offload` where shards are in
    host memory, `settle`; `end_backward` if a later backward reduces.

    The memory of ``reduced`` is allocated in each backward and freed with the gradients. If a shard
    has all elements, as in data-parallel training, the buffer of a unit without child units uses it
    from the start, unless there are gradients to add to. On the CPU it is then kept for the next
    backward: malloc would return other memory each time, and the process would grow. Page-locked
    memory of the host is kept, too.
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
        pool = pools.enclosing_gradients if plan.has_child_units else pools.gradients
        is_replaceable = offloader is None and not (plan.has_child_units or plan.holds_gradients)
        self._can_be_in_place = CAN_SWAP and is_replaceable and layout.is_whole_sum
        self._keeps_memory = offloader is not None or (
            self._can_be_in_place and not is_accelerator(pool.device)
        )
        self.parameters = parameters  # in the order of the layout's extents
        self.mesh = mesh
        self.state = GradientState.IDLE
        # By position: this rank has computed a gradient since gradients were last handed over.
        self.used = [False] * len(layout.extents)
        self._accumulated: AccumulatedGradients | None = None  # see `accumulated`
        self._offloader = offloader
        self._dtype: torch.dtype = getattr(torch, layout.gradient_dtype)
        self._settings = settings
        self._layout = layout
        self._slices = layout.slices_of_shard(mesh.rank)
        self._first_pool = pool  # before `use_memory_of`
        self._steps_in_backward = False  # gradients then live only until `drop`
        self._owns_buffer = plan.holds_gradients
        # Gradients of a unit with child units stay in ``dense.grad`` until the reduction, so that
        # no buffer exists while those compute, unless one gradient is most of it (`claim`).
        self._waits_in_grad = plan.has_child_units and not plan.holds_gradients
        self._use_buffer_of(pool)
        self._quantized: QuantizedSums | None = None
        if (blocks := plan.reduce_blocks(layout)) is not None:
            wire = plan.options.wire
            self._quantized = QuantizedSums(blocks, wire.ranks_per_host, wire.error_feedback)
        self._written = [False] * len(layout.extents)
        # By position: the gradient that is computed in memory from `claim`.
        self._claimed: dict[int, weakref.ref[Tensor]] = {}
        # Gradients that view extents of the buffer, by position.
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}
        self._is_in_place = False  # the buffer uses the memory of the shard
        self._reduced: Tensor | None = None  # [S]
        self._scratch: list[torch.UntypedStorage] = []  # from the pool, freed by `collect`
        # [S], until it is handed over; kept memory stays here until it is found to be shared.
        self.kept_memory: Tensor | None = None
        self._host_scale = 1.0  # the part of the scale of sums that the host applies
        self._offload: _PendingOffload | None = None
        # By position, gradients of parameters that had none before this backward; None until
        # gradients are handed over.
        self._fresh: dict[int, Tensor | None] | None = None

    @property
    def accumulated(self) -> AccumulatedGradients:
        """What earlier backwards of the step have left; made when first asked for."""
        if self._accumulated is None:
            pools = self._first_pool, self._pool
            self._accumulated = AccumulatedGradients(
                self._layout, self.parameters, self.mesh, *pools, self.used
            )
        return self._accumulated

    @property
    def residual(self) -> Tensor | None:
        """Rounding errors of a quantized reduction, which the next one compensates."""
        return None if self._quantized is None else self._quantized.residual

    @residual.setter
    def residual(self, value: Tensor | None) -> None:
        if self._quantized is not None:
            # Not in the same object: a reduction of a step that raised may still write to its own.
            self._quantized = copy(self._quantized)
            self._quantized.residual = value

    def release_idle_memory(self) -> tuple[torch.UntypedStorage, ...]:
        """Between steps: free memory that is kept for the next step; return what must be kept."""
        if self._offloader is None:
            self.kept_memory = None
        return self._buffer.storages if self._owns_buffer else ()

    def use_memory_of(self, pool: Arena | None) -> None:
        """Between steps: reduce in memory of ``pool``; None for the original pool."""
        if self.state is not GradientState.IDLE or not self.accumulated.is_empty:
            raise StepError("the memory of reductions cannot be replaced while one is in flight")
        self._use_buffer_of(pool or self._first_pool)
        self.accumulated.pool = self._pool

    def _use_buffer_of(self, pool: Pool) -> None:
        self._pool = pool  # of reductions
        self._padding: list[Tensor] | None = None  # parts of the buffer, once it had memory
        self._buffer: FlatBuffer | ChunkedBuffer = flat_buffer(
            self._layout,
            pool,
            self._first_pool,
            dtype=self._layout.cast.reduce_dtype,
            owns_memory=self._owns_buffer,
            fills_views=True,
        )

    @property
    def _divisors(self) -> tuple[float, float]:
        """The divisors before the sum over ranks and after it."""
        divisor = self._settings.gradient_divisor or self.mesh.num_addends
        if self._settings.collective_hook is not None:
            divisor = 1.0
        # Gradients may be written before it is known how many ranks compute.
        before = _divisor_before_the_sum(self._buffer.flat.dtype, divisor)
        return before, (self._settings.num_computing or divisor) / before

    def claim(self, position: int, *, in_slot: bool) -> tuple[Tensor, bool] | None:
        """Return where to compute a gradient, and whether to add it there; None for anywhere.

        If all uses of the parameter add their gradients in place (``in_slot``), it may be an
        unwritten extent of the buffer, so that `write` has nothing to copy. A gradient that has to
        wait while child units compute gets its extent only if the buffer is not much larger.
        """
        parameter = self.parameters[position]
        if self.state is GradientState.REDUCING or parameter.dense.grad is not None:
            return None
        if position in self._claimed:
            before = self._claimed[position]()
            # Autograd drops `before` when it adds it to another gradient; a user may still hold it.
            if before is None or num_tensor_references(before) != 2:  # noqa: PLR2004
                return None
            return before, True
        view = self._buffer.views[position]
        dominates = view.numel() > _DOMINANT_SHARE * self._layout.num_elements
        fits = parameter.dense.dtype == view.dtype and not self._written[position]
        if fits and in_slot and (dominates or not self._waits_in_grad):
            self._open()
            place = view.detach()  # a new tensor, or autograd would copy it
            self._aliases.setdefault(position, []).append(weakref.ref(place))
        else:
            place = torch.empty_like(parameter.dense)
        self._claimed[position] = weakref.ref(place)
        return place, False

    def accept(self, position: int) -> None:
        """Take the gradient that autograd put on a dense parameter, now or at the reduction."""
        self.used[position] = True
        if not self._waits_in_grad:
            self.write(position, self.parameters[position].take_gradient())

    def write_kept(self) -> None:
        """Write the gradients that dense parameters still have."""
        for position, parameter in enumerate(self.parameters):
            if parameter.dense.grad is not None:
                self.write(position, parameter.take_gradient())

    def write(self, position: int, gradient: Tensor) -> None:
        """Write a gradient into its extent of the buffer, divided by the divisor before the sum."""
        self._open()
        note_stream(self._first_pool.device)
        view = self._buffer.views[position]
        scale = 1.0 / self._divisors[0]
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._written[position]:
            view.add_(gradient, alpha=scale)
        else:
            if gradient.data_ptr() != view.data_ptr():  # not computed there
                self._evict(position)
                view.copy_(gradient)
            if scale != 1.0:
                view.mul_(scale)
        self._claimed.pop(position, None)
        self._written[position] = True

    def end_backward(self) -> None:
        """Accumulate gradients that await a later reduction."""
        self.write_kept()
        is_left = self.state is GradientState.FILLING
        if is_left:
            self._evict_all()
        is_complete = self._settings.reduces_fully
        if is_left or not is_complete or self._accumulated is not None:
            fresh = self._buffer.whole if is_left else None
            self.accumulated.commit(fresh, self._written, is_complete=is_complete)
        if is_left:
            self._forget_written()
            self._close()
            self._first_pool.free_idle()  # it would keep as much as is accumulated
            self._transition(GradientState.IDLE)

    def launch_reduce(self, collectives: Collectives, label: str) -> Work:
        """Reduce the buffer, in which extents that were not written count as zeros."""
        join_streams(self._first_pool.device)  # on which autograd has written gradients
        self.write_kept()
        self._open()
        self._evict_all()
        if self._accumulated is not None:
            self._accumulated.add_to(self._buffer.views, self._written)
        for position, view in enumerate(self._buffer.views):
            if not self._written[position]:
                view.zero_()
        self._forget_written()
        self._buffer.pack()
        self._transition(GradientState.REDUCING)
        scale = 1.0 / self._divisors[1]
        # If the host casts the sums, scaling them after the cast rounds less.
        self._host_scale = scale if self._offloader is not None and self._layout.casts_sums else 1.0
        if self._settings.collective_hook is not None:
            return self._call_hook(self._settings.collective_hook)
        all_reduces = self._settings.all_reduce_grads
        carried: Tensor | None = None
        if self._accumulated is not None:
            carried, frees_carried = self._accumulated.take_sums()
            if carried is not None and frees_carried:
                self._scratch.append(carried.untyped_storage())
        flat, row = self._buffer.flat, self.mesh.row
        stages = self.mesh.reduction if all_reduces else self.mesh.reduction[:1]
        out = self._reduce_target() if all_reduces else None
        within_flat = self._pool is not self._first_pool
        if out is None:
            inner = self._allocate_tensor(len(flat) // row.size, flat.dtype, "rows")
            self.accumulated.keep_sums(inner)
        elif out.dtype != flat.dtype or within_flat or self.mesh.is_two_level:
            inner = flat.view(row.size, -1)[row.index]
        else:
            inner = out
        reduction = Reduction(
            flat,
            inner,
            carried,
            out,
            stages,
            scale=scale / self._host_scale,
            only_sums=self._settings.only_sums,
            reduces_within_flat=within_flat,
            in_tree=self.mesh.leaves is not None,
        )
        if self._quantized is None:
            work = collectives.reduce(reduction, label)
        else:
            self._zero_padding()  # it would affect the scales of blocks
            work = self._quantized.reduce(collectives, reduction, label)
        across = self._settings.across_replicas
        continued: Work = work if across is None or out is None else across(work, out)
        return continued

    @torch.no_grad()
    def _call_hook(self, hook: Callable[..., None]) -> Work:
        """Call ``hook`` to reduce the buffer, including its padding."""
        self._zero_padding()
        flat = self._buffer.flat.detach()  # the hook may replace its `.data`
        if self.mesh.size == 1:
            reduced = flat
            hook(flat)
        else:
            reduced = flat.new_empty(self._layout.shard_elements)
            hook(flat, reduced)
        copy_(self._reduce_target(), reduced)
        work = Work(job=lambda: None)
        work.run()
        return work

    def collect(self) -> None:
        """Hand the reduced gradients to the parameters, if they are complete.

        Those of shards in host memory are first copied there; `finish_offload` hands them over.
        """
        self._close()
        reduced, self._reduced = self._reduced, None
        if reduced is not None and self._offloader is not None:
            staging, size = self._offloader.staging, len(reduced)
            to = self.memory() if self._has_none else staging.allocate_tensor(size, self._dtype)
            self._offload = _PendingOffload(reduced, to, self._offloader.to_host(to, reduced))
            self._transition(GradientState.OFFLOADING)
        else:
            if reduced is not None:
                self._hand_over(reduced)
            self._transition(GradientState.IDLE)
        self._free_scratch()

    def finish_offload(self) -> None:
        """Wait for the copy to the host, if there is one, and hand over the gradients."""
        if self._offload is not None:
            self._offload.work.synchronize()
            arrived = self._offload.arrived
            copy_scaled_(arrived, arrived, self._host_scale)
            self._hand_over(arrived)
            self._end_offload()
            self._transition(GradientState.IDLE)

    def settle(self, used_anywhere: Sequence[bool]) -> None:
        """Restore None as the gradient of parameters that no rank used and that had none.

        Then call the hooks that users have registered for accumulated gradients.
        """
        if self._fresh is None:
            return
        for position in self._fresh:
            if not used_anywhere[position]:
                self.parameters[position].sharded.grad = None
        for parameter, used in zip(self.parameters, used_anywhere, strict=True):
            if used and parameter.sharded.requires_grad:
                run_accumulated_hooks(parameter.sharded)
        self.forget()

    def fill_with_zeros(self) -> None:
        """Give parameters without a gradient zeros, as in a unit that did not run."""
        for position, parameter in enumerate(self.parameters):
            if self.gets_gradient(position) and parameter.sharded.grad is None:
                size = parameter.local.numel()
                zeros = torch.zeros(size, dtype=self._dtype, device=self._step_pool.device)
                parameter.sharded.grad = parameter.sharding.wrap_gradient(zeros)

    def forget(self) -> None:
        """Forget what this backward has handed over, and with it which parameters were used.

        If it has handed over nothing, that stays for the reduction of a later backward.
        """
        if self._fresh is not None:
            self.used[:] = [False] * len(self.used)
        self._fresh = None

    def step_in_backward(self, is_stepped: bool) -> None:
        """Set whether gradients live only until `drop`, in memory of a pool. There are none now."""
        self._steps_in_backward = is_stepped
        self.kept_memory = None

    def drop(self) -> None:
        """Free the gradients, after the optimizer's step."""
        for parameter in self.parameters:
            if not isinstance(parameter.sharded.grad, UnreducedGradient):
                parameter.sharded.grad = None
        memory, self.kept_memory = self.kept_memory, None
        if memory is not None:
            # A hook or the optimizer may have kept a gradient.
            pool = self._step_pool
            part_with = pool.disown if is_shared(memory, 1) else pool.free
            part_with(memory.untyped_storage())

    def discard(self) -> None:
        """Drop the gradients of the backward that raised."""
        self._forget_written()
        reduced, self._reduced = self._reduced, None
        if reduced is not None and self._offloader is not None:  # it was not collected
            self._pool.free(reduced.untyped_storage())
        self._close()
        self._free_scratch()
        self.residual = None
        self.accumulated.rollback()
        if self._offload is not None:
            self._offload.work.synchronize()
            self._end_offload()
        for position, gradient in (self._fresh or {}).items():
            # Other ranks may have raised before they reduced it.
            if self.parameters[position].sharded.grad is gradient:
                self.parameters[position].sharded.grad = None
        self._fresh = None
        if self._steps_in_backward:
            self.drop()
        elif self._offloader is None:
            self.kept_memory = None
        self.state = GradientState.IDLE

    def gets_gradient(self, position: int) -> bool:
        """Whether a reduction hands a gradient to a parameter. All ranks agree."""
        if self.parameters[position].sharded.requires_grad:
            return True
        return self._accumulated is not None and self._accumulated.is_awaited[position]

    # -- parts of the above ----------------------------------------------------------------------

    @property
    def _has_none(self) -> bool:
        """Whether there are no gradients to add to."""
        for parameter in self.parameters:
            gradient = parameter.sharded.grad
            if gradient is not None and reduced_part_of(gradient) is not None:
                return False
        return True

    def memory(self) -> Tensor:
        """Return memory [S] for the gradients of this backward."""
        size = self._layout.shard_elements
        if self._steps_in_backward:
            if self.kept_memory is None:
                self.kept_memory = self._step_pool.allocate_tensor(size, self._dtype)
        elif self.kept_memory is None or is_shared(self.kept_memory, own_references=1):
            if self._offloader is None:
                device = self._first_pool.device
                with torch.inference_mode(mode=False):
                    self.kept_memory = torch.empty(size, dtype=self._dtype, device=device)
            else:
                self.kept_memory = self._offloader.allocate_shard(  # slow
                    self._layout, self._layout.gradient_dtype
                )
        return self.kept_memory

    @property
    def _step_pool(self) -> Pool:
        """A pool on the device of gradients: of those that are dropped in backward."""
        return self._first_pool if self._offloader is None else self._offloader.staging

    def _forget_written(self) -> None:
        self._written = [False] * len(self._written)
        self._claimed = {}

    def _open(self) -> None:
        """Give the buffer memory, unless it is FILLING already."""
        assert self.state is not GradientState.REDUCING, "its last reduction is in flight"
        self.finish_offload()
        if self.state is GradientState.FILLING:
            return
        self._transition(GradientState.FILLING)
        if not self._owns_buffer:
            is_reduced = self._settings.reduce_grads and self._pool is self._first_pool
            can_be_in_place = self._can_be_in_place and not self._steps_in_backward
            self._is_in_place = is_reduced and can_be_in_place and self._has_none
            if self._is_in_place and isinstance(self._buffer, FlatBuffer):
                self._buffer.acquire(self.memory().untyped_storage())
            else:
                self._buffer.acquire()

    def _close(self) -> None:
        if self._buffer.is_acquired:
            self._evict_all()
            self._buffer.release()
            holds_none = self._is_in_place and self._reduced is not self.kept_memory
            if holds_none and not self._keeps_memory:
                self.kept_memory = None
        self._aliases = {}

    def _evict_all(self) -> None:
        for position in self._aliases:
            self._evict(position)

    def _evict(self, position: int) -> None:
        """Move a gradient that was computed in its extent, and is still referenced, to new memory.

        Autograd may hold it to add the gradient of an earlier call, or a user's hook may hold it.
        """
        for alias in self._aliases.get(position, ()):
            gradient = alias()
            if (
                gradient is not None
                and gradient.data_ptr() == self._buffer.views[position].data_ptr()
            ):
                gradient.data = gradient.clone()

    def _reduce_target(self) -> Tensor:
        """Return where to reduce to [S]: the gradients' memory, or scratch to add to them."""
        size, flat = self._layout.shard_elements, self._buffer.flat
        if self._is_in_place and self._has_none:
            self._reduced = self.kept_memory  # it gets its memory back when the buffer closes
            return flat
        if self._offloader is not None:  # freed when the copy to the host has ended
            self._reduced = self._allocate_tensor(size, flat.dtype, "shard on the device")
        elif self._has_none:
            self._reduced = self.memory()
        else:
            self._reduced = self._allocate_tensor(size, self._dtype, "shard to add")
            self._scratch.append(self._reduced.untyped_storage())
        return self._reduced

    def _allocate_tensor(self, num_elements: int, dtype: torch.dtype, purpose: str) -> Tensor:
        name = f"{purpose} of {self._buffer.name}"
        return self._pool.allocate_tensor(num_elements, dtype, name)

    def _zero_padding(self) -> None:
        if self._padding is None:
            self._padding = list(_padding_of(self._buffer.flat, self._layout))
        for part in self._padding:
            part.zero_()

    def _free_scratch(self) -> None:
        for storage in self._scratch:
            self._pool.free(storage)
        self._scratch = []

    def _hand_over(self, reduced: Tensor) -> None:
        if self._settings.shard_hook is not None:
            self._settings.shard_hook(reduced)
        is_own = reduced is self.kept_memory
        has_accumulated = self._accumulated is not None and self._accumulated.is_active
        self._fresh = self._fresh or {}
        pairs = zip(self.parameters, self._slices, strict=True)
        with torch.no_grad():
            for position, (parameter, own_run) in enumerate(pairs):
                is_accumulated = has_accumulated and self.accumulated.begin_hand_over(position)
                if not self.gets_gradient(position):
                    continue
                run = reduced[own_run].data
                own = run if is_own or parameter.sharded.grad is not None else run.clone()
                gradient = parameter.sharding.wrap_gradient(own.to(self._dtype))
                if _accumulate(parameter, apply_gradient_hooks(parameter.sharded, gradient)):
                    self._fresh[position] = parameter.sharded.grad
                if is_accumulated:
                    self.accumulated.end_hand_over(position)
        if not self._steps_in_backward and not self._keeps_memory:
            self.kept_memory = None  # freed with the gradients

    def _end_offload(self) -> None:
        offload, self._offload = self._offload, None
        assert offload is not None
        assert self._offloader is not None
        self._pool.free(offload.reduced.untyped_storage())
        if offload.arrived is not self.kept_memory:
            self._offloader.staging.free(offload.arrived.untyped_storage())

    def _transition(self, to: GradientState) -> None:
        assert to in _TRANSITIONS[self.state], f"gradients: {self.state} -> {to}"
        self.state = to


@dataclass(frozen=True, slots=True)
class _PendingOffload:
    """Reduced gradients that are being copied to the host."""

    reduced: Tensor  # [S], on the device
    arrived: Tensor  # [S], on the host
    work: DeviceWork


def _accumulate(parameter: FSDPParameter, gradient: Tensor) -> bool:
    """Add ``gradient`` to that of the parameter. Returns whether it is the first."""
    sharded = parameter.sharded
    if sharded.grad is None:
        if gradient.dtype != sharded.dtype:
            sharded.grad_dtype = gradient.dtype
        sharded.grad = gradient
        return True
    if not isinstance(sharded.grad, DTensor):
        raise PlanError(
            f"{parameter.name}.grad was set to a {type(sharded.grad).__name__}; expected None or a "
            "DTensor before backward"
        )
    sharded.grad.add_(gradient)
    return False


def _divisor_before_the_sum(dtype: torch.dtype, divisor: float) -> float:
    """Return the part of ``divisor`` by which gradients are divided before the sum.

    Dividing after the sum is cheaper, but large sums in float16 would overflow. Dividing by all of
    it before the sum would make small numbers underflow. A power of two near the square root
    balances both, and the division by it is exact.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (math.isqrt(max(1, int(divisor))).bit_length() - 1)


def _padding_of(flat: Tensor, layout: Layout) -> Iterator[Tensor]:
    """Yield the parts of a flat buffer that no parameter has."""
    for rank, shard in enumerate(flat.view(layout.world_size, -1)):
        end = 0
        for extent in layout.extents:
            start = layout.offset_in_shard(extent, rank)
            if end < start:
                yield shard[end:start]
            end = start + layout.num_owned(extent, rank)
        if end < len(shard):
            yield shard[end:]
