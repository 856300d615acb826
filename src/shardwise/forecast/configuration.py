"""The training configuration: everything that a forecast needs besides model and machine."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from math import gcd
from typing import Any, Literal, get_args, get_origin

import torch

from shardwise.errors import PlanError
from shardwise.forecast.adapters import Adapters
from shardwise.optim.outer import Outer
from shardwise.plan.optimizers import OptimizerSpec, optimizer_spec
from shardwise.plan.spelling import did_you_mean
from shardwise.plan.strategy import Strategy, resolve_strategy
from shardwise.plan.wire import UNQUANTIZED, Wire

__all__ = [
    "MODEL_AXES",
    "Accumulate",
    "Attention",
    "Checkpointing",
    "Configuration",
    "Float8",
    "Offload",
    "OffloadStep",
    "OptimizerLoop",
    "Stack",
]

MODEL_AXES = ("tensor", "pipeline", "context", "expert")  # degrees of parallelism besides data
Checkpointing = Literal["none", "products", "selective", "full"]
Accumulate = Literal["shards", "whole"]
Offload = Literal["none", "optimizer", "parameters"]
OffloadStep = Literal["host", "device"]
OptimizerLoop = Literal["foreach", "fused", "for_loop"]
Float8 = Literal["none", "tensorwise", "rowwise", "delayed", "mxfp8"]
Attention = Literal["flash", "math"]
Stack = Literal["shardwise", "fsdp1", "fsdp2", "ddp", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a model is trained.

    The mesh is ``pipeline x replicas x shard_size x context x tensor``; the ``expert`` ranks are
    data-parallel ranks. A pipeline's micro-batches are those of the accumulation. Each stage has
    its blocks in ``chunks`` parts. With several chunks, micro-batches pass all stages once per
    chunk (interleaved 1F1B, arXiv 2104.04473).

    Args:
        strategy: a name in `STRATEGIES`.
        shard_size: data-parallel ranks over which the model is sharded.
        replicas: number of replicas of the sharded model.
        reshard_after_forward: as in `fully_shard`.
        tensor: ranks that compute one layer together.
        sequence_parallel: whether tensor-parallel ranks also share the sequence between products.
        split_vocabulary: whether tensor-parallel ranks share the embedding and the logits.
            Otherwise each has the whole embedding and gathers the logits for the loss.
        pipeline: number of stages, each on its own ranks.
        chunks: parts of the model on each stage of a pipeline. With several chunks, the
            accumulation must be a multiple of the number of stages.
        context: ranks that share a sequence.
        expert: data-parallel ranks that share the experts: neighbors on the axis of ``shard_size``,
            and only beyond it (`expert_axes`) of different ``replicas``.
        micro_batch: sequences in one forward of a rank.
        accumulation: forwards of a rank per step.
        accumulate: what is accumulated over micro-batches: gradient shards, or whole gradients.
        reproducible: micro-batches of a step over all data-parallel ranks, whose gradients are
            summed in a binary tree (`fully_shard`); 0: in any order.
        sequence: tokens per sequence.
        checkpointing: a mode of `checkpoint_blocks` for all blocks, or one mode for each block.
        activation_offload: whether tensors that autograd saves in a block are on the host until its
            backward.
        offload: what is kept on the host between steps; ``"parameters"`` includes the optimizer.
        offload_step: where the optimizer runs with offload; on the "device", gradients are there.
        prefetch: units gathered ahead of the one that computes.
        units: "auto", the name of a module class or several names, or a size in parameters; None:
            the whole model is one unit.
        master_dtype: dtype of shards, gradient shards and optimizer states.
        compute_dtype: dtype of matrix products.
        gather_dtype: dtype of gathered parameters; None: ``compute_dtype``, or ``master_dtype``
            with autocast.
        reduce_dtype: dtype of gradients while they are reduced.
        full_norms: whether `torch.nn.LayerNorm` computes in ``master_dtype``.
        autocast: whether to compute under ``torch.autocast``.
        optimizer: a name in `OPTIMIZERS`, or ``"package.module:Class"``.
        optimizer_options: its options, which may add states, such as ``(("momentum", 0.9),)``.
        step_in_backward: whether each unit is stepped as soon as its gradients are reduced.
        wire: formats in which parameters and gradients travel between ranks.
        outer: how replicas that train independently are synchronized; None: there is one.
        outer_replicas: number of these replicas, each of which has the mesh above.
        clips: whether the gradient norm is clipped.
        optimizer_loop: how the optimizer iterates over parameters, as the arguments of torch's
            optimizers.
        adapters: adapters to train, on a frozen base in ``compute_dtype`` or with 4-bit weights;
            None: train all parameters that are not frozen.
        compiled: whether the model runs under ``torch.compile``.
        float8: how products of linear layers in blocks scale 8-bit operands, if they have them: per
            tensor or per row with scales of the present step, per tensor with delayed scales, or
            per block of 32 (mxfp8).
        float8_gather: whether weights of these layers are gathered in 8 bits, and what
            tensor-parallel ranks gather.
        attention: "flash": a fused attention kernel; "math": matrix products and a softmax.
        stack: the library whose buffers are counted.

    Raises:
        PlanError: a value is out of range.
    """

    strategy: str = "fsdp"
    shard_size: int = 1
    replicas: int = 1
    reshard_after_forward: bool | int | None = None
    tensor: int = 1
    sequence_parallel: bool = True
    split_vocabulary: bool = True
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    accumulate: Accumulate = "shards"
    reproducible: int = 0
    sequence: int = 2048
    checkpointing: Checkpointing | tuple[Checkpointing, ...] = "none"
    activation_offload: bool = False
    offload: Offload = "none"
    offload_step: OffloadStep = "host"
    prefetch: int = 1
    units: str | int | tuple[str, ...] | None = "auto"
    master_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    full_norms: bool = False
    autocast: bool = False
    optimizer: str = "adamw"
    optimizer_options: tuple[tuple[str, Any], ...] = ()
    optimizer_loop: OptimizerLoop = "fused"
    step_in_backward: bool = False
    wire: Wire = UNQUANTIZED
    outer: Outer | None = None
    outer_replicas: int = 1
    clips: bool = True
    compiled: bool = False
    float8: Float8 = "none"
    float8_gather: bool = False
    adapters: Adapters | None = None
    attention: Attention = "flash"
    stack: Stack = "shardwise"

    def __post_init__(self) -> None:
        resolve_strategy(self.strategy)
        optimizer_spec(self.optimizer, self.optimizer_options)
        for problem in chain(self._invalid_values(), self._mesh_problems(), self._contradictions()):
            raise PlanError(problem)

    def _invalid_values(self) -> Iterator[str]:
        for name in _INTEGERS:
            value, least = getattr(self, name), int(name not in _MAY_BE_ZERO)
            if not isinstance(value, int) or value < least:
                yield f"{name}={value!r}: expected an integer of {least} or more"
        for name, kind in _CHOICES.items():
            given, choices = getattr(self, name), get_args(kind)
            for value in given if isinstance(given, tuple) else (given,):
                if value not in choices:
                    allowed = ", ".join(map(repr, choices))
                    hint = did_you_mean(value, choices)
                    yield f"{name}={value!r}: expected one of {allowed}{hint}"

    def _mesh_problems(self) -> Iterator[str]:
        if self.data_parallel % self.expert:
            yield (
                f"expert={self.expert}: expected a divisor of the {self.data_parallel} "
                "data-parallel ranks (shard_size x replicas)"
            )
        if (self.outer is None) != (self.outer_replicas == 1):
            yield (
                f"outer_replicas={self.outer_replicas}: expected 2 or more with outer=Outer(...), "
                "and 1 without"
            )
        if self.chunks > 1 and self.pipeline == 1:
            yield f"chunks={self.chunks}: expected pipeline to be 2 or more, got pipeline=1"

    def _contradictions(self) -> Iterator[str]:
        if self.offload_step == "device":
            if self.offload == "none":
                yield (
                    "offload_step='device' without offload: expected offload='optimizer' or "
                    "'parameters'"
                )
            if not self.states.steps_units:
                yield (
                    f"offload_step='device': {self.optimizer} works on whole matrices, not on "
                    "units; expected 'host'"
                )
            if self.tensor > 1:
                yield (
                    f"offload_step='device' with tensor={self.tensor}: divided parameters are cut "
                    "by a dim, which the step on the device does not support; expected 'host'"
                )
        if self.float8_gather and self.float8 not in ("tensorwise", "delayed"):
            yield f"float8_gather=True: expected scales per tensor, got float8={self.float8!r}"
        if self.float8 != "none" and self.adapters is not None and self.adapters.quantized:
            yield (
                f"float8={self.float8!r}: products with 4-bit weights are in {self.compute_dtype}; "
                "expected 'none'"
            )
        if self.adapters is not None and self.tensor > 1:
            yield f"tensor={self.tensor}: adapters of divided layers are not modelled"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype of gathered parameters."""
        return self.gather_dtype or (self.master_dtype if self.autocast else self.compute_dtype)

    @property
    def states(self) -> OptimizerSpec:
        """The states of the optimizer."""
        return optimizer_spec(self.optimizer, self.optimizer_options)

    @property
    def row(self) -> Strategy:
        """The placements of ``strategy``."""
        return resolve_strategy(self.strategy)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks over which parameters are sharded, including those of a sequence."""
        return self.shard_size * self.context

    @property
    def expert_axes(self) -> tuple[int, int]:
        """Ranks of ``shard_size``, and of ``replicas``, that share the experts."""
        near = gcd(self.shard_size, self.expert)
        return near, self.expert // near

    @property
    def data_parallel(self) -> int:
        """Number of groups of ranks that each train on their own sequences."""
        return self.shard_size * self.replicas

    @property
    def model_parallel(self) -> int:
        """Number of ranks that train on the same sequences."""
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        """Number of ranks of all replicas that train independently."""
        return self.data_parallel * self.model_parallel * self.outer_replicas

    @property
    def global_batch(self) -> int:
        """Sequences per step, over all ranks."""
        return self.micro_batch * self.accumulation * self.data_parallel * self.outer_replicas

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch * self.sequence


_MAY_BE_ZERO = ("prefetch", "reproducible")
_INTEGERS = [one.name for one in fields(Configuration) if one.type is int]
_CHOICES = {one.name: one.type for one in fields(Configuration) if get_origin(one.type) is Literal}
_CHOICES["checkpointing"] = Checkpointing
