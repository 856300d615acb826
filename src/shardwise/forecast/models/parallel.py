"""Model parallelism in traced models: one rank's share of the sizes, and its collectives.

Tensor parallelism follows Megatron, with sequence parallelism (arXiv 2205.05198), where a rank has
its share of each sequence between products, or without it (arXiv 1909.08053). Context parallelism
is ring attention: queries stay, and keys and values visit all ranks. Expert parallelism sends
tokens to the ranks of their experts.

Each collective is a custom operator, so that a trace records it. It moves no data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import MODEL_AXES, Configuration
from shardwise.forecast.trace.recorder import COLLECTIVES
from shardwise.plan.spelling import counted

__all__ = ["ModelPart", "ring_attention"]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One rank's part of a model, and its collectives with the ranks of the other parts."""

    configuration: Configuration
    stage: int = 0  # of the pipeline

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self.configuration, name)}" for name in MODEL_AXES)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.configuration.pipeline - 1

    @property
    def is_whole(self) -> bool:
        """Whether one rank computes everything."""
        return self.configuration.model_parallel == self.configuration.expert == 1

    @property
    def sequence_ranks(self) -> int:
        """Tensor-parallel ranks that share the sequence between products."""
        return self.configuration.tensor if self.configuration.sequence_parallel else 1

    def blocks(self, layers: int) -> int:
        """Return the number of blocks of this stage; a remainder goes to the first stages.

        Raises:
            ConfigError: a stage would have no block, or there are several chunks, and the blocks do
                not divide evenly over them.
        """
        pipeline, chunks = self.configuration.pipeline, self.configuration.chunks
        if pipeline > layers:
            raise ConfigError(
                f"pipeline={pipeline}: expected at most {counted(layers, 'stage')}, because each "
                "needs a block"
            )
        if chunks > 1 and layers % (pipeline * chunks):
            raise ConfigError(
                f"chunks={chunks}: expected {counted(layers, 'block')} to be a multiple of "
                f"pipeline x chunks = {pipeline} x {chunks}"
            )
        each, remainder = divmod(layers, pipeline)
        return each + (self.stage < remainder)

    def share(self, name: str, size: int) -> int:
        """Return this rank's share of ``size`` in tensor parallelism."""
        tensor = self.configuration.tensor
        if size % tensor:
            raise ConfigError(f"tensor={tensor}: expected a divisor of {name}={size}")
        return size // tensor

    def gather_sequence(self, x: Tensor) -> Tensor:
        """Gather [batch, time / sequence_ranks, ...] to [batch, time, ...]."""
        tensor = self.configuration.tensor
        if not self.configuration.sequence_parallel:
            return _collective(x, "", "all_reduce", "tensor", tensor)
        return _collective(x, "all_gather", "reduce_scatter", "tensor", tensor)

    def scatter_sequence(self, x: Tensor) -> Tensor:
        """Sum [batch, time, ...] over ranks and scatter to [batch, time / sequence_ranks, ...]."""
        tensor = self.configuration.tensor
        if not self.configuration.sequence_parallel:
            return _collective(x, "all_reduce", "", "tensor", tensor)
        return _collective(x, "reduce_scatter", "all_gather", "tensor", tensor)

    def embed(self, x: Tensor) -> Tensor:
        """Convert the output of this rank's embedding to the input of its blocks."""
        if self.configuration.split_vocabulary:
            return self.scatter_sequence(x)
        return x.narrow(1, 0, x.shape[1] // self.sequence_ranks)

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor:
        """Convert this rank's share of the [batch, time, vocab] logits to the input of the loss."""
        if self.configuration.split_vocabulary or logits.shape[-1] == vocab:
            return logits
        ranks = self.configuration.tensor
        gathered: Tensor = _GatheredLogits.apply(logits, ranks)  # type: ignore[no-untyped-call]
        return gathered

    def exchange_tokens(self, x: Tensor) -> Tensor:
        """Send [1, tokens, hidden] to the ranks of their experts, or back."""
        return _collective(x, "all_to_all", "all_to_all", "expert", self.configuration.expert)


def _collective(x: Tensor, name: str, backward: str, axis: str, size: int) -> Tensor:
    """Run a collective on ``x``, and another one on its gradient; "": none."""
    if size == 1:
        return x
    result: Tensor = _Collective.apply(x, name, backward, axis, size)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op(f"{COLLECTIVES}::collective", mutates_args=())
def _operator(x: Tensor, name: str, axis: str, shape: Sequence[int]) -> Tensor:
    raise NotImplementedError(f"{name} over {axis} from {x.shape} to {shape} is only traced")


@_operator.register_fake
def _(x: Tensor, name: str, axis: str, shape: Sequence[int]) -> Tensor:  # noqa: ARG001
    return x.new_empty(shape)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, backward: str, axis: str, size: int) -> Tensor:
        ctx.name, ctx.axis, ctx.shape = backward, axis, list(x.shape)
        shape = list(x.shape)
        if name == "all_gather":
            shape[1] *= size
        elif name == "reduce_scatter":
            shape[1] //= size
        return _operator(x, name, axis, shape) if name else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.name:
            gradient = _operator(gradient, ctx.name, ctx.axis, ctx.shape)
        return gradient, None, None, None, None


class _GatheredLogits(torch.autograd.Function):
    """Gathers the last dim: an all-gather along dim 0, then a concatenation along the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.width = x.shape[-1]
        parts = _operator(x, "all_gather", "tensor", [size * x.shape[0], *x.shape[1:]])
        return torch.cat(parts.chunk(size), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., : ctx.width].contiguous(), None


# -- ring attention ------------------------------------------------------------------------------

_aten = torch.ops.aten
_flash = _aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def ring_attention(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Compute causal attention of this rank's queries to the keys of all ``size`` ranks.

    Shapes are [batch, heads, time / size, head_dim]. Only this rank's tensors are saved for
    backward.
    """
    result: Tensor = _RingAttention.apply(q, k, v, size)  # type: ignore[no-untyped-call]
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
        output, statistics = _flash(q, *_all_keys(k, v, size), 0.0, True)
        ctx.save_for_backward(q, k, v, output, statistics)
        ctx.size = size
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, statistics = ctx.saved_tensors
        keys = _all_keys(k, v, ctx.size)
        own, *others = _flash_backward(gradient, q, *keys, output, statistics, 0.0, True)
        k_gradient, v_gradient = (
            _operator(one, "reduce_scatter", "context", list(k.shape)) for one in others
        )
        return own, k_gradient, v_gradient, None


def _all_keys(k: Tensor, v: Tensor, size: int) -> list[Tensor]:
    batch, heads, time, head_dim = k.shape
    shape = [batch, heads, time * size, head_dim]
    return [_operator(one, "all_gather", "context", shape) for one in (k, v)]
