"""What is saved: modules, optimizers and other state as components with named tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import tree
from shardwise.errors import CheckpointError
from shardwise.plan.strategy import STRATEGIES
from shardwise.runtime.mesh import Axis, resolve_mesh
from shardwise.runtime.module import FSDPModule
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["Collected", "axis_of", "check_idle", "collect", "parameter_names", "tensors_of"]


@dataclass
class Collected:
    """A component: its tensors by name, and the rest of it as JSON."""

    kind: str
    tree: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)


def collect(name: str, value: Any, model: nn.Module) -> Collected:
    """``value``, which is called ``name`` in the checkpoint, taken apart.

    Raises:
        CheckpointError: it cannot be saved; names what of it.
    """
    match value:
        case nn.Module():
            check_idle(value)
            tensors, aliases = tensors_of(value)
            return Collected("module", None, tensors, aliases)
        case Optimizer():
            return _encoded("optimizer", _by_name(value, model))
        case _ if callable(getattr(value, "state_dict", None)):
            return _encoded("object", value.state_dict(), name)
        case _:
            return _encoded("data", value, name)


def tensors_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Its parameters and persistent buffers, and the other names of tied ones.

    Of several names the first one counts, as in ``named_parameters()``.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name}: extra state of a module is saved only if it is a tensor, got a "
                f"{type(tensor).__name__}; save it beside the model, as in sw.save(..., extra=...)"
            )
        known = first.setdefault(id(tensor), name)
        if known == name:
            tensors[name] = tensor
        else:
            aliases[name] = known
    return tensors, aliases


def parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The parameters of ``optimizer`` by their names in ``model``, in the order of the groups.

    Raises:
        CheckpointError: one is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"optimizer, group {number}, parameter {position} of shape "
                    f"{tuple(parameter.shape)}: not one of the model's; build the optimizer from "
                    "model.parameters()"
                )
            found[names[id(parameter)]] = parameter
    return found


def axis_of(modules: list[nn.Module]) -> Axis:
    """The ranks that save or load them: those of their shards, or all, which then are replicas."""
    for module in modules:
        for parameter in module.parameters():
            if isinstance(parameter, ShardedTensor):
                return parameter.sharding.axis
    return resolve_mesh(None, STRATEGIES["ddp"])


def check_idle(module: nn.Module) -> None:
    """Refuse a model whose parameters are whole at the moment, as inside a step.

    Raises:
        CheckpointError: names one of them.
    """
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for name, parameter in unit.named_parameters():
            if not isinstance(parameter, ShardedTensor):
                raise CheckpointError(
                    f"{name} is gathered; save and load between steps, outside of sw.gathered"
                )


def _by_name(optimizer: Optimizer, model: nn.Module) -> Mapping[str, Any]:
    """Its state and its groups, with names of parameters in the place of parameters."""
    parameters = parameter_names(optimizer, model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    return {
        "state": states,
        "param_groups": [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def _encoded(kind: str, value: Any, name: str = "") -> Collected:
    tensors: dict[str, Tensor] = {}
    try:
        return Collected(kind, tree.encode(value, tensors), tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}" if name else str(error)) from error
