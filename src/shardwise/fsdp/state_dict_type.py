"""State dicts of FSDP1 modules, with full tensors, chunks of them, or flattened chunks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._warnings import warn_caller
from shardwise.fsdp import api
from shardwise.fsdp.api import StateDictSettings, StateDictType
from shardwise.fsdp.distribute import on_whole_mesh, shard_like
from shardwise.fsdp.errors import StateError
from shardwise.fsdp.names import WRAPPED, clean_name
from shardwise.fsdp.sharded_tensors import TorchShardedTensor, in_chunks
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import sharding_of

__all__ = [
    "clean_incompatible_keys",
    "convert_for_saving",
    "default_settings",
    "get_state_dict_type",
    "rename_for_loading",
    "set_state_dict_type",
    "state_dict_of",
    "state_dict_type",
]

_SETTINGS = "_state_dict_settings"  # an attribute of each FSDP1 module
_CONFIGS: dict[StateDictType, tuple[type[api.StateDictConfig], type[api.OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (api.FullStateDictConfig, api.FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (api.LocalStateDictConfig, api.LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (api.ShardedStateDictConfig, api.ShardedOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: api.StateDictConfig | None = None,
    optim_state_dict_config: api.OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the type of state dict that the FSDP modules in ``module`` return.

    Returns:
        The previous settings.

    Raises:
        StateError: a config belongs to another type.
    """
    warn_caller(
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated by PyTorch; "
        "use shardwise.save and shardwise.load, or fully_shard instead of the wrapper",
        FutureWarning,
    )
    kinds = _CONFIGS[state_dict_type]
    configs = (state_dict_config or kinds[0](), optim_state_dict_config or kinds[1]())
    names = ("state_dict_config", "optim_state_dict_config")
    for name, config, kind in zip(names, configs, kinds, strict=True):
        if type(config) is not kind:
            raise StateError(
                f"Expected {name} of type {kind.__name__} for {state_dict_type.name}, got a "
                f"{type(config).__name__}"
            )
    previous = get_state_dict_type(module)
    _set_settings(module, StateDictSettings(state_dict_type, *configs))
    return previous


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings of the FSDP modules in ``module``.

    Raises:
        StateError: the modules have different settings.
    """
    settings: list[StateDictSettings] = [getattr(m, _SETTINGS) for m in _fsdp_modules(module)]
    if any(each != settings[0] for each in settings):
        raise StateError(
            "the FSDP modules of this model have different state dict types; call "
            "set_state_dict_type on the outermost one"
        )
    return settings[0] if settings else default_settings()


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: api.StateDictConfig | None = None,
    optim_state_dict_config: api.OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Apply `set_state_dict_type` for the body of a ``with`` statement."""
    previous = set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        _set_settings(module, previous)


def default_settings() -> StateDictSettings:
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, api.FullStateDictConfig(), api.FullOptimStateDictConfig()
    )


def state_dict_of(
    fsdp_module: Any, state_dict: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The result of ``state_dict(*args, **kwargs)``, converted as the settings require.

    With ``keep_vars``, it contains the parameters and buffers themselves, whatever the settings.
    """
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    found = state_dict(*args, **kwargs)
    if kwargs.get("keep_vars", any(args[2:])):
        for name in [name for name in found if name.startswith(prefix)]:
            found[prefix + clean_name(name.removeprefix(prefix))] = found.pop(name)
        return found
    settings: StateDictSettings = getattr(fsdp_module, _SETTINGS)
    config = settings.state_dict_config
    is_dropped = getattr(config, "rank0_only", False) and fsdp_module.rank != 0
    to_cpu = config.offload_to_cpu and not is_dropped
    for name in [name for name in found if name.startswith(prefix)]:
        plain = clean_name(name.removeprefix(prefix))
        value = convert_for_saving(found.pop(name), settings.state_dict_type, to_cpu=to_cpu)
        if plain in fsdp_module._buffer_dtypes:
            value = value.to(fsdp_module._buffer_dtypes[plain])
        if not is_dropped:
            found[prefix + plain] = value
    return found


def rename_for_loading(fsdp_module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Convert the entries of ``fsdp_module`` in ``state_dict`` to its parameters' names and shards.

    All ranks must call this, with entries in the same order.
    """
    inner = prefix + WRAPPED + "."
    settings: StateDictSettings = getattr(fsdp_module, _SETTINGS)
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    parameters = dict(fsdp_module.named_parameters(remove_duplicate=False))
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if name.startswith(inner):
            continue
        value, plain = state_dict.pop(name), name.removeprefix(prefix)
        parameter = parameters.get(clean_name(plain))
        if parameter is not None and isinstance(value, Tensor):
            value = _sharded_as(parameter, value, is_local=is_local)
        state_dict[inner + plain] = value


def clean_incompatible_keys(_module: nn.Module, incompatible_keys: Any) -> None:
    """Remove wrapper names from the keys that `load_state_dict` returns."""
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = [clean_name(key) for key in keys]


def _sharded_as(parameter: nn.Parameter, value: Tensor, *, is_local: bool) -> Tensor:
    """``value`` sharded like ``parameter`` if the shapes fit; torch raises for other values."""
    sharding = sharding_of(parameter)
    if sharding is None or sharding.describes(value):
        return value
    fits = value.shape == parameter.shape or isinstance(value, TorchShardedTensor) or is_local
    return shard_like(value, parameter) if fits else value


def convert_for_saving(value: Any, kind: StateDictType, *, to_cpu: bool) -> Any:
    """``value`` in the form that state dicts of ``kind`` contain. All ranks must call this."""
    if not isinstance(value, DTensor):
        return value.cpu() if to_cpu and isinstance(value, Tensor) else value
    if kind is StateDictType.FULL_STATE_DICT:
        value = value.full_tensor()
    elif isinstance(value, ShardedTensor):
        is_local = kind is StateDictType.LOCAL_STATE_DICT
        return in_chunks(value, flattened=is_local, to_cpu=to_cpu)
    elif kind is StateDictType.LOCAL_STATE_DICT:
        raise StateError(
            "DeviceMesh is not compatible with LOCAL_STATE_DICT. Choose SHARDED_STATE_DICT, which "
            "gathers nothing with a device mesh"
        )
    else:
        value = on_whole_mesh(value)
    return value.cpu() if to_cpu else value


def _fsdp_modules(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if _SETTINGS in m.__dict__]


def _set_settings(module: nn.Module, settings: StateDictSettings) -> None:
    for fsdp_module in _fsdp_modules(module):
        setattr(fsdp_module, _SETTINGS, settings)
