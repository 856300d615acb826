"""Gradients on their way from autograd to the shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.plan.layout import Layout
from shardwise.runtime.buffer import FlatBuffer, Pool, is_shared
from shardwise.runtime.collectives import Link, Pending
from shardwise.runtime.managed import ManagedParameter, split_shard
from shardwise.runtime.mesh import Axis
from shardwise.runtime.sharded_tensor import (
    ShardedTensor,
    apply_gradient_hooks,
    run_accumulated_hooks,
)

__all__ = ["Gradients"]


class Gradients:
    """The gradients of one layout, from the moment autograd yields them to ``p.grad``."""

    def __init__(
        self, layout: Layout, parameters: Sequence[ManagedParameter], axis: Axis, pool: Pool
    ) -> None:
        self._parameters = parameters  # in the order of the layout's slots
        self._axis = axis
        self._pool = pool
        self._buffer = FlatBuffer(layout, pool)
        self._written = [False] * len(layout.slots)
        self.used = [False] * len(layout.slots)
        self._fresh: list[int] = []  # positions whose .grad was None before this backward
        self._kept_shard: Tensor | None = None  # [S], reused when nobody holds the last .grad
        self._reduced: Tensor | None = None  # [S]
        self._borrowed: list[torch.UntypedStorage] = []

    def write(self, position: int, gradient: Tensor) -> None:
        """Put a gradient into its slot of the reduce buffer, divided by the number of ranks."""
        if not self._buffer.is_acquired:
            self._buffer.acquire()
        slot = self._buffer.views[position]
        scale = 1.0 / self._axis.num_ranks
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._written[position]:
            slot.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=slot)
        self._written[position] = True

    def launch_reduce(self, link: Link, label: str) -> Pending:
        """Reduce what was written; slots that nothing was written to count as zeros."""
        if not self._buffer.is_acquired:
            self._buffer.acquire()
        for position, view in enumerate(self._buffer.views):
            if not self._written[position]:
                view.zero_()
        self._written = [False] * len(self._written)
        self._reduced = self._target()
        scratch_elements = link.scratch_slots * self._layout.shard_elements
        scratch = self._borrow(scratch_elements)
        return link.reduce_scatter(self._buffer.flat, self._reduced, scratch, label)

    def collect(self) -> None:
        """Hand the reduced gradients to the parameters."""
        assert self._reduced is not None
        is_kept = self._reduced is self._kept_shard
        runs = split_shard(self._reduced, self._layout, self._axis.rank)
        with torch.no_grad():
            for position, (parameter, run) in enumerate(zip(self._parameters, runs, strict=True)):
                if not parameter.sharded.requires_grad:
                    continue
                own = run if is_kept or parameter.sharded.grad is not None else run.clone()
                gradient = ShardedTensor(own, parameter.sharding)
                if _accumulate(parameter, apply_gradient_hooks(parameter.sharded, gradient)):
                    self._fresh.append(position)
        self._reduced = None
        self._give_back()

    def settle(self, used_anywhere: Sequence[bool]) -> None:
        """A parameter that no rank used keeps the gradient it had, which may be None."""
        for position in self._fresh:
            if not used_anywhere[position]:
                self._parameters[position].sharded.grad = None
        for parameter, used in zip(self._parameters, used_anywhere, strict=True):
            if used and parameter.sharded.requires_grad:
                run_accumulated_hooks(parameter.sharded)
        self.forget()

    def forget(self) -> None:
        self._fresh = []
        self.used = [False] * len(self.used)

    def discard(self) -> None:
        """Drop what is under way."""
        self._written = [False] * len(self._written)
        self._reduced = None
        self._give_back()
        self.forget()

    @property
    def _layout(self) -> Layout:
        return self._buffer.layout

    def _target(self) -> Tensor:
        """Where to reduce to [S]: what will be the gradients, or memory to add to them from."""
        if any(p.sharded.grad is not None for p in self._parameters):
            return self._borrow(self._layout.shard_elements)
        if self._kept_shard is None or is_shared(self._kept_shard, own_references=1):
            self._kept_shard = self._buffer.flat.new_empty(self._layout.shard_elements)
        return self._kept_shard

    def _borrow(self, num_elements: int) -> Tensor:
        dtype = self._buffer.flat.dtype
        storage = self._pool.take(num_elements * dtype.itemsize)
        self._borrowed.append(storage)
        return torch.empty(0, dtype=dtype, device=self._pool.device).set_(
            storage, 0, (num_elements,), (1,)
        )

    def _give_back(self) -> None:
        if self._buffer.is_acquired:
            self._buffer.release()
        for storage in self._borrowed:
            self._pool.give(storage)
        self._borrowed = []


def _accumulate(parameter: ManagedParameter, gradient: Tensor) -> bool:
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
