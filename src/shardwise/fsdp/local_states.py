"""Optimizer states of FSDP1 programs: this rank's elements as plain tensors [n].

In shardwise, parameters are DTensors, and so are their optimizer states. FSDP1 programs save
``optimizer.state_dict()`` on each rank and compare it with the results of FSDP1's functions. The
state dicts of an optimizer that steps parameters of an FSDP1 module therefore contain plain
tensors, and ``load_state_dict`` accepts them.
"""

import weakref
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import local_of, sharding_of

__all__ = ["as_dtensor", "as_local", "use_local_states"]

_meshes: weakref.WeakSet[DataParallelMesh] = weakref.WeakSet()  # meshes of FSDP1 modules
_adopted: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers with local states


def use_local_states(mesh: DataParallelMesh) -> None:
    """Use local states for parameters over ``mesh``, which belong to an FSDP1 module."""
    _meshes.add(mesh)
    _watch_optimizers()


def as_dtensor(value: Any, parameter: Tensor) -> Any:
    """``value``, a state of ``parameter``, as a DTensor if it is this rank's part of one."""
    sharding = sharding_of(parameter)
    if sharding is None or type(value) is not Tensor or not value.ndim:
        return value
    return sharding.wrap(value) if value.shape == local_of(parameter).shape else value


def as_local(value: Any) -> Any:
    """``value`` as the state dict of an optimizer contains it."""
    is_local = isinstance(value, ShardedTensor) and _is_of_fsdp1(value)
    return local_of(value) if is_local else value


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_adopt)


def _adopt(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Make ``optimizer`` save and load local states if it steps parameters of FSDP1 modules."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if optimizer in _adopted or not any(map(_is_of_fsdp1, parameters)):
        return
    _adopted.add(optimizer)
    _wrap_local_states(optimizer)
    optimizer.register_state_dict_post_hook(_unwrap_states)
    optimizer.register_load_state_dict_post_hook(_wrap_local_states)


def _is_of_fsdp1(tensor: Tensor) -> bool:
    sharding = sharding_of(tensor)
    return sharding is not None and sharding.mesh in _meshes


def _wrap_local_states(optimizer: Optimizer) -> None:
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            entries[key] = as_dtensor(value, parameter)


def _unwrap_states(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {
        index: {key: as_local(value) for key, value in entries.items()}
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
