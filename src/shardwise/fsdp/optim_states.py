"""FSDP1's functions for optimizer state dicts with parameter names as keys.

When saved, states are full, sharded or local tensors, as chosen by `set_state_dict_type`. When
loaded, the kind of each state is recognized by its type and shape.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise._warnings import warn_caller
from shardwise.errors import PlanError
from shardwise.fsdp.api import OptimStateKeyType, StateDictType
from shardwise.fsdp.distribute import (
    broadcast_object,
    gather_objects,
    group_of,
    receive,
    shard_like,
)
from shardwise.fsdp.errors import StateError
from shardwise.fsdp.local_states import as_dtensor, as_local
from shardwise.fsdp.names import clean_name, clean_names
from shardwise.fsdp.state_dict_type import convert_for_saving, get_state_dict_type
from shardwise.runtime.optimizers import current

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
Groups = list[list[Tensor]]

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

    Full states are gathered one by one, on every rank.
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


def _is_sharded(entries: States) -> bool:
    return any(isinstance(value, DTensor) for value in entries.values())


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
    named: States = {"state": own}
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

    As in FSDP1, the result lists only parameters that were saved; the user has to add new ones.
    """
    names = {id(parameter): name for name, parameter in clean_names(model).items()}
    ordered = []
    for group in groups:
        members = [names[id(p)] for p in group if id(p) in names]
        same = [options for options in saved if set(options["params"]) & set(members)]
        if not same:
            raise PlanError(
                f"{', '.join(members)}: expected in a parameter group of the state dict, but found "
                "in none; load the states of an optimizer with the same parameters"
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
