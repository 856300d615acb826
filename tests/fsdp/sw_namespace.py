"""An FSDP2 program that imports `fully_shard` from ``shardwise`` and the rest from PyTorch."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise import FSDPModule, fully_shard
from shardwise.fsdp import register_fsdp_forward_method, share_comm_ctx

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
