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
    """This rank's shard [S] of the reduced gradients of one layout: the end of a `Gradients`.

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
        *,
        keeps_memory: bool,
    ) -> None:
        self.parameters = parameters  # in the order of the layout's extents
        self.mesh = mesh
        self.accumulated = AccumulatedGradients(layout, parameters, mesh, pool)
        # By position: autograd has computed a gradient since gradients were last handed over.
        self.used = [False] * len(layout.extents)
        self._offloader = offloader
        self._dtype: torch.dtype = getattr(torch, layout.gradient_dtype)
        self._settings = settings
        self._layout = layout
        self._slices = layout.slices_of_shard(mesh.rank)
        self._first_pool = pool  # before `use_memory_of`
        self._pool = pool  # of reductions
        self._keeps_memory = keeps_memory or offloader is not None
        self._steps_in_backward = False  # gradients then live only until `drop`
        # By position, gradients of parameters that had none before this backward; None until
        # gradients are handed over.
        self._fresh: dict[int, Tensor | None] | None = None
        # [S], until it is handed over; kept memory stays here until it is found to be shared.
        self.kept_memory: Tensor | None = None
        self._host_scale = 1.0  # the part of the scale of sums that the host applies
        self._offload: _PendingOffload | None = None

    @property
    def _has_none(self) -> bool:
        """Whether there are no gradients to add to."""
        for parameter in self.parameters:
            gradient = parameter.sharded.grad
            if gradient is not None and reduced_part_of(gradient) is not None:
                return False
        return True

    def gets_gradient(self, position: int) -> bool:
        """Whether a reduction hands a gradient to a parameter. All ranks agree."""
        is_trained = self.parameters[position].sharded.requires_grad
        return is_trained or self.accumulated.is_awaited[position]

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

    def _deliver(self, reduced: Tensor) -> bool:
        """Hand over ``reduced`` [S], or begin to copy it to the host. Returns whether it copies.

        After the copy its memory is returned to the pool of reductions.
        """
        if self._offloader is None:
            self._hand_over(reduced)
            return False
        size = self._layout.shard_elements
        staging = self._offloader.staging
        to = self.memory() if self._has_none else staging.allocate_tensor(size, self._dtype)
        self._offload = _PendingOffload(reduced, to, self._offloader.to_host(to, reduced))
        return True

    def finish_offload(self) -> None:
        """Wait for the copy to the host, if there is one, and hand over the gradients."""
        if self._offload is not None:
            self._offload.work.synchronize()
            arrived = self._offload.arrived
            copy_scaled_(arrived, arrived, self._host_scale)
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
        self.forget()

    def fill_with_zeros(self) -> None:
        """Give parameters without a gradient zeros, as in a unit that did not run."""
        for position, parameter in enumerate(self.parameters):
            if self.gets_gradient(position) and parameter.sharded.grad is None:
                size = parameter.local.numel()
                zeros = torch.zeros(size, dtype=self._dtype, device=self._device)
                parameter.sharded.grad = parameter.wrap_gradient(zeros)

    def forget(self) -> None:
        """Forget what this backward has handed over, and with it ``used``.

        If it has handed over nothing, ``used`` stays for the reduction of a later backward.
        """
        if self._fresh is not None:
            self.used = [False] * len(self.used)
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

    @property
    def _device(self) -> torch.device:
        """Where gradients are."""
        return (
            self._first_pool.device if self._offloader is None else self._offloader.staging.device
        )

    @property
    def _step_pool(self) -> Pool:
        """The pool of gradients that are dropped in backward, on the device of their parameters."""
        return self._first_pool if self._offloader is None else self._offloader.staging

    def _hand_over(self, reduced: Tensor) -> None:
        if self._settings.shard_hook is not None:
            self._settings.shard_hook(reduced)
        is_own = reduced is self.kept_memory
        has_accumulated = self.accumulated.is_active
        self._fresh = self._fresh or {}
        pairs = zip(self.parameters, self._slices, strict=True)
        with torch.no_grad():
            for position, (parameter, own_run) in enumerate(pairs):
                is_accumulated = has_accumulated and self.accumulated.begin_hand_over(position)
                if not self.gets_gradient(position):
                    continue
                run = reduced[own_run].data
                own = run if is_own or parameter.sharded.grad is not None else run.clone()
                gradient = parameter.wrap_gradient(own.to(self._dtype))
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
