"""`FSDPModule`: sharded modules with FSDP2's methods.

Prefetching follows the recorded order of the last pass, so FSDP2's prefetch hints are accepted and
ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.api import MemoryKind
from shardwise.errors import CheckpointError, PlanError
from shardwise.features.collective_memory import use_memory
from shardwise.features.sleep import following
from shardwise.plan.options import UnitSettings
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.attach import settings_of, shares_settings
from shardwise.runtime.engine import HANDLE, Handle
from shardwise.runtime.module import (
    UnitMethods,
    handle_of,
    runtime_of_root,
    runtimes_in,
    unit_class,
    units_in,
)
from shardwise.schedule.events import EventKind
from shardwise.tensor.sharded_tensor import ShardedTensor

__all__ = ["FSDPModule", "FSDPState", "GradientReductionHandle", "UnshardHandle"]

_NO_BACKEND = "is not supported; choose a backend by the process group of the mesh"


@dataclass(frozen=True)
class FSDPState:
    """What programs, such as the stages of pipelines, read of a unit by FSDP2's private names."""

    module: nn.Module

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return handle_of(self.module).options.precision

    @property
    def _fsdp_param_group(self) -> None:
        """None, as for a unit without parameters: programs leave out what they set in it."""

    @property
    def _state_ctx(self) -> SimpleNamespace:
        """One state for the whole module. The stages of pipelines call its ``post_backward``.

        torch's own stage calls the final callback of the root as well, others may not: the first
        call reduces, and then nothing is left to reduce.
        """
        group = SimpleNamespace(post_backward=self._end_accumulation)
        state = SimpleNamespace(_fsdp_param_group=group, _fsdp_param_groups=[group])
        return SimpleNamespace(all_states=[state])

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what micro-batches have added up: the stages of pipelines call this at the end."""
        if handle_of(self.module).index == 0:
            self._end_accumulation()

    def _end_accumulation(self) -> None:
        for runtime in runtimes_in(self.module):
            runtime.scheduler.end_accumulation()


class UnshardHandle:
    """A gather in flight, from `FSDPModule.unshard`."""

    def __init__(self, unit: Handle) -> None:
        self._unit: Handle | None = unit

    def wait(self) -> None:
        """Wait for the gather, and put the whole parameters into the module.

        Further calls do nothing.
        """
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.runtime.scheduler.request(EventKind.WAIT, unit.index)


class GradientReductionHandle:
    """The reductions of `FSDPModule.finalize_backward`, which are complete."""

    def wait(self) -> None:
        """No effect."""


@unit_class
class FSDPModule(nn.Module):
    """The base class of the units that `fully_shard` makes.

    As with any collective, all ranks have to call the same methods.
    """

    # -- parameters ------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters, not those of units inside it.

        They are whole until `reshard`, or until the unit's next forward or backward frees them. An
        optimizer's step in between does not change them.

        Args:
            async_op: return immediately, with a handle to wait for them.
        """
        unit = handle_of(self)
        unit.runtime.scheduler.request(EventKind.GATHER, unit.index)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters, unless its forward or backward is running."""
        unit = handle_of(self)
        unit.runtime.scheduler.request(EventKind.FREE, unit.index)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As in `torch.nn.Module`; the tensors are whole, or the shards of this rank.

        Raises:
            CheckpointError: they are the shards of another rank.
        """
        _check_own_shards(self, state_dict)
        return super().load_state_dict(state_dict, *args, **options)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether units are freed after forward and gathered again for backward.

        Raises:
            PlanError: it is a number, which only `fully_shard` accepts.
        """
        if not isinstance(reshard_after_forward, bool):
            raise PlanError(
                f"set_reshard_after_forward({reshard_after_forward!r}): expected True or False; "
                "pass a number to fully_shard(reshard_after_forward=...)"
            )
        for settings in _settings_in(self, recurse):
            settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees units whose gradients it does not reduce.

        If not, they stay gathered for the next micro-batch, until a backward reduces. Unlike in
        FSDP2, a unit that is reduced or changed is always freed.
        """
        for settings in _settings_in(self, recurse):
            settings.reshard_after_backward = reshard_after_backward

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDPModule":
        """Convert or move the module. A model that is moved to the host sleeps until it is back."""
        with following(self, fn) as function:
            UnitMethods._apply(cast("Any", self), function, recurse)
        return self

    # -- gradients -------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients. If not, whole gradients add up on every rank.

        For accumulation with one reduction, set it to False before the first micro-batch and to
        True before the last, on every rank. As in FSDP2.

        Until then ``p.grad`` is a tensor without elements. Setting it to None, or ``zero_grad()``,
        drops what has been accumulated; reading it raises a StepError. A micro-batch that raises
        adds nothing. Hooks of `torch.Tensor.register_hook` run at a reduction, on the sum.
        """
        _check_not_reproducible(self, "set_requires_gradient_sync")
        for settings in _settings_in(self, recurse):
            settings.reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces gradients over the outer axis of a 2-D mesh.

        If not, they add up in shards of the inner axis, and ``p.grad`` is as described in
        `set_requires_gradient_sync`. As in FSDP2.
        """
        _check_not_reproducible(self, "set_requires_all_reduce")
        for settings in _settings_in(self, recurse):
            settings.all_reduce_grads = requires_all_reduce

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that micro-batches have added up. All ranks must call this.

        Gradients are not reduced while `set_requires_gradient_sync` or, over the outer axis of a
        2-D mesh, `set_requires_all_reduce` is False. As in FSDP2 since PyTorch 2.15, but
        `set_manual_backward_finalization` is not needed.

        Args:
            async_op: return a handle.

        Raises:
            PlanError: this is a unit inside a sharded model, or the model is ``reproducible``.
            StepError: in a forward, a backward, `sw.gathered` or `sw.join`.
        """
        _check_not_reproducible(self, "finalize_backward")
        if HANDLE in vars(self):  # else it is on the meta device
            runtime_of_root(self)
            self._get_fsdp_state()._end_accumulation()
        return GradientReductionHandle() if async_op else None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients by ``factor`` and not by the number of ranks.

        A unit with a factor may have other ranks than the module around it. Experts are one case:
        their tokens come from more ranks than the ones that have the same experts.

        Raises:
            PlanError: ``factor`` is not a positive number.
        """
        if not factor > 0:
            raise PlanError(f"set_gradient_divide_factor({factor!r}): expected a positive number")
        _check_not_reproducible(self, "set_gradient_divide_factor")
        settings_of(self).gradient_divisor = factor

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], None],
        *,
        stream: Any = None,  # noqa: ARG002 - as in FSDP2
    ) -> None:
        """Call ``hook`` with this unit's reduced gradients, before the parameters get them.

        The hook gets this rank's part of them, 1-D, and may change it in place, for example by a
        reduction over ranks that are not in the mesh. As in FSDP2.

        Args:
            hook: called on the thread and stream of backward, in the same order on every rank.
            stream: accepted, without effect.

        Raises:
            PlanError: parts of the unit are on other ranks (``shard_placement_fn``).
        """
        _check_not_reproducible(self, "set_all_reduce_hook")
        if shares_settings(self):
            raise PlanError(
                "set_all_reduce_hook is not supported with parameters on several meshes; call it "
                "on the modules of each mesh"
            )
        settings_of(self).shard_hook = hook

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether the backend only sums this unit's gradients, and a separate pass divides.

        By default NCCL divides by powers of two, which gives the same bits.
        """
        settings_of(self).only_sums = enable

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether the backend allocates the gather and reduce buffers of the whole model.

        Call it on all ranks, between steps. Gradients are then reduced in their buffer and copied.

        Raises:
            PlanError: the backend cannot allocate tensors.
        """
        kind = MemoryKind.REGISTERED if enable else MemoryKind.OWN
        self._use_memory(kind)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Put the gather and reduce buffers of the whole model into symmetric memory.

        Call it on all ranks, between steps. The memory is allocated and registered in the first
        step, and again when units are called in another order. If ranks have different offsets,
        they raise a StepError. If NCCL supports it, gathers use communicators whose copies run on
        copy engines (the zero-CTA policy).

        Raises:
            PlanError: the backend has no such memory, or ``backend`` is not "NCCL".
        """
        if backend != "NCCL":
            raise PlanError(f'set_symm_mem_for_comm({backend!r}): expected "NCCL"')
        self._use_memory(MemoryKind.SYMMETRIC)

    def _use_memory(self, kind: MemoryKind) -> None:
        handle: Handle | None = self.__dict__.get(HANDLE)
        if handle is not None:
            use_memory(handle.runtime, kind)
        settings_of(self).collective_memory = kind

    # -- accepted, without effect ----------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward waits for its reductions at its end."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """No effect: every backward ends its reductions, and `finalize_backward` may be called."""

    def set_modules_to_forward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """No effect: ``prefetch`` units are gathered ahead, in the order of the last forward."""

    def set_modules_to_backward_prefetch(self, modules: "Sequence[FSDPModule]") -> None:
        """No effect: ``prefetch`` units are gathered ahead, in the order of backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: units are always gathered for backward."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """No effect: whole units are reduced; see ``unused=`` of `fully_shard`."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect: at most two reduce buffers are ever alive."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect: gathers and reductions always use separate groups."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """No effect: gathers wait for the stream that calls the model, and for its optimizer."""

    def reset_iter_state(self) -> None:
        """No effect: an exception leaves no state behind."""

    # -- private in PyTorch, but read by programs ------------------------------------------------

    def _get_fsdp_state(self) -> "FSDPState":
        return FSDPState(self)

    # -- refused ---------------------------------------------------------------------------------

    def set_keep_unsharded_storage(
        self,
        keep: bool,
        *,
        recurse: bool = True,  # noqa: ARG002 - as in FSDP2
    ) -> None:
        """Not supported, unless it is False: blocks are not captured into CUDA graphs.

        Raises:
            PlanError: ``keep`` is True.
        """
        if keep:
            raise PlanError(
                "set_keep_unsharded_storage(True) is not supported, because units cannot be "
                "captured into CUDA graphs; to keep parameters gathered between forward and "
                "backward, use set_reshard_after_forward(False)"
            )

    def set_custom_all_gather(self, *_args: Any, **_kwargs: Any) -> None:
        """Not supported: raises a PlanError. The mesh's process group determines the backend."""
        raise PlanError(f"set_custom_all_gather {_NO_BACKEND}")

    def set_custom_reduce_scatter(self, *_args: Any, **_kwargs: Any) -> None:
        """Not supported: raises a PlanError. The mesh's process group determines the backend."""
        raise PlanError(f"set_custom_reduce_scatter {_NO_BACKEND}")


