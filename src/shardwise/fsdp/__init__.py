"""The drop-in for ``torch.distributed.fsdp``: replace that by ``shardwise.fsdp`` in the imports.

FSDP1's and FSDP2's options become calls of the engine, and nothing else happens here; nothing
below imports this package.
"""

from shardwise.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
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
from shardwise.fsdp.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardwise.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from shardwise.fsdp.sharded_grad_scaler import ShardedGradScaler
from shardwise.plan.offload import CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.module import FSDPModule, UnshardHandle

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
