"""Saves and loads sharded models in the formats of frameworks. Every rank must call these."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from shardwise.checkpoint.collect import named_states
from shardwise.checkpoint.load import load_values
from shardwise.checkpoint.matching import Selection

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


def _numbered(optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    return {f"optimizer_{index}": optimizer for index, optimizer in enumerate(optimizers)}
