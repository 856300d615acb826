"""Convert configurations of other libraries to arguments of `shardwise.fully_shard`.

::

    options = options_from_deepspeed("ds_config.json")
    model = sw.fully_shard(model, units="auto", **options)

Settings of the training loop (batch sizes, the optimizer, clipping) are not converted.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardwise.errors import PlanError
from shardwise.fsdp.options import FSDP1_STRATEGIES
from shardwise.plan.offload import CPUOffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import Strategy

__all__ = ["options_from_accelerate", "options_from_deepspeed"]

Config = Mapping[str, Any] | str | PathLike[str]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def options_from_deepspeed(config: Config) -> dict[str, Any]:
    """Arguments for the ZeRO stage, dtypes and offloading of a DeepSpeed configuration.

    Reads ``zero_optimization`` (``stage``, ``offload_param``, ``offload_optimizer``,
    ``zero_hpz_partition_size``, ``mics_shard_size``), ``bf16`` and ``fp16``.

    Args:
        config: the configuration or the path of its JSON file.

    Raises:
        PlanError: a setting is not supported; names the key.
    """
    config = _read(config)
    zero = config.get("zero_optimization", {})
    options: dict[str, Any] = {"strategy": Strategy.from_deepspeed(config)}
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            raise PlanError(
                f"{key}: quantized communication is not supported; to halve its bytes pass "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)"
            )
    low = [_DTYPES[key] for key in _DTYPES if config.get(key, {}).get("enabled")]
    if low:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=low[0])
    devices = {key: zero.get(key, {}).get("device", "none") for key in _OFFLOADS}
    for key, device in devices.items():
        if device not in ("none", "cpu"):
            raise PlanError(f"{key}.device={device!r}: expected 'cpu' or 'none'")
    if "cpu" in devices.values():
        pinned = any(zero.get(key, {}).get("pin_memory", True) for key in _OFFLOADS)
        parameters = devices["offload_param"] == "cpu"
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned, parameters=parameters)
    if zero.get("zero_hpz_partition_size", 1) > 1:
        options["reshard_after_forward"] = zero["zero_hpz_partition_size"]
    if zero.get("mics_shard_size", -1) > 0:
        options["sharding_factor"] = zero["mics_shard_size"]
    return options


def options_from_accelerate(config: Config, model: nn.Module) -> dict[str, Any]:
    """Arguments for the ``fsdp_config`` of an accelerate configuration or of transformers' Trainer.

    Args:
        config: an accelerate configuration, an ``fsdp_config``, or the path of a JSON file with
            either. Keys may have the prefix ``fsdp_``.
        model: the model, which contains the classes that the configuration names.

    Raises:
        PlanError: a class is not in the model, or a value is not supported; names the key.
    """
    config = _read(config)
    given = config.get("fsdp_config", config)
    fsdp = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    options: dict[str, Any] = {"strategy": "fsdp"}
    options |= _sharding(fsdp)
    units = _units(fsdp, model)
    if units is not None:
        options["units"] = units
    if _is_true(fsdp.get("offload_params", False)):
        options["offload_policy"] = CPUOffloadPolicy()
    if fsdp.get("backward_prefetch", "BACKWARD_PRE") in (None, "NO_PREFETCH", "no_prefetch"):
        options["prefetch"] = int(_is_true(fsdp.get("forward_prefetch", False)))
    precision = str(config.get("mixed_precision", "no")).lower()
    if precision in _DTYPES:
        low = _DTYPES[precision]
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    elif precision != "no":
        raise PlanError(f"mixed_precision={precision!r}: expected 'no', 'bf16' or 'fp16'")
    return options


_OFFLOADS = ("offload_param", "offload_optimizer")
_STRATEGIES = {strategy.name.removeprefix("_"): strategy for strategy in ShardingStrategy}
_BY_NUMBER = {str(strategy.value): strategy for strategy in ShardingStrategy}


def _sharding(fsdp: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for ``sharding_strategy`` (FSDP1) or ``reshard_after_forward`` (FSDP2)."""
    value = str(fsdp.get("sharding_strategy", fsdp.get("reshard_after_forward", "true"))).upper()
    if value in ("TRUE", "FALSE"):
        return {"reshard_after_forward": None if value == "TRUE" else False}
    strategy = _STRATEGIES.get(value) or _BY_NUMBER.get(value)
    if strategy is None:
        raise PlanError(f"fsdp_sharding_strategy={value}: expected one of {', '.join(_STRATEGIES)}")
    preset, reshard = FSDP1_STRATEGIES[strategy]
    return {"strategy": preset, "reshard_after_forward": reshard}


def _units(fsdp: Mapping[str, Any], model: nn.Module) -> Any:
    policy = str(fsdp.get("auto_wrap_policy", "NO_WRAP")).upper()
    named = fsdp.get("transformer_layer_cls_to_wrap") or ()
    names = [n.strip() for n in named.split(",")] if isinstance(named, str) else list(named)
    if policy == "SIZE_BASED_WRAP" or int(fsdp.get("min_num_params", 0) or 0) > 0:
        return int(fsdp.get("min_num_params") or 100_000_000)
    if policy != "TRANSFORMER_BASED_WRAP" and not names:
        return None
    if not names:
        return "auto"
    found = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in names if name not in found]
    if missing:
        raise PlanError(
            f"fsdp_transformer_layer_cls_to_wrap: {', '.join(missing)} is not in "
            f"{type(model).__name__}, which contains {', '.join(sorted(found))}"
        )
    return {found[name] for name in names}


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _read(config: Config) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    read: Mapping[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    return read
