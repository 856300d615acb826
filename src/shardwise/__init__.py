"""Fully Sharded Data Parallel for PyTorch; ``import shardwise as sw`` and `sw.fully_shard`."""

from shardwise.api import fully_shard
from shardwise.checkpoint.directory import Retention, latest
from shardwise.checkpoint.load import Loaded, load
from shardwise.checkpoint.matching import LoadReport
from shardwise.checkpoint.save import Save, save
from shardwise.diagnose.verification import Verification, VerificationError
from shardwise.diagnose.verify import verify
from shardwise.errors import (
    CheckpointDamaged,
    CheckpointError,
    PeerAborted,
    PeerLost,
    PlanError,
    RanksDiverged,
    ShardedTensorError,
    ShardwiseError,
    StepError,
)
from shardwise.features.activation_offload import offload_activations
from shardwise.features.initialize import Initialization, initialize
from shardwise.features.transaction import transaction
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.in_backward import optimizer_in_backward
from shardwise.optim.tokens import backward, token_weight
from shardwise.plan.granularity import block
from shardwise.plan.offload import CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import Strategy
from shardwise.runtime.module import FSDPModule, gathered, ledger
from shardwise.runtime.tensor import ShardedTensor

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointDamaged",
    "CheckpointError",
    "FSDPModule",
    "Initialization",
    "LoadReport",
    "Loaded",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerAborted",
    "PeerLost",
    "PlanError",
    "RanksDiverged",
    "Retention",
    "Save",
    "ShardedTensor",
    "ShardedTensorError",
    "ShardwiseError",
    "StepError",
    "Strategy",
    "Verification",
    "VerificationError",
    "backward",
    "block",
    "clip_grad_norm_",
    "fully_shard",
    "gathered",
    "initialize",
    "latest",
    "ledger",
    "load",
    "offload_activations",
    "optimizer_in_backward",
    "save",
    "token_weight",
    "transaction",
    "verify",
]
