"""FSDP1's functions for optimizer state dicts with the names of parameters as keys.

When saved, states are full, sharded or local tensors, as chosen by `set_state_dict_type`. When
loaded, the kind of each is recognized by its type and shape.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.fsdp.api import OptimStateKeyType, StateDictType
from shardwise.fsdp.distribute import distribute, group_of, shard_like
from shardwise.fsdp.names import clean_names
from shardwise.fsdp.state_dict_type import convert_for_saving, get_state_dict_type

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

# Arguments called ``group`` are those of PyTorch's signatures; the model has its own ranks.
States = dict[str, Any]
Groups = list[list[nn.Parameter]]


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: States | None = None,
    group: Any = None,  # noqa: ARG001
) -> States:
    """The states of ``optim`` in the form chosen by `set_state_dict_type`. All ranks must call it.

    Args:
        model: sharded.
        optim: of the model's parameters.
        optim_state_dict: the result of ``optim.state_dict()``, if you have it already.
        group: ignored.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    return _collect(
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
    optim_input: Any = None,  # noqa: ARG001
    rank0_only: bool = True,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Full states on the host, whatever the model's settings."""
    kind = StateDictType.FULL_STATE_DICT
    return _collect(model, optim, None, kind=kind, to_cpu=True, rank0_only=rank0_only)


def sharded_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Sharded states, whatever the model's settings."""
    kind = StateDictType.SHARDED_STATE_DICT
    return _collect(model, optim, None, kind=kind, to_cpu=False, rank0_only=False)


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
        model: sharded.
        optim: of the model's parameters.
        optim_state_dict: sent by the first rank if the model's settings say ``rank0_only``.
        is_named_optimizer: keep names as keys.
        load_directly: also call ``optim.load_state_dict``.
        group: ignored.
    """
    config = get_state_dict_type(model).optim_state_dict_config
    if getattr(config, "rank0_only", False):
        optim_state_dict = _receive(optim_state_dict, model)
    groups = _parameter_groups(model, optim, None)
    loadable = _to_load(model, groups, optim_state_dict)
    if is_named_optimizer:
        loadable = _rekey(loadable, OptimStateKeyType.PARAM_NAME, _indices(model, groups))
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def shard_full_optim_state_dict(
    full_optim_state_dict: States,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> States:
    """Convert full states that every rank has to an argument of ``optim.load_state_dict``."""
    return _to_load(model, _parameter_groups(model, optim, optim_input), full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: States, model: nn.Module, optim: Optimizer
) -> States:
    """Convert the result of `sharded_optim_state_dict` to one of ``optim.load_state_dict``."""
    return _to_load(model, _parameter_groups(model, optim, None), sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: States | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Convert full states that the first rank has to an argument of ``optim.load_state_dict``.

    They are sent one by one, so every other rank holds one full tensor at a time.
    """
    states = _receive(full_optim_state_dict, model)
    return _to_load(model, _parameter_groups(model, optim, optim_input), states)


def rekey_optim_state_dict(
    optim_state_dict: States,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> States:
    """The same states with the names of parameters, or the optimizer's indices of them, as keys."""
    indices = _indices(model, _parameter_groups(model, optim, optim_input))
    return _rekey(optim_state_dict, optim_state_key_type, indices)


def _rekey(states: States, kind: OptimStateKeyType, indices: dict[str, int]) -> States:
    table: dict[Any, Any] = dict(indices)
    if kind is OptimStateKeyType.PARAM_NAME:
        table = {index: name for name, index in indices.items()}
    return {
        "state": {table.get(key, key): value for key, value in states["state"].items()},
        "param_groups": [
            {**group, "params": [table.get(key, key) for key in group["params"]]}
            for group in states["param_groups"]
        ],
    }


def _collect(
    model: nn.Module,
    optim: Optimizer,
    given: States | None,
    *,
    kind: StateDictType,
    to_cpu: bool,
    rank0_only: bool,
) -> States:
    """The states by name. Full ones are gathered one by one, on every rank."""
    by_index = given if given is not None else optim.state_dict()
    group = group_of(model)
    is_dropped = rank0_only and group is not None and dist.get_rank(group) != 0
    states: dict[Any, States] = {}
    for index, entries in by_index["state"].items():
        converted = {
            key: convert_for_saving(value, kind, to_cpu=to_cpu and not is_dropped)
            for key, value in entries.items()
        }
        if not is_dropped:
            states[index] = converted
    if is_dropped:
        return {}
    indices = _indices(model, _parameter_groups(model, optim, None))
    collected = {"state": states, "param_groups": by_index["param_groups"]}
    return _rekey(collected, OptimStateKeyType.PARAM_NAME, indices)


def _receive(states: States | None, model: nn.Module) -> States:
    """The states that the first rank has, sharded as the parameters of ``model``."""
    given = states or {"state": {}, "param_groups": []}
    received: States = distribute(given, {"state": clean_names(model)}, group_of(model))
    return received


def _to_load(model: nn.Module, groups: Groups, states: Mapping[str, Any]) -> States:
    """``states`` with indices as keys, sharded as their parameters."""
    parameters = clean_names(model)
    own = {
        name: {
            key: copy.deepcopy(value) if key == "step" else shard_like(value, parameters[name])
            for key, value in entries.items()
        }
        for name, entries in states["state"].items()
        if name in parameters
    }
    named = {"state": own, "param_groups": _options_of(groups, model, states["param_groups"])}
    return _rekey(named, OptimStateKeyType.PARAM_ID, _indices(model, groups))


def _options_of(
    groups: Groups, model: nn.Module, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved options of each group. Groups that share a parameter correspond to each other."""
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    ordered = []
    for group in groups:
        members = [names[id(p)] for p in group if id(p) in names]
        same = [options for options in saved if set(options["params"]) & set(members)]
        if not same:
            raise PlanError(
                f"{', '.join(members)}: expected in a parameter group of the state dict, found in "
                "none; load the states of an optimizer with the same parameters"
            )
        ordered.append({**same[0], "params": members})
    return ordered


def _parameter_groups(model: nn.Module, optim: Optimizer | None, optim_input: Any) -> Groups:
    """The parameters of ``optim``, or of an optimizer that is built from ``optim_input``."""
    if optim is not None:
        return [group["params"] for group in optim.param_groups]
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [list(group["params"]) for group in given]
    return [given]


def _indices(model: nn.Module, groups: Groups) -> dict[str, int]:
    """The optimizer's index of each parameter of ``model``, by name."""
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    members = [parameter for group in groups for parameter in group]
    return {names[id(p)]: index for index, p in enumerate(members) if id(p) in names}
