"""State dicts of wrapped models: whole tensors, shards, or this rank's runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.fsdp import api
from shardwise.fsdp.api import StateDictSettings, StateDictType
from shardwise.fsdp.names import WRAPPED, clean_name
from shardwise.runtime.tensor import ShardedTensor

__all__ = [
    "as_saved",
    "default_settings",
    "get_state_dict_type",
    "prepare",
    "saved",
    "set_state_dict_type",
    "settings_of",
    "state_dict_type",
]

_SETTINGS = "_state_dict_settings"
_CONFIGS: dict[StateDictType, tuple[type[api.StateDictConfig], type[api.OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (api.FullStateDictConfig, api.FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (api.LocalStateDictConfig, api.LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (
        api.ShardedStateDictConfig,
        api.ShardedOptimStateDictConfig,
    ),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: api.StateDictConfig | None = None,
    optim_state_dict_config: api.OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Say what state dicts of the wrappers in ``module`` hold.

    Returns:
        What was said before.

    Raises:
        PlanError: a config is not of that type.
    """
    kinds = _CONFIGS[state_dict_type]
    settings = StateDictSettings(
        state_dict_type, state_dict_config or kinds[0](), optim_state_dict_config or kinds[1]()
    )
    given = (settings.state_dict_config, settings.optim_state_dict_config)
    for config, kind in zip(given, kinds, strict=True):
        if type(config) is not kind:
            raise PlanError(
                f"{state_dict_type.name}: expected a {kind.__name__}, got a {type(config).__name__}"
            )
    before = get_state_dict_type(module)
    for wrapper in _wrappers(module):
        setattr(wrapper, _SETTINGS, settings)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """What state dicts of the wrappers in ``module`` hold.

    Raises:
        PlanError: they do not all hold the same.
    """
    settings = [settings_of(wrapper) for wrapper in _wrappers(module)]
    if any(one != settings[0] for one in settings):
        raise PlanError("wrappers with state dicts of several types; set one type for all")
    return settings[0] if settings else default_settings()


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: api.StateDictConfig | None = None,
    optim_state_dict_config: api.OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Within it, as after `set_state_dict_type`."""
    before = set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        for wrapper in _wrappers(module):
            setattr(wrapper, _SETTINGS, before)


def default_settings() -> StateDictSettings:
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, api.FullStateDictConfig(), api.FullOptimStateDictConfig()
    )


def settings_of(wrapper: nn.Module) -> StateDictSettings:
    settings: StateDictSettings = getattr(wrapper, _SETTINGS)
    return settings


def saved(
    wrapper: Any, state_dict: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """What ``state_dict(*args, **kwargs)`` of ``wrapper`` gives, as its settings say."""
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    found = state_dict(*args, **kwargs)
    settings = settings_of(wrapper)
    config = settings.state_dict_config
    is_dropped = getattr(config, "rank0_only", False) and wrapper.rank != 0
    for name in [name for name in found if name.startswith(prefix)]:
        is_moved = config.offload_to_cpu and not is_dropped
        value = as_saved(found.pop(name), settings.state_dict_type, to_cpu=is_moved)
        if not is_dropped:
            found[prefix + clean_name(name.removeprefix(prefix))] = value
    return found


def prepare(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Rename what is for ``wrapper`` in ``state_dict`` to what is in it."""
    inner = prefix + WRAPPED + "."
    is_local = settings_of(wrapper).state_dict_type is StateDictType.LOCAL_STATE_DICT
    parameters: dict[str, Any] = dict(wrapper.named_parameters()) if is_local else {}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if name.startswith(inner):
            continue
        value, plain = state_dict.pop(name), name.removeprefix(prefix)
        parameter = parameters.get(plain)
        if isinstance(parameter, ShardedTensor) and not isinstance(value, ShardedTensor):
            value = ShardedTensor(value, parameter.sharding)
        state_dict[inner + plain] = value


def as_saved(value: Any, kind: StateDictType, *, to_cpu: bool) -> Any:
    """What a state dict of ``kind`` holds for ``value``; all ranks have to call this."""
    if isinstance(value, ShardedTensor):
        if kind is StateDictType.FULL_STATE_DICT:
            value = value.full_tensor()
        elif kind is StateDictType.LOCAL_STATE_DICT:
            value = value.to_local()
    return value.cpu() if to_cpu and isinstance(value, Tensor) else value


def _wrappers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if _SETTINGS in m.__dict__]
