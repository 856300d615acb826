"""`summon_full_params`: full parameters between steps."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.gathered import holding
from shardwise.fsdp.errors import InStepError, StateError, UnsupportedError
from shardwise.fsdp.names import clean_names
from shardwise.runtime import hooks
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.module import handle_of, ledger

__all__ = ["summon_full_params"]


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,  # noqa: ARG001
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Gather the parameters of the sharded models in ``module``. Every rank must enter.

    Args:
        module: contains an FSDP module, or is part of one.
        recurse: ignored; all parameters of a model are gathered together.
        writeback: keep changes, which must be the same on every rank.
        rank0_only: full parameters are needed only on rank 0; the other ranks gather them anyway.
        offload_to_cpu: not supported for parameters on an accelerator.
        with_grads: also gather gradients; ``writeback`` applies to them as well.

    Raises:
        UnsupportedError: flags contradict each other or are not supported.
        InStepError: a forward, a backward or another `summon_full_params` is under way.
        StateError: a parameter was replaced by one with another shape, dtype or device.
    """
    parameters = clean_names(module)
    _check_flags(parameters, writeback, rank0_only, offload_to_cpu, with_grads)
    gradients = _full_gradients(parameters) if with_grads else {}
    with contextlib.ExitStack() as stack:
        units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for unit in {id(ledger(unit)): unit for unit in units}.values():  # one of each model
            scheduler = handle_of(unit).runtime.scheduler
            in_backward = hooks.current_task() != hooks.NO_TASK
            if in_backward or scheduler.in_gathered or not scheduler.is_idle:
                raise InStepError(
                    "Cannot manually unshard parameters during forward/backward, or inside "
                    "summon_full_params; use it between steps"
                )
            try:
                stack.enter_context(holding(scheduler, write_back=writeback))
            except PlanError as error:  # a parameter was replaced
                raise StateError(f"Cannot writeback: {error}") from error
        full = clean_names(module)
        for name, gradient in gradients.items():
            full[name].grad = gradient
        yield
        changed = {name: full[name].grad for name in gradients}
    for name, gradient_after in changed.items():
        kept = parameters[name].grad
        if writeback and kept is not None and gradient_after is not None:
            kept.copy_(gradient_after)


def _check_flags(
    parameters: Mapping[str, Tensor],
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> None:
    if rank0_only and writeback:
        raise UnsupportedError(
            "rank0_only=True with writeback=True is not supported, since changes must be made on "
            "every rank; pass writeback=False"
        )
    if offload_to_cpu and with_grads:
        raise UnsupportedError(
            "offload_to_cpu=True with with_grads=True is not supported; for gradients on the host "
            "call .cpu() on them inside"
        )
    if offload_to_cpu and any(p.device.type != "cpu" for p in parameters.values()):
        raise UnsupportedError(
            "offload_to_cpu=True: full parameters stay on the device; for a copy on the host use "
            "state_dict_type(..., FullStateDictConfig(offload_to_cpu=True))"
        )


def _full_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for parameter in parameters.values():
        if is_unreduced(parameter.grad):
            parameter.grad.refuse("summon_full_params(with_grads=True)")
    return {
        name: _full_gradient(parameter.grad)
        for name, parameter in parameters.items()
        if isinstance(parameter.grad, DTensor)
    }


def _full_gradient(gradient: DTensor) -> Tensor:
    """The full ``gradient``; a replicated one is not copied, so in-place changes persist."""
    is_replicated = all(placement.is_replicate() for placement in gradient.placements)
    local = gradient.to_local()
    return local.view(gradient.shape) if is_replicated else gradient.full_tensor()
