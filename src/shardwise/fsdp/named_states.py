"""Conversion of optimizer states to and from parameter names as keys."""

import copy
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise._warnings import warn_caller
from shardwise.errors import PlanError
from shardwise.fsdp.api import StateDictType
from shardwise.fsdp.distribute import broadcast_object, gather_objects, group_of, shard_like
from shardwise.fsdp.errors import StateError
from shardwise.fsdp.local_states import as_dtensor, as_local
from shardwise.fsdp.names import clean_name, clean_names
from shardwise.fsdp.state_dict_type import convert_for_saving
from shardwise.runtime.attach import current

__all__ = [
    "States",
    "by_table",
    "collect",
    "groups_for",
    "names_of",
    "parameter_groups",
    "to_load",
    "warn_of_input",
    "with_keys",
]

States = dict[str, Any]
Groups = list[list[Tensor]]


def with_keys(states: States, rename: Callable[[Any], Any]) -> States:
    """``states`` with renamed keys."""
    renamed: States = {"state": {rename(key): value for key, value in states["state"].items()}}
    if "param_groups" in states:
        renamed["param_groups"] = [
            {**group, "params": [rename(key) for key in group["params"]]}
            for group in states["param_groups"]
        ]
    return renamed


def by_table(table: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """A ``rename`` for `with_keys` that looks keys up in ``table`` and keeps unknown ones."""
    return lambda key: table.get(key, key)


def collect(
    model: nn.Module,
    optim: Optimizer,
    given: States | None,
    *,
    kind: StateDictType,
    to_cpu: bool,
    rank0_only: bool,
) -> States:
    """The states by name, in the order of the model's parameters.

    Full states are gathered one by one, on every rank. A state that belongs to no parameter keeps
    its key.
    """
    named = _by_name(model, optim, optim.state_dict() if given is None else given)
    parameters: Mapping[Any, Tensor] = clean_names(model)
    named["state"] = {
        name: {key: as_dtensor(value, parameters[name]) for key, value in entries.items()}
        if name in parameters
        else entries
        for name, entries in named["state"].items()
    }
    group = group_of(model)
    is_dropped = rank0_only and group is not None and dist.get_rank(group) != 0
    shared = _shared_names(named["state"], group)
    states: dict[Any, States] = {}
    for name, entries in named["state"].items():
        if _is_sharded(entries) and name not in shared:
            continue  # the first rank has none
        if not isinstance(entries, dict):
            states[name] = copy.deepcopy(entries)
            continue
        converted = {
            key: _in_own_memory(
                convert_for_saving(value, kind, to_cpu=to_cpu and not is_dropped), value
            )
            for key, value in entries.items()
        }
        if not is_dropped:
            states[name] = converted
    return {} if is_dropped else {**named, "state": states}


def _in_own_memory(converted: Any, value: Any) -> Any:
    """``converted``, copied if it may share memory that the optimizer changes later."""
    may_share = isinstance(converted, DTensor) or (converted is value and isinstance(value, Tensor))
    return converted.detach().clone() if may_share else converted


def _by_name(model: nn.Module, optim: Optimizer, states: States) -> States:
    """``states`` of ``optim`` with clean names as keys; a named optimizer already has names."""
    names = by_table(names_of(model, parameter_groups(optim)))
    renamed = with_keys(states, lambda key: clean_name(key) if isinstance(key, str) else names(key))
    order = {name: position for position, name in enumerate(clean_names(model))}
    in_order = sorted(renamed["state"], key=lambda name: order.get(name, len(order)))
    return {**renamed, "state": {name: renamed["state"][name] for name in in_order}}


def _shared_names(states: Mapping[Any, States], group: dist.ProcessGroup | None) -> set[Any]:
    """The parameters with sharded states on the first rank; a StateError if another lacks some."""
    own = {name for name, entries in states.items() if _is_sharded(entries)}
    first: set[Any] = broadcast_object(own, group)
    for rank, missing in enumerate(gather_objects(sorted(first - own, key=str), group)):
        if missing:
            raise StateError(
                "FSDP currently requires each rank to have at least the optimizer states needed "
                "by rank 0's optimizer but some ranks are missing some of those states: rank "
                f"{rank} has none of {', '.join(map(str, missing))}; build the optimizer from the "
                "same parameters on every rank"
            )
    return first


def _is_sharded(entries: Any) -> bool:
    values = entries.values() if isinstance(entries, dict) else ()  # not those of a parameter
    return any(isinstance(value, DTensor) for value in values)


def to_load(
    model: nn.Module, groups: Groups, states: Mapping[str, Any], *, raw_names: bool = False
) -> States:
    """This rank's part of ``states``, with the optimizer's parameter indices as keys.

    With ``raw_names``, the keys are names that include the prefixes of wrappers.
    """
    own = {
        name: {
            key: copy.deepcopy(value) if key == "step" else as_local(shard_like(value, parameter))
            for key, value in states["state"][name].items()
        }
        for name, parameter in clean_names(model).items()
        if name in states["state"]
    }
    unowned = {k: copy.deepcopy(x) for k, x in states["state"].items() if not isinstance(x, dict)}
    named: States = {"state": own | unowned}
    if "param_groups" in states:
        named["param_groups"] = _options_of(groups, model, states["param_groups"])
    if raw_names:
        keys: Mapping[str, Any] = {clean_name(name): name for name, _ in model.named_parameters()}
    else:
        keys = {name: index for index, name in names_of(model, groups).items()}
    return with_keys(named, by_table(keys))


def _options_of(
    groups: Groups, model: nn.Module, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved options for each of ``groups``, from the saved group that shares parameters.

    Options of empty groups are matched in order.
    As in FSDP1, the result lists only parameters that were saved; the user has to add new ones.
    """
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    empty = iter([options for options in saved if not options["params"]])
    ordered = []
    for group in groups:
        members = [names[id(p)] for p in group if id(p) in names]
        if group:
            same = [options for options in saved if set(options["params"]) & set(members)]
        else:
            same = list(islice(empty, 1))
        if not same:
            raise PlanError(
                f"{', '.join(members) or 'an empty group'}: expected in a parameter group of the "
                "state dict, but found in none; load the states of an optimizer with the same "
                "parameters"
            )
        known = set(same[0]["params"])
        ordered.append({**same[0], "params": [name for name in members if name in known]})
    return ordered


def parameter_groups(optim: Optimizer) -> Groups:
    return [[current(parameter) for parameter in group["params"]] for group in optim.param_groups]


def groups_for(model: nn.Module, optim: Optimizer | None, optim_input: Any) -> Groups:
    """The parameters of ``optim``, or of an optimizer that was built from ``optim_input``."""
    warn_of_input(optim_input)
    if optim is not None:
        return parameter_groups(optim)
    given = list(model.parameters() if optim_input is None else optim_input)
    in_groups = given and isinstance(given[0], dict)
    groups = [group["params"] for group in given] if in_groups else [given]
    return [[current(parameter) for parameter in group] for group in groups]


def warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        warn_caller(
            "The `optim_input` argument is deprecated; pass the optimizer as `optim`", FutureWarning
        )


def names_of(model: nn.Module, groups: Groups) -> dict[int, str]:
    """The name of each parameter of ``model`` in ``groups``, by the optimizer's parameter index."""
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    members = [parameter for group in groups for parameter in group]
    return {index: names[id(p)] for index, p in enumerate(members) if id(p) in names}
