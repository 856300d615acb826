"""Replaces the parameters of a model by shards."""

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise.tensor.operations  # noqa: F401 - registers the operations on shards
from shardwise.errors import PlanError
from shardwise.plan.options import UnitSettings
from shardwise.plan.units import keeps_its_class
from shardwise.runtime import optimizers
from shardwise.runtime.parameters import ParameterOwner
from shardwise.tensor.sharding import Sharding, sharding_of

__all__ = [
    "move_buffers",
    "owner_of",
    "put_sharded",
    "replace_parameter",
    "settings_of",
]

_SETTINGS = "_shardwise_settings"  # the `UnitSettings` of a module


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move the buffers of ``root`` to ``device``, where its parameters will be gathered."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def settings_of(module: nn.Module) -> UnitSettings:
    """The settings of ``module`` as a unit; it may not be sharded yet."""
    settings: UnitSettings = module.__dict__.setdefault(_SETTINGS, UnitSettings())
    return settings


def put_sharded(
    root: nn.Module, original: nn.Parameter, sharding: Sharding, payload: Tensor
) -> tuple[list[ParameterOwner], nn.Parameter]:
    """Put ``payload`` in place of ``original``. Returns its owners and the new parameter."""
    optimizers.watch_optimizers()
    owners = [owner_of(root, name) for name in sharding.extent.parameter.names]
    for owner in owners:
        owner.drop_weak_references()
    is_again = sharding_of(original) is not None
    sharded = replace_parameter(original, payload)
    if is_again and sharded is not original:
        raise PlanError(
            f"{sharding.name}: other code holds a weak reference to this parameter, perhaps in a "
            "WeakKeyDictionary, so a conversion or requires_grad_(True) would replace it, and "
            "optimizers would go on with the old one; drop the reference, or do it before "
            "fully_shard"
        )
    sharding.attach_to(sharded)
    for owner in owners:
        owner.put(sharded)
    if sharded is not original and not (isinstance(original, DTensor) or keeps_its_class(original)):
        optimizers.replace(original, sharded)
    return owners, sharded


def owner_of(root: nn.Module, name: str) -> ParameterOwner:
    """The owner of the parameter ``name`` of ``root``."""
    path, _, attribute = name.rpartition(".")
    return ParameterOwner(root.get_submodule(path), attribute)


def replace_parameter(original: nn.Parameter, payload: Tensor) -> nn.Parameter:
    """Return a parameter with ``payload``, the same object as ``original`` if possible."""
    parameter = nn.Parameter(payload, requires_grad=original.requires_grad)
    own = parameter.__dict__
    attributes = {key: value for key, value in original.__dict__.items() if key not in own}
    original.grad = None
    # A plain tensor cannot become a DTensor, and a tensor with weak references cannot be swapped.
    with contextlib.suppress(RuntimeError, TypeError):
        torch.utils.swap_tensors(original, parameter)  # type: ignore[no-untyped-call]
        parameter = original
    parameter.__dict__.update(attributes)
    return parameter
