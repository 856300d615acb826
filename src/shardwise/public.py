"""The public names; `shardwise` itself imports them when one of them is first used."""

from shardwise import optim
from shardwise.api import fully_shard
from shardwise.checkpoint.directory import Retention, latest
from shardwise.checkpoint.load import Loaded, load
from shardwise.checkpoint.matching import LoadReport
from shardwise.checkpoint.save import Save, save
from shardwise.errors import (
    CheckpointDamaged,
    CheckpointError,
    PeerAborted,
    PeerLost,
    PeerSilent,
    PlanError,
    RanksDiverged,
    ShardedTensorError,
    ShardwiseError,
    StepError,
)
from shardwise.features.activation_offload import offload_activations
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.gathered import gathered
from shardwise.features.initialize import Initialization, initialize
from shardwise.features.sleep import Asleep, sleep, wake
from shardwise.features.transaction import transaction
from shardwise.forecast.search.fit import Fit, fit
from shardwise.forecast.view.estimate import Estimate, estimate
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.in_backward import optimizer_in_backward
from shardwise.optim.join import join
from shardwise.optim.leaves import leaf_mean, leaf_rng, leaves
from shardwise.optim.outer import Outer
from shardwise.optim.outer_optimizer import OuterOptimizer
from shardwise.optim.tokens import backward, token_weight
from shardwise.plan.granularity import block
from shardwise.plan.offload import CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import Strategy
from shardwise.plan.wire import Wire
from shardwise.recording.record import Recorder, record
from shardwise.replicas.elastic import Elastic, elastic
from shardwise.replicas.local_steps import outer_optimizer
from shardwise.runtime.module import ledger
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.verification.result import Verification, VerificationError
from shardwise.verification.verify import verify
from shardwise.weights.full_tensors import full_tensors
from shardwise.weights.publish import publish

__all__ = [
    "Asleep",
    "CPUOffloadPolicy",
    "CheckpointDamaged",
    "CheckpointError",
    "Elastic",
    "Estimate",
    "FSDPModule",
    "Fit",
    "Initialization",
    "LoadReport",
    "Loaded",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Outer",
    "OuterOptimizer",
    "PeerAborted",
    "PeerLost",
    "PeerSilent",
    "PlanError",
    "RanksDiverged",
    "Recorder",
    "Retention",
    "Save",
    "ShardedTensor",
    "ShardedTensorError",
    "ShardwiseError",
    "StepError",
    "Strategy",
    "Verification",
    "VerificationError",
    "Wire",
    "backward",
    "block",
    "clip_grad_norm_",
    "elastic",
    "estimate",
    "fit",
    "full_tensors",
    "fully_shard",
    "gathered",
    "initialize",
    "join",
    "latest",
    "leaf_mean",
    "leaf_rng",
    "leaves",
    "ledger",
    "load",
    "offload_activations",
    "optim",
    "optimizer_in_backward",
    "outer_optimizer",
    "publish",
    "record",
    "save",
    "sleep",
    "token_weight",
    "transaction",
    "verify",
    "wake",
]
