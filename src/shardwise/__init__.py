"""Fully Sharded Data Parallel for PyTorch; ``import shardwise as sw`` and `sw.fully_shard`.

`__all__` has what most programs use. The other names that are imported here, exceptions among them,
are public, too.
"""

from shardwise.api import fully_shard
from shardwise.checkpoint.directory import Retention, latest
from shardwise.checkpoint.load import Loaded as Loaded, load
from shardwise.checkpoint.matching import LoadReport as LoadReport
from shardwise.checkpoint.save import Save as Save, save
from shardwise.diagnose.record import Recorder as Recorder, record as record
from shardwise.diagnose.verification import (
    Verification as Verification,
    VerificationError as VerificationError,
)
from shardwise.diagnose.verify import verify
from shardwise.errors import (
    CheckpointDamaged as CheckpointDamaged,
    CheckpointError as CheckpointError,
    PeerAborted as PeerAborted,
    PeerLost as PeerLost,
    PeerSilent as PeerSilent,
    PlanError as PlanError,
    RanksDiverged as RanksDiverged,
    ShardedTensorError as ShardedTensorError,
    ShardwiseError,
    StepError as StepError,
)
from shardwise.features.activation_offload import offload_activations as offload_activations
from shardwise.features.initialize import Initialization, initialize as initialize
from shardwise.features.transaction import transaction
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.in_backward import optimizer_in_backward as optimizer_in_backward
from shardwise.optim.tokens import backward, token_weight as token_weight
from shardwise.plan.granularity import block
from shardwise.plan.offload import CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import Strategy
from shardwise.runtime.module import FSDPModule, gathered, ledger
from shardwise.tensor.sharded_tensor import ShardedTensor

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "Initialization",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Retention",
    "ShardedTensor",
    "ShardwiseError",
    "Strategy",
    "backward",
    "block",
    "clip_grad_norm_",
    "fully_shard",
    "gathered",
    "latest",
    "ledger",
    "load",
    "save",
    "transaction",
    "verify",
]
