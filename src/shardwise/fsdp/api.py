"""FSDP1's option classes. All but `CPUOffload` are PyTorch's own, so that its objects work here."""

from dataclasses import dataclass

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload as TorchCPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

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


@dataclass
class CPUOffload(TorchCPUOffload):
    """PyTorch's option with one more field.

    Args:
        offload_params: keep parameter shards, gradients and optimizer states in host memory.
        offload_optimizer: keep gradients and optimizer states in host memory, and a copy of the
            parameter shards on the device.
    """

    offload_optimizer: bool = False
