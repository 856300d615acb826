"""Reduced gradients, from the end of a reduction to ``p.grad``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.device import DeviceWork, copy_scaled_
from shardwise.errors import PlanError
from shardwise.plan.layout import Layout
from shardwise.plan.options import UnitSettings
from shardwise.runtime.accumulation import AccumulatedGradients, UnreducedGradient, reduced_part_of
from shardwise.runtime.hooks import apply_gradient_hooks, run_accumulated_hooks
from shardwise.runtime.memory import Pool, is_shared
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["GradientShard"]


class GradientShard:
    """This rank's shard [S] of the reduced gradients of one layout.

    Its memory is allocated in each backward and freed with the gradients. In data-parallel training
    on the CPU it is kept for the next backward (``keeps_memory``): malloc would return other memory
    each time, and the process would grow. Page-locked memory of the host is kept, too.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[FSDPParameter],
        mesh: DataParallelMesh,
        pool: Pool,
        settings: UnitSettings,
        offloader: HostOffloader | None,
        accumulated: AccumulatedGradients,
        *,
        keeps_memory: bool,
    ) -> None:
        self.parameters = parameters
        self.mesh = mesh
        self.offloader = offloader
        self.dtype: torch.dtype = getattr(torch, layout.gradient_dtype)
        self._settings = settings
        self._accumulated = accumulated
        self._layout = layout
        self._slices = layout.slices_of_shard(mesh.rank)
        self._pool = pool
        self._keeps_memory = keeps_memory or offloader is not None
        self._steps_in_backward = False  # gradients then live only until `drop`
        # By position, gradients of parameters that had none before this backward; None until
        # gradients are handed over.
        self._fresh: dict[int, Tensor | None] | None = None
        # [S], until it is handed over; kept memory stays here until it is found to be shared.
        self.current: Tensor | None = None
        self._offload: _PendingOffload | None = None

    @property
    def is_cast_later(self) -> bool:
        """Whether the host casts the sums. Scaling after the cast rounds less."""
        return self.offloader is not None and self._layout.casts_sums

    @property
    def is_empty(self) -> bool:
        """Whether there are no gradients to add to."""
        for parameter in self.parameters:
            gradient = parameter.sharded.grad
            if gradient is not None and reduced_part_of(gradient) is not None:
                return False
        return True

    @property
    def can_reduce_in_place(self) -> bool:
        """Whether the reduce buffer may use this shard's memory."""
        return not self._steps_in_backward and self.is_empty

    def gets_gradient(self, position: int) -> bool:
        """Whether a reduction hands a gradient to a parameter. All ranks agree."""
        is_trained = self.parameters[position].sharded.requires_grad
        return is_trained or self._accumulated.is_awaited[position]

    def memory(self) -> Tensor:
        """Return memory [S] for the gradients of this backward."""
        size = self._layout.shard_elements
        if self._steps_in_backward:
            if self.current is None:
                self.current = self._step_pool.allocate_tensor(size, self.dtype)
        elif self.current is None or is_shared(self.current, own_references=1):
            if self.offloader is None:
                with torch.inference_mode(mode=False):
                    self.current = torch.empty(size, dtype=self.dtype, device=self._pool.device)
            else:
                self.current = self.offloader.allocate_shard(  # slow
                    self._layout, self._layout.gradient_dtype
                )
        return self.current

    def forget_memory(self) -> None:
        """Between steps: do not keep memory on the device for the next backward."""
        if self.offloader is None:
            self.current = None

    def release_memory(self) -> None:
        """Release memory that the reduce buffer used, and that does not hold the gradients."""
        if not self._keeps_memory:
            self.current = None

    def deliver(self, reduced: Tensor, pool: Pool, host_scale: float) -> bool:
        """Hand over ``reduced`` [S], or begin to copy it to the host. Returns whether it copies.

        After the copy it is multiplied by ``host_scale``, and its memory returned to ``pool``.
        """
        if self.offloader is None:
            self._hand_over(reduced)
            return False
        size = self._layout.shard_elements
        staging = self.offloader.staging
        to = self.memory() if self.is_empty else staging.allocate_tensor(size, self.dtype)
        work = self.offloader.to_host(to, reduced)
        self._offload = _PendingOffload(reduced, pool, to, host_scale, work)
        return True

    def finish_offload(self) -> None:
        """Wait for the copy to the host, and hand over the gradients."""
        assert self._offload is not None
        self._offload.work.synchronize()
        arrived = self._offload.arrived
        copy_scaled_(arrived, arrived, self._offload.scale)
        self._hand_over(arrived)
        self._end_offload()

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

    def fill_with_zeros(self) -> None:
        """Give parameters without a gradient zeros, as in a unit that did not run."""
        for position, parameter in enumerate(self.parameters):
            if self.gets_gradient(position) and parameter.sharded.grad is None:
                size = parameter.local.numel()
                zeros = torch.zeros(size, dtype=self.dtype, device=self._device)
                parameter.sharded.grad = parameter.wrap_gradient(zeros)

    def forget_fresh(self) -> bool:
        """Forget which gradients are new. Returns whether any were handed over."""
        fresh, self._fresh = self._fresh, None
        return fresh is not None

    def step_in_backward(self, is_stepped: bool) -> None:
        """Set whether gradients live only until `drop`, in memory of a pool. There are none now."""
        self._steps_in_backward = is_stepped
        self.current = None

    def drop(self) -> None:
        """Free the gradients, after the optimizer's step."""
        for parameter in self.parameters:
            if not isinstance(parameter.sharded.grad, UnreducedGradient):
                parameter.sharded.grad = None
        memory, self.current = self.current, None
        if memory is not None:
            # A hook or the optimizer may have kept a gradient.
            pool = self._step_pool
            part_with = pool.disown if is_shared(memory, 1) else pool.free
            part_with(memory.untyped_storage())

    def discard(self) -> None:
        """Drop all gradients in progress, after an error."""
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
        elif self.offloader is None:
            self.current = None

    @property
    def _device(self) -> torch.device:
        """Where gradients are."""
        return self._pool.device if self.offloader is None else self.offloader.staging.device

    @property
    def _step_pool(self) -> Pool:
        """The pool of gradients that are dropped in backward, on the device of their parameters."""
        return self._pool if self.offloader is None else self.offloader.staging

    def _hand_over(self, reduced: Tensor) -> None:
        if self._settings.reduced_hook is not None:
            self._settings.reduced_hook(reduced)
        is_own = reduced is self.current
        has_accumulated = self._accumulated.is_active
        self._fresh = self._fresh or {}
        pairs = zip(self.parameters, self._slices, strict=True)
        with torch.no_grad():
            for position, (parameter, own_run) in enumerate(pairs):
                is_accumulated = has_accumulated and self._accumulated.begin_hand_over(position)
                if not self.gets_gradient(position):
                    continue
                run = reduced[own_run].data
                own = run if is_own or parameter.sharded.grad is not None else run.clone()
                gradient = parameter.wrap_gradient(own.to(self.dtype))
                if _accumulate(parameter, apply_gradient_hooks(parameter.sharded, gradient)):
                    self._fresh[position] = parameter.sharded.grad
                if is_accumulated:
                    self._accumulated.end_hand_over(position)
        if not self._steps_in_backward and not self._keeps_memory:
            self.current = None  # freed with the gradients

    def _end_offload(self) -> None:
        offload, self._offload = self._offload, None
        assert offload is not None
        assert self.offloader is not None
        offload.pool.free(offload.reduced.untyped_storage())
        if offload.arrived is not self.current:
            self.offloader.staging.free(offload.arrived.untyped_storage())


@dataclass(frozen=True, slots=True)
class _PendingOffload:
    """Reduced gradients that are being copied to the host."""

    reduced: Tensor  # [S], on the device
    pool: Pool  # of `reduced`
    arrived: Tensor  # [S], on the host
    scale: float  # to multiply `arrived` by
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
