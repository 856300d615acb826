"""State dicts of optimizers, by the names of parameters: FSDP1's functions.

On the way out the states of a parameter are whole, shards or runs, as the model's settings say; on
the way in each is recognised by what it is.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import PlanError
from shardwise.fsdp.api import OptimStateKeyType, StateDictType
from shardwise.fsdp.distribute import cut, distribute, group_of
from shardwise.fsdp.names import clean_names
from shardwise.fsdp.state_dict_type import as_saved, get_state_dict_type

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

States = dict[str, Any]
Groups = list[list[nn.Parameter]]


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: States | None = None,
    group: Any = None,  # noqa: ARG001 (the model knows its ranks)
) -> States:
    """The states of ``optim`` by names of parameters, as `set_state_dict_type` said.

    All ranks have to call it. ``optim_state_dict`` is ``optim.state_dict()`` if given.
    """
    settings = get_state_dict_type(model)
    config = settings.optim_state_dict_config
    return _saved(
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
    optim_input: Any = None,  # noqa: ARG001 (the optimizer knows)
    rank0_only: bool = True,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Whole states on the host, whatever the model's settings."""
    kind = StateDictType.FULL_STATE_DICT
    return _saved(model, optim, None, kind=kind, to_cpu=True, rank0_only=rank0_only)


def sharded_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    group: Any = None,  # noqa: ARG001
) -> States:
    """Shards of states, whatever the model's settings."""
    kind = StateDictType.SHARDED_STATE_DICT
    return _saved(model, optim, None, kind=kind, to_cpu=False, rank0_only=False)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: States,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,  # noqa: ARG001
) -> States:
    """What ``optim.load_state_dict`` takes, from what `optim_state_dict` gave.

    Args:
        model: sharded.
        optim: of the model; its groups decide the order.
        optim_state_dict: from the first rank if the model's settings say ``rank0_only``.
        is_named_optimizer: leave names in the place of numbers.
        load_directly: load it as well.
        group: the model knows its ranks.
    """
    config = get_state_dict_type(model).optim_state_dict_config
    if getattr(config, "rank0_only", False):
        return _finish(scatter_full_optim_state_dict(optim_state_dict, model, optim=optim), optim)
    groups = _groups_of(model, optim, None)
    loadable = _loadable(model, groups, optim_state_dict)
    if is_named_optimizer:
        return _rekeyed(loadable, OptimStateKeyType.PARAM_NAME, _numbers(model, groups))
    return _finish(loadable, optim if load_directly else None)


def shard_full_optim_state_dict(
    full_optim_state_dict: States,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> States:
    """What ``optim.load_state_dict`` takes, from whole states on every rank."""
    groups = _groups_of(model, optim, optim_input)
    return _loadable(model, groups, full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: States, model: nn.Module, optim: Optimizer
) -> States:
    """What ``optim.load_state_dict`` takes, from what `sharded_optim_state_dict` gave."""
    return _loadable(model, _groups_of(model, optim, None), sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: States | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
    group: Any = None,  # noqa: ARG001
) -> States:
    """What ``optim.load_state_dict`` takes, from whole states on the first rank alone.

    They are sent one after the other, so the others have one whole tensor at a time.
    """
    given = full_optim_state_dict or {"state": {}, "param_groups": []}
    states = distribute(given, {"state": clean_names(model)}, group_of(model))
    return _loadable(model, _groups_of(model, optim, optim_input), states)


def rekey_optim_state_dict(
    optim_state_dict: States,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> States:
    """The same states by names of parameters, or by the numbers that the optimizer gives them."""
    numbers = _numbers(model, _groups_of(model, optim, optim_input))
    return _rekeyed(optim_state_dict, optim_state_key_type, numbers)


def _rekeyed(states: States, kind: OptimStateKeyType, numbers: dict[str, int]) -> States:
    table: dict[Any, Any] = dict(numbers)
    if kind is OptimStateKeyType.PARAM_NAME:
        table = {number: name for name, number in numbers.items()}

    def renamed(key: Any) -> Any:
        return table.get(key, key)

    return {
        "state": {renamed(key): value for key, value in states["state"].items()},
        "param_groups": [
            {**group, "params": [renamed(key) for key in group["params"]]}
            for group in states["param_groups"]
        ],
    }


def _saved(
    model: nn.Module,
    optim: Optimizer,
    given: States | None,
    *,
    kind: StateDictType,
    to_cpu: bool,
    rank0_only: bool,
) -> States:
    """Every rank gathers what is whole, tensor by tensor; the first one alone may keep it."""
    by_number = given if given is not None else optim.state_dict()
    numbers = _numbers(model, _groups_of(model, optim, None))
    names = {number: name for name, number in numbers.items()}
    is_dropped = rank0_only and _rank_of(model) != 0
    states: States = {}
    for number, entries in by_number["state"].items():
        is_moved = to_cpu and not is_dropped
        converted = {k: as_saved(value, kind, to_cpu=is_moved) for k, value in entries.items()}
        if not is_dropped:
            states[names.get(number, number)] = converted
    if is_dropped:
        return {}
    groups = [
        {**group, "params": [names.get(number, number) for number in group["params"]]}
        for group in by_number["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def _loadable(model: nn.Module, groups: Groups, states: Mapping[str, Any]) -> States:
    """States by number, cut as their parameters are."""
    parameters = clean_names(model)
    own = {
        name: {
            key: copy.deepcopy(value) if key == "step" else cut(value, parameters[name])
            for key, value in entries.items()
        }
        for name, entries in states["state"].items()
        if name in parameters
    }
    numbers = _numbers(model, groups)
    named = {"state": own, "param_groups": _options_of(groups, model, states["param_groups"])}
    return _rekeyed(named, OptimStateKeyType.PARAM_ID, numbers)


def _options_of(
    groups: Groups, model: nn.Module, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved options of each group; groups are matched by a parameter that they share."""
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    ordered = []
    for group in groups:
        members = [names[id(p)] for p in group if id(p) in names]
        same = [options for options in saved if set(options["params"]) & set(members)]
        if not same:
            raise PlanError(f"{', '.join(members)}: in no group of the state dict that is loaded")
        ordered.append({**same[0], "params": members})
    return ordered


def _groups_of(model: nn.Module, optim: Optimizer | None, optim_input: Any) -> Groups:
    """The parameters of an optimizer, or those that it was or would be made with, by group."""
    if optim is not None:
        return [group["params"] for group in optim.param_groups]
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [list(group["params"]) for group in given]
    return [given]


def _numbers(model: nn.Module, groups: Groups) -> dict[str, int]:
    """The number that the optimizer gives to each parameter of ``model``, by name."""
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    members = [parameter for group in groups for parameter in group]
    return {names[id(p)]: number for number, p in enumerate(members) if id(p) in names}


def _finish(loadable: States, optim: Optimizer | None) -> States:
    if optim is not None:
        optim.load_state_dict(loadable)
    return loadable


def _rank_of(model: nn.Module) -> int:
    group = group_of(model)
    return 0 if group is None else dist.get_rank(group)
