"""`summon_full_params`: full parameters between steps."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.fsdp.names import clean_names
from shardwise.runtime.module import FSDPModule, handle_of, ledger

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
        rank0_only: full parameters are needed on rank 0 only; the other ranks gather them, too.
        offload_to_cpu: refused for parameters on an accelerator.
        with_grads: gather gradients as well; ``writeback`` applies to them, too.

    Raises:
        PlanError: flags contradict each other or are not supported.
    """
    if rank0_only and writeback:
        raise PlanError(
            "rank0_only=True: expected writeback=False, since changes must be made on every rank"
        )
    parameters = clean_names(module)
    if offload_to_cpu and any(p.device.type != "cpu" for p in parameters.values()):
        raise PlanError(
            "offload_to_cpu=True: full parameters stay on the device; for a copy on the host use "
            "state_dict_type(..., FullStateDictConfig(offload_to_cpu=True))"
        )
    gradients = _full_gradients(parameters) if with_grads else {}
    with contextlib.ExitStack() as stack:
        for unit in _unit_per_model(module):
            scheduler = handle_of(unit).runtime.scheduler
            stack.enter_context(scheduler.gathered(write_back=writeback))
        full = clean_names(module)
        for name, gradient in gradients.items():
            full[name].grad = gradient
        yield
        changed = {name: full[name].grad for name in gradients}
    for name, gradient_after in changed.items():
        kept = parameters[name].grad
        if writeback and kept is not None and gradient_after is not None:
            kept.copy_(gradient_after)


def _full_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: parameter.grad.full_tensor()
        for name, parameter in parameters.items()
        if isinstance(parameter.grad, DTensor)
    }


def _unit_per_model(module: nn.Module) -> list[nn.Module]:
    """One unit of each sharded model in ``module``; the units of a model share a ledger."""
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    return list({id(ledger(unit)): unit for unit in units}.values())