def _check_not_reproducible(module: nn.Module, method: str) -> None:
    handle: Handle | None = vars(module).get(HANDLE)
    if handle is not None and handle.runtime.mesh.leaves is not None:
        raise PlanError(
            f"{method}: the model is reproducible, so the engine sums the gradients of all "
            f"{handle.runtime.mesh.leaves} micro-batches of a step, and divides by their number; "
            "leave out the call, or reproducible=... of fully_shard"
        )


def _check_own_shards(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if ``state`` has shards of another rank, as unpickled tensors do."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        (saved, size), (own, own_size) = map(_shard_of, (state.get(name), parameter))
        if saved != own and size == own_size:
            raise CheckpointError(
                f"{name}: the state dict has shard {saved} of {size}, and this rank stores shard "
                f"{own}. torch.save(model.state_dict()) writes the shards of one rank; save with "
                "sw.save or torch.distributed.checkpoint, which write those of all ranks, or "
                "inside `with sw.gathered(model):`; or read the file that this rank has written"
            )


def _shard_of(tensor: Any) -> tuple[int, int]:
    """The number of the shard that the local tensor is, and of how many."""
    if isinstance(tensor, ShardedTensor):
        return tensor.sharding.mesh.rank, tensor.sharding.mesh.size
    number, size = 0, 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        place = mesh.get_coordinate() or ()  # of the rank that has made the mesh
        for dim, (placement, index) in enumerate(zip(tensor.placements, place, strict=False)):
            if not placement.is_replicate():
                number = number * mesh.size(dim) + index
                size *= mesh.size(dim)
    return number, size


def _settings_in(module: nn.Module, recurse: bool) -> list[UnitSettings]:
    return [settings_of(unit) for unit in units_in(module, recurse)]
