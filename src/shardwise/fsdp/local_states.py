"""Optimizer states of FSDP1 programs: this rank's elements as plain tensors [n].

In shardwise, parameters are DTensors, and so are their optimizer states. FSDP1 programs save
``optimizer.state_dict()`` on each rank and compare it with the results of FSDP1's functions. The
state dicts of an optimizer that steps parameters of an FSDP1 module therefore contain plain
tensors, and ``load_state_dict`` accepts them. Torch's ``get_optimizer_state_dict``, which would
take one rank's part for the whole, gets DTensors.
"""

import copy
import sys
import weakref
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.fsdp.errors import StateError
from shardwise.runtime.attach import parameters_of
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import local_of, sharding_of

__all__ = ["as_dtensor", "as_local", "use_local_states"]

_meshes: weakref.WeakSet[DataParallelMesh] = weakref.WeakSet()  # meshes of FSDP1 modules
_adopted: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers with local states


class LocalState(Tensor):
    """This rank's elements [n] of a state; `torch.distributed.checkpoint` refuses to save it.

    It would take the tensors of one rank for those of all. Pickled as a plain tensor.
    """

    def __create_write_items__(self, fqn: str, _object: object) -> NoReturn:
        """Raise a StateError: torch's planner calls this."""
        raise StateError(
            f"{fqn}: optimizer.state_dict() of an FSDP1 module has this rank's elements alone, and "
            "torch.distributed.checkpoint would save one rank's for all; pass it the result of "
            "FullyShardedDataParallel.optim_state_dict(model, optimizer), or use sw.save"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalState":
        # `copy.deepcopy` keeps what it has copied, whose address would be used again otherwise.
        return copy.deepcopy(self.as_subclass(Tensor), memo).as_subclass(LocalState)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def use_local_states(mesh: DataParallelMesh) -> None:
    """Use local states for parameters over ``mesh``, which belong to an FSDP1 module."""
    _meshes.add(mesh)
    _watch_optimizers()


def as_dtensor(value: Any, parameter: Tensor) -> Any:
    """``value``, a state of ``parameter``, as a DTensor if it is this rank's part of one."""
    sharding = sharding_of(parameter)
    if sharding is None or type(value) not in (Tensor, LocalState) or not value.ndim:
        return value
    value = value.as_subclass(Tensor)
    return sharding.wrap(value) if value.shape == local_of(parameter).shape else value


def as_local(value: Any) -> Any:
    """``value`` as the state dict of an optimizer contains it."""
    is_local = isinstance(value, ShardedTensor) and _is_of_fsdp1(value)
    return local_of(value).as_subclass(LocalState) if is_local else value


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_adopt)


def _adopt(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Make ``optimizer`` save and load local states if it steps parameters of FSDP1 modules."""
    if torch.compiler.is_compiling():  # a step of parameters of FSDP1 modules is not compiled
        return
    if optimizer in _adopted or not any(map(_is_of_fsdp1, parameters_of(optimizer))):
        return
    _adopted.add(optimizer)
    _wrap_local_states(optimizer)
    optimizer.register_state_dict_post_hook(_unwrap_states)
    optimizer.register_load_state_dict_post_hook(_wrap_local_states)


def _is_of_fsdp1(tensor: Tensor) -> bool:
    sharding = sharding_of(tensor)
    return sharding is not None and sharding.mesh in _meshes


def _wrap_local_states(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        entries = optimizer.state.get(parameter, {})
        for key, value in entries.items():
            entries[key] = as_dtensor(value, parameter)


def _unwrap_states(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if _is_called_by_torchs_state_dicts():
        return state_dict
    states = {
        index: {key: as_local(value) for key, value in entries.items()}
        if isinstance(entries, dict)
        else entries  # a state that belongs to no parameter
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _is_called_by_torchs_state_dicts() -> bool:
    """Whether a function of `torch.distributed.checkpoint.state_dict` is running."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if caller.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = caller
    return False
