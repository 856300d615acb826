"""FSDP1's words: enumerations and small records that programs pass around."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(Enum):
    """What is sharded when; the engine's rows are in `shardwise.plan.strategy`."""

    FULL_SHARD = auto()  # parameters are freed after forward and gathered again for backward
    SHARD_GRAD_OP = auto()  # they stay from forward to backward
    NO_SHARD = auto()
    HYBRID_SHARD = auto()  # the first, repeated over an outer axis
    _HYBRID_SHARD_ZERO2 = auto()  # the second, repeated


class BackwardPrefetch(Enum):
    """When the next unit of backward is gathered; both are `prefetch=1` of the engine."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Dtypes: of parameters in compute, of reductions, of buffers.

    Args:
        param_dtype: of gathered parameters; None for their own.
        reduce_dtype: of gradients on the way; None for ``param_dtype``.
        buffer_dtype: of floating-point buffers.
        keep_low_precision_grads: refused; gradients have the dtype of the shards.
        cast_forward_inputs: cast what every unit is called with.
        cast_root_forward_inputs: cast what the whole model is called with.
        _module_classes_to_ignore: computed in the dtype of the shards.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """What is kept in the memory of the host.

    Args:
        offload_params: shards, their gradients and the optimizer's states.
        offload_optimizer: gradients and states, with a copy of the shards on the device.
    """

    offload_params: bool = False
    offload_optimizer: bool = False


class StateDictType(Enum):
    """What a state dict holds."""

    FULL_STATE_DICT = auto()  # whole tensors
    LOCAL_STATE_DICT = auto()  # this rank's runs, 1-D
    SHARDED_STATE_DICT = auto()  # `ShardedTensor`s


@dataclass
class StateDictConfig:
    """Args: offload_to_cpu: have the tensors in the memory of the host."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Args: rank0_only: the dict is empty on the other ranks."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Of `StateDictType.LOCAL_STATE_DICT`."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Of `StateDictType.SHARDED_STATE_DICT`."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """As `StateDictConfig`, of an optimizer's states."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Args: rank0_only: the dict is empty on the other ranks, and loaded from the first."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Of `StateDictType.LOCAL_STATE_DICT`."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Of `StateDictType.SHARDED_STATE_DICT`."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What `FullyShardedDataParallel.set_state_dict_type` sets."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


class OptimStateKeyType(Enum):
    """How an optimizer's state dict names parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()
