"""What may be asked of a unit between the calls of it: the methods of FSDP2's modules.

The schedule knows the order of the last pass and gathers ahead by itself, so hints about order have
nothing to add; they are taken, so that a program that gives them runs, and that is all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.runtime.scheduler import Scheduler

__all__ = ["HANDLE", "Controls", "UnshardHandle", "is_root_unit"]

HANDLE = "_shardwise"  # where a module keeps how it finds its unit


class UnshardHandle:
    """A gather under way, of `Controls.unshard`."""

    def __init__(self, scheduler: Scheduler, indices: Sequence[int]) -> None:
        self._scheduler: Scheduler | None = scheduler
        self._indices = indices

    def wait(self) -> None:
        """Have the whole parameters in the module; calling it again does nothing."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.await_by_hand(self._indices)


class Controls(nn.Module):
    """Mixed into every unit. All ranks have to call the same, as with any collective."""

    # -- parameters ------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters, not those of units inside it.

        They are whole until `reshard`, or until the unit's next forward or backward frees them. An
        optimizer's step in between does not reach them.

        Args:
            async_op: return at once, with a handle to wait for them.
        """
        scheduler, indices = _scheduler_of(self), _indices_in(self, recurse=False)
        scheduler.gather_by_hand(indices)
        handle = UnshardHandle(scheduler, indices)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters, if no forward or backward of it is under way."""
        _scheduler_of(self).free_by_hand(_indices_in(self, recurse=False))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether units are freed after forward and gathered again for backward.

        Raises:
            PlanError: it is a number, which has to be known to `fully_shard`.
        """
        if not isinstance(reshard_after_forward, bool):
            raise PlanError(
                f"set_reshard_after_forward({reshard_after_forward!r}): expected True or False; "
                "pass a number to fully_shard(reshard_after_forward=...)"
            )
        indices = _indices_in(self, recurse=recurse)
        _scheduler_of(self).set_reshards(indices, value=reshard_after_forward)

    # -- gradients -------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; while not, they add up whole on every rank.

        For accumulation with one reduction: set it to False before the first micro-batch and to
        True before the last. As in FSDP2; every rank has to call it.
        """
        indices = _indices_in(self, recurse=recurse)
        _scheduler_of(self).set_synchronizes(indices, value=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the outer axis of a two-dimensional mesh, too.

        While not, they add up in shards of the inner axis. As in FSDP2.
        """
        indices = _indices_in(self, recurse=recurse)
        _scheduler_of(self).set_crosses(indices, value=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's gradients, summed over all ranks, by ``factor``, not their number.

        Raises:
            PlanError: it is not a positive number.
        """
        if not factor > 0:
            raise PlanError(f"set_gradient_divide_factor({factor!r}): expected a positive number")
        scheduler = _scheduler_of(self)
        for index in _indices_in(self, recurse=False):
            for gradients in scheduler.units[index].gradients:
                gradients.divide_by(factor)

    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], None],
        *,
        stream: Any = None,  # noqa: ARG002 - as in FSDP2
    ) -> None:
        """Call ``hook`` with this unit's reduced gradients, before they reach the parameters.

        They are this rank's part of all of them, 1-D; the hook may change it in place, for example
        by a reduction over ranks that the mesh does not know. As in FSDP2.

        Args:
            hook: called on the thread and stream of backward, in the same order on every rank.
            stream: taken, and not used.
        """
        scheduler = _scheduler_of(self)
        for index in _indices_in(self, recurse=False):
            for gradients in scheduler.units[index].gradients:
                gradients.reduced_hook = hook

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    # -- of no effect: the schedule, or the way in which collectives are written, has it already ---

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Every backward ends with its reductions collected."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Units are freed after backward."""

    def set_modules_to_forward_prefetch(self, modules: "Sequence[Controls]") -> None:
        """Units are gathered ahead in the order of the last forward, ``prefetch`` of them."""

    def set_modules_to_backward_prefetch(self, modules: "Sequence[Controls]") -> None:
        """Units are gathered ahead in the order of backward, ``prefetch`` of them."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Units are gathered for backward."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reductions are sums, and divisions are apart from them."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Units are reduced whole; ``unused=`` says what becomes of unused parameters."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """At most two are alive."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Gathers and reductions have a group each."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Buffers come from the model's own pool."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Gathers wait for the stream that calls the model, and so for its optimizer."""

    def reset_iter_state(self) -> None:
        """An exception leaves no state behind."""

    # -- refused ---------------------------------------------------------------------------------

    def set_custom_all_gather(self, *_args: Any, **_kwargs: Any) -> None:
        """Raises PlanError."""
        raise _refusal("set_custom_all_gather", "choose a backend by the process group of the mesh")

    def set_custom_reduce_scatter(self, *_args: Any, **_kwargs: Any) -> None:
        """Raises PlanError."""
        way_out = "choose a backend by the process group of the mesh"
        raise _refusal("set_custom_reduce_scatter", way_out)

    def set_symm_mem_for_comm(self, *_args: Any, **_kwargs: Any) -> None:
        """Raises PlanError."""
        raise _refusal("set_symm_mem_for_comm", "leave it out")


def is_root_unit(module: nn.Module) -> bool:
    """Whether ``module`` is sharded and in no other unit."""
    handle = module.__dict__.get(HANDLE)
    return handle is not None and handle.index == 0


def _scheduler_of(module: nn.Module) -> Scheduler:
    if HANDLE not in module.__dict__:
        raise PlanError(f"{type(module).__name__} is on the meta device, so not sharded yet")
    scheduler: Scheduler = module.__dict__[HANDLE].runtime.scheduler
    return scheduler


def _indices_in(module: nn.Module, *, recurse: bool) -> list[int]:
    inside = module.modules() if recurse else (module,)
    return [inner.__dict__[HANDLE].index for inner in inside if isinstance(inner, Controls)]


def _refusal(method: str, way_out: str) -> PlanError:
    return PlanError(f"{method} has no place in how collectives are run here; {way_out}")
