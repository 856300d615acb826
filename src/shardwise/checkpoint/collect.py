"""What is saved: modules, optimizers and other state as components with named tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint import tree
from shardwise.checkpoint.files import Spec, spec_of
from shardwise.errors import CheckpointError
from shardwise.plan.strategy import STRATEGIES
from shardwise.runtime.mesh import DataParallelMesh, resolve_mesh
from shardwise.runtime.module import FSDPModule
from shardwise.runtime.tensor import ShardedTensor

__all__ = [
    "Collected",
    "axis_of",
    "check_idle",
    "check_name",
    "collect",
    "parameter_names",
    "specs_of",
    "tensors_of",
]

_MAX_NAME_BYTES = 200  # file systems take 255


@dataclass
class Collected:
    """A component: its tensors by name, and the rest of it as JSON."""

    kind: str
    tree: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)


def specs_of(name: str, collected: Collected) -> list[Spec]:
    """The tensors of the component ``name`` as files describe them.

    Raises:
        CheckpointError: one of them cannot be saved; names it.
    """
    try:
        for key, tensor in collected.tensors.items():
            _check_storable(key, tensor)
        return [spec_of(key, tensor) for key, tensor in collected.tensors.items()]
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def check_name(name: str) -> None:
    """Refuse the name of a component that cannot be part of a file's name.

    Raises:
        CheckpointError: names it.
    """
    is_valid = re.fullmatch(r"[^\x00-\x1f/\\.][^\x00-\x1f/\\]*", name)
    if not is_valid or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"{name!r}: the name of a state is part of a file's name, and this is not a valid file "
            f"name; use at most {_MAX_NAME_BYTES} bytes without slashes or a leading dot"
        )


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
            return _encoded("optimizer", _by_name(value, model), name)
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


def axis_of(modules: list[nn.Module]) -> DataParallelMesh:
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


def _check_storable(key: str, tensor: Tensor) -> None:
    if type(tensor) is DTensor:  # a ShardedTensor is not one of these
        raise CheckpointError(f"{key}: a DTensor cannot be saved; pass its full_tensor()")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise CheckpointError(f"{key}: a {kind} tensor cannot be saved; expected a dense one")


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


def _encoded(kind: str, value: Any, name: str) -> Collected:
    tensors: dict[str, Tensor] = {}
    try:
        return Collected(kind, tree.encode(value, tensors), tensors)
    except RecursionError as error:
        raise CheckpointError(f"{name}: nested too deeply, or contains itself") from error
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
