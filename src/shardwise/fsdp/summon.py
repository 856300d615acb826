"""Whole parameters for a while, between steps."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.fsdp.names import clean_names
from shardwise.runtime.module import FSDPModule, gathered, ledger
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["summon_full_params"]


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,  # noqa: ARG001 (whoever asks for less may have more)
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within it the parameters of the models in ``module`` are whole; all ranks have to enter.

    Args:
        module: holds a wrapper, or is in one.
        recurse: whole are always all parameters of the model.
        writeback: keep changes, which every rank has to make alike.
        rank0_only: do not ask that other ranks see whole ones; they do.
        offload_to_cpu: on a GPU refused.
        with_grads: gradients are whole as well, and kept as ``writeback`` says.

    Raises:
        PlanError: flags that do not go together, or cannot be honoured.
    """
    if rank0_only and writeback:
        raise PlanError("writeback and rank0_only: a change has to be made on every rank")
    parameters = clean_names(module)
    if offload_to_cpu and any(p.device.type != "cpu" for p in parameters.values()):
        raise PlanError(
            "offload_to_cpu=True: parameters are whole where they compute; for a copy on the host "
            "use state_dict_type(..., FullStateDictConfig(offload_to_cpu=True))"
        )
    gradients = _whole_gradients(parameters) if with_grads else {}
    with contextlib.ExitStack() as stack:
        for unit in _roots(module):
            stack.enter_context(gathered(unit, write_back=writeback))
        dense = clean_names(module)
        for name, whole in gradients.items():
            dense[name].grad = whole
        yield
        changed = {name: dense[name].grad for name in gradients}
    for name, changed_to in changed.items():
        kept = parameters[name].grad
        if writeback and kept is not None and changed_to is not None:
            kept.copy_(changed_to)


def _whole_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: parameter.grad.full_tensor()
        for name, parameter in parameters.items()
        if isinstance(parameter.grad, ShardedTensor)
    }


def _roots(module: nn.Module) -> list[nn.Module]:
    """A unit for each sharded model in ``module``."""
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    return list({id(ledger(unit)): unit for unit in units}.values())
