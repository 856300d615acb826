"""FSDP1's functions for optimizer state dicts with parameter names as keys.

When saved, states are full, sharded or local tensors, as chosen by `set_state_dict_type`. When
loaded, the kind of each state is recognized by its type and shape.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.fsdp.api import OptimStateKeyType, StateDictType
from shardwise.fsdp.distribute import receive
from shardwise.fsdp.named_states import (
    States,
    by_table,
    collect,
    groups_for,
    names_of,
    parameter_groups,
    to_load,
    warn_of_input,
    with_keys,
)
from shardwise.fsdp.state_dict_type import get_state_dict_type

__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]


# Arguments named ``group`` are ignored; PyTorch's signatures have them. The model knows its ranks.


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: States | None = None,
    group: Any = None,  # noqa: ARG001
) -> States:
    """The states of ``optim`` in the form chosen by `set_state_dict_type`. All ranks must call it.

    Args:
        model: a sharded model.
        optim: the optimizer of the model's parameters.
        optim_state_dict: the result of ``optim.state_dict()``, if you already have it. If it has
            no "param_groups", neither has the result.
        group: ignored.

    Raises:
        StateError: a rank lacks states that the first rank has.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    return collect(
        model,
        optim,
        optim_state_dict,
        kind=settings.state_dict_type,
        to_cpu=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
    )


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Full states in host memory, regardless of the model's settings."""
    warn_of_input(optim_input)
    kind = StateDictType.FULL_STATE_DICT
    return collect(model, optim, None, kind=kind, to_cpu=True, rank0_only=rank0_only)


def sharded_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Sharded states, regardless of the model's settings."""
    kind = StateDictType.SHARDED_STATE_DICT
    return collect(model, optim, None, kind=kind, to_cpu=False, rank0_only=False)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: States,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Convert the result of `optim_state_dict` to an argument of ``optim.load_state_dict``.

    Args:
        model: a sharded model.
        optim: the optimizer of the model's parameters.
        optim_state_dict: the states; only the first rank needs them if the model's settings have
            ``rank0_only``.
        is_named_optimizer: keep names as keys.
        load_directly: also call ``optim.load_state_dict``.
        group: ignored.
    """
    config = get_state_dict_type(model).optim_state_dict_config
    if getattr(config, "rank0_only", False):
        optim_state_dict = receive(optim_state_dict, model)
    groups = parameter_groups(optim)
    loadable = to_load(model, groups, optim_state_dict, raw_names=is_named_optimizer)
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def shard_full_optim_state_dict(
    full_optim_state_dict: States,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> States:
    """Convert full states, given on every rank, to an argument of ``optim.load_state_dict``."""
    return to_load(model, groups_for(model, optim, optim_input), full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: States, model: nn.Module, optim: Optimizer
) -> States:
    """Convert the result of `sharded_optim_state_dict` for ``optim.load_state_dict``."""
    return to_load(model, parameter_groups(optim), sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: States | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Convert full states, given on the first rank, to an argument of ``optim.load_state_dict``.

    States are sent one by one, so that every other rank holds only one full tensor at a time.
    """
    states = receive(full_optim_state_dict, model)
    return to_load(model, groups_for(model, optim, optim_input), states)


def rekey_optim_state_dict(
    optim_state_dict: States,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> States:
    """The same states with parameter names, or the optimizer's parameter indices, as keys."""
    keys: dict[Any, Any] = names_of(model, groups_for(model, optim, optim_input))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        keys = {name: index for index, name in keys.items()}
    return with_keys(optim_state_dict, by_table(keys))
