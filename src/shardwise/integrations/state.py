"""Saves and loads sharded models in the formats of frameworks. Every rank must call these."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from shardwise.checkpoint.collect import named_states
from shardwise.checkpoint.load import load_values
from shardwise.checkpoint.matching import Selection
from shardwise.checkpoint.unpickling import DataReader
from shardwise.errors import CheckpointError

__all__ = [
    "full_state_dict",
    "load_full_state_dict",
    "load_full_states",
    "load_model",
    "load_optimizer",
    "load_optimizers",
    "save_optimizers",
    "sharded_states",
]


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of ``model`` as whole host tensors on rank 0; empty on other ranks.

    Tensors are gathered one at a time. Tied parameters share one tensor.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = OrderedDict(  # as accelerate expects
        get_model_state_dict(model, options=options)
    )
    for name, tied in _tied_names(model).items():
        if name in state and tied in state:
            state[name] = state[tied]
    return state


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """Load whole tensors that every rank has. For tied parameters, one of the names suffices."""
    whole = dict(state)
    for pair in _tied_names(model).items():
        for name, other in (pair, reversed(pair)):
            if other in whole:
                whole.setdefault(name, whole[other])
    model.load_state_dict(whole, strict=strict)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by its other names."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return {name: kept for name, kept in names.items() if name != kept}


def save_optimizers(
    directory: str | os.PathLike[str], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Write the states of ``optimizers`` to ``directory``, in the format of torch's DCP.

    Each rank writes its own shards under the names of the parameters.
    """
    # Not torch's `get_optimizer_state_dict`: it takes a step with gradients of zero if there are no
    # states yet, and leaves out those of parameters that are frozen.
    states = {name: named_states(value, model) for name, value in _numbered(optimizers).items()}
    state_dict_saver.save(states, checkpoint_id=directory)


def load_optimizers(
    directory: str | os.PathLike[str], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Read states that `save_optimizers` wrote, on any number of ranks.

    Raises:
        CheckpointError: they are not those of these optimizers.
    """
    load_values(directory, _numbered(optimizers), model, Selection(), "dcp")


def sharded_states(parameter: nn.Parameter, states: Mapping[str, Any]) -> dict[str, Any]:
    """``states`` of the whole parameter as those of the sharded ``parameter``."""
    return {
        key: torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
        else value
        for key, value in states.items()
    }


def load_full_states(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the ``state_dict()`` of an optimizer of the same parameters that are not sharded.

    Raises:
        CheckpointError: it has another number of parameters.
    """
    parameters, keys = (
        [one for group in groups for one in group["params"]]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if len(parameters) != len(keys):
        raise CheckpointError(
            f"{type(optimizer).__name__} has {len(parameters)} parameters, and the checkpoint has "
            f"states for {len(keys)}; build the optimizer from the same parameters"
        )
    found = state["state"]
    with torch.no_grad():
        states = {
            key: sharded_states(parameter, found[key])
            for key, parameter in zip(keys, parameters, strict=True)
            if key in found
        }
    optimizer.load_state_dict({**state, "state": states})


def load_optimizer(
    directory: str | os.PathLike[str], name: str, model: nn.Module, optimizer: Optimizer
) -> None:
    """Read the states of ``optimizer``, of `named_states`, that were saved under ``name``."""
    load_values(directory, {name: optimizer}, model, Selection(), "dcp")


def load_model(
    directory: str | os.PathLike[str], name: str, model: nn.Module, *, strict: bool
) -> None:
    """Read the state dict of ``model`` that torch's DCP has saved under ``name``.

    Unless ``strict``, tensors that are not in ``directory`` keep their values.
    """
    state = get_model_state_dict(model)
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    reader = DataReader(directory)
    state_dict_loader.load({name: state}, storage_reader=reader, planner=planner)
    model.load_state_dict(state, strict=strict)


def _numbered(optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    return {f"optimizer_{index}": optimizer for index, optimizer in enumerate(optimizers)}
