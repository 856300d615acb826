"""Saves and loads sharded models in the formats of frameworks. Every rank must call these."""

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from shardwise.checkpoint.unpickling import DataPlanner, DataReader

__all__ = ["full_state_dict", "load_full_state_dict", "load_optimizers", "save_optimizers"]


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


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors that every rank has. For tied parameters, one of the names suffices."""
    whole = dict(state)
    for pair in _tied_names(model).items():
        for name, other in (pair, reversed(pair)):
            if other in whole:
                whole.setdefault(name, whole[other])
    model.load_state_dict(whole)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by its other names."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return {name: kept for name, kept in names.items() if name != kept}


def save_optimizers(
    directory: str | os.PathLike[str], model: nn.Module, optimizers: Collection[Optimizer]
) -> None:
    """Write the states of ``optimizers`` to ``directory``, in the format of torch's DCP.

    Each rank writes its own shards under the names of the parameters.
    """
    state_dict_saver.save(_states(model, optimizers), checkpoint_id=directory)


def load_optimizers(
    directory: str | os.PathLike[str], model: nn.Module, optimizers: Collection[Optimizer]
) -> None:
    """Read states that `save_optimizers` wrote, on any number of ranks."""
    states = _states(model, optimizers)
    reader, planner = DataReader(directory), DataPlanner()
    state_dict_loader.load(states, storage_reader=reader, planner=planner)
    for optimizer, state in zip(optimizers, states.values(), strict=True):
        set_optimizer_state_dict(model, optimizer, state)


def _states(model: nn.Module, optimizers: Collection[Optimizer]) -> dict[str, Any]:
    return {
        f"optimizer_{index}": get_optimizer_state_dict(model, optimizer)
        for index, optimizer in enumerate(optimizers)
    }
