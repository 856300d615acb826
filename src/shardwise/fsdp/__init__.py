"""A drop-in for ``torch.distributed.fsdp``: replace it by ``shardwise.fsdp`` in the imports.

FSDP1's options are translated to arguments of `shardwise.fully_shard`, and FSDP2's `fully_shard` is
that function. The option classes are PyTorch's own, except for one that torch 2.11 does not have.
No other package imports this one.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.features.fsdp_module import FSDPModule, GradientReductionHandle, UnshardHandle
from shardwise.fsdp import api
from shardwise.fsdp.api import *  # noqa: F403 (all option classes, as in PyTorch)
from shardwise.fsdp.fully_shard import (
    DataParallelMeshDims,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from shardwise.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedGradScaler",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
__all__ += api.__all__
