"""Transformers to forecast, built from a shape and written as published frameworks run them.

The modules are never trained. They run the same operations, and autograd keeps the same tensors.
GPT's blocks have layer norms, one projection for queries, keys and values, and an MLP with GELU.
Llama's have RMS norms in float32, rotary positions, grouped queries and SwiGLU. The loss is part of
the model and takes float32 logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.models.parallel import ModelPart, ring_attention
from shardwise.forecast.planned import OwnExperts

__all__ = ["Shape", "Transformer", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a transformer."""

    arch: Literal["gpt", "llama", "t5"]
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0  # 0: as many as heads
    ffn: int = 0  # 0: 4 * hidden
    head_dim: int = 0  # 0: hidden / heads
    positions: int = 0  # learned positions; 0: none, or rotary positions
    context: int = 0  # rotary positions in a table; 0: they are computed in each forward
    tied_embeddings: bool = False
    has_bias: bool = False  # in all layers
    has_qkv_bias: bool = False  # in the projections to queries, keys and values
    has_qk_norm: bool = False  # norms of queries and keys, per head
    experts: int = 0  # 0: one MLP for all tokens
    active_experts: int = 2  # per token
    dropout: float = 0.0
    loss: Literal["float32", "compute", "shifted", "fused", "fused_linear"] = "float32"  # `_loss`
    keeps_logits: bool = False  # whether the training loop keeps the logits until backward

    def __post_init__(self) -> None:
        for name, default in (
            ("kv_heads", self.heads),
            ("ffn", 4 * self.hidden),
            ("head_dim", self.hidden // self.heads),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        if self.arch not in _ARCHITECTURES:
            raise ConfigError(f"arch={self.arch!r}: expected one of {', '.join(_ARCHITECTURES)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads}: expected a divisor of heads={self.heads}")


_WHOLE = ModelPart(Configuration())
_ARCHITECTURES = ("gpt", "llama", "t5")


def build(shape: Shape, part: ModelPart = _WHOLE) -> nn.Module:
    """Build one rank's part of the transformer on the meta device.

    Its blocks are ``layers.0``, ``layers.1``, ... With ``attention="math"``, attention and GELU are
    written as in minGPT. A pipeline stage after the first takes the output of the previous stage.

    Raises:
        ConfigError: the numbers of ranks do not divide the shape.
    """
    if shape.arch == "t5" and not part.is_whole:
        raise ConfigError(f"a T5 cannot be divided: {part}; use 1 for each of these")
    with torch.device("meta"):
        return T5(shape) if shape.arch == "t5" else Transformer(shape, part)


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing, which is faster: there is nothing to initialize on the meta device."""


class Head(_Linear):
    """The output layer, whose class may be named in ``Configuration.units``."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as in `_Linear`."""


class Transformer(nn.Module):
    """A GPT or Llama that takes tokens and targets and returns the loss."""

    def __init__(self, shape: Shape, part: ModelPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        vocab = part.share("vocab", shape.vocab)
        rows = vocab if part.configuration.split_vocabulary else shape.vocab
        if part.is_first:
            self.embedding = Embedding(rows, shape.hidden)
        if part.is_first and shape.positions:
            self.positions = Embedding(shape.positions, shape.hidden)
        blocks = range(part.blocks(shape.layers))
        self.layers = nn.ModuleList(Block(shape, part) for _ in blocks)
        if part.is_last:
            self.norm = _norm(shape)
            width = rows if shape.tied_embeddings else vocab
            self.head = Head(shape.hidden, width, bias=False)
        if shape.tied_embeddings and part.is_first and part.is_last:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Compute the scalar loss of [batch, time] tokens and targets."""
        if self.part.is_first:
            x = self._embed(x)
        time = x.shape[1] * self.part.sequence_ranks
        rotations = _rotations(self.shape, time, x) if self.shape.arch == "llama" else None
        for layer in self.layers:
            x = layer(x, rotations)
        return self._loss(x, targets) if self.part.is_last else x

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [batch, time, hidden]
        if self.shape.positions:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.dropout(self.part.embed(x), self.shape.dropout, self.training)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.part.gather_sequence(self.norm(x))
        if self.shape.loss == "fused_linear":
            rows = x.flatten(0, 1)
            loss: Tensor = _FusedLinearLoss.apply(rows, self.head.weight)  # type: ignore[no-untyped-call]
            return loss
        logits = self.part.gather_logits(self.head(x), self.shape.vocab)
        if self.shape.keeps_logits:  # alive as long as the graph before them
            x.register_hook(partial(_same, logits.detach()))  # type: ignore[no-untyped-call]
        return _loss(self.shape, logits, targets)


def _same(_kept: Tensor, gradient: Tensor) -> Tensor:
    return gradient


def _loss(shape: Shape, logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy of [batch, time, vocab] logits.

    "float32" and "compute" use PyTorch's function on logits in float32 or in the compute dtype.
    "shifted" is what models of transformers do: it copies the float32 logits without the last
    position, and its output keeps the float32 logits until backward ends. "fused" is a kernel that
    reads the logits once and writes their gradient once, as in FlashAttention and Liger, or a
    compiled loss over chunks, as in torchtune. "fused_linear" is `_FusedLinearLoss`.
    """
    if shape.loss == "shifted":
        whole = logits.float()
        logits.register_hook(partial(_same, whole.detach()))  # type: ignore[no-untyped-call]
        shifted = whole[:, :-1].contiguous()
        loss = F.cross_entropy(shifted.flatten(0, 1), targets[:, 1:].flatten())
        shifted.register_hook(partial(_same, shifted.detach()))  # type: ignore[no-untyped-call]
        return loss
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if shape.loss == "fused":
        fused: Tensor = _FusedLoss.apply(logits)  # type: ignore[no-untyped-call]
        return fused
    return F.cross_entropy(logits.float() if shape.loss == "float32" else logits, targets)


class _FusedLoss(torch.autograd.Function):
    """Has the memory and memory traffic of a fused kernel, but not its values."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        statistics = logits.logsumexp(-1)  # [tokens]
        ctx.save_for_backward(logits, statistics)
        return statistics.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        logits, statistics = ctx.saved_tensors
        return logits - statistics[:, None]  # type: ignore[no-any-return]


class _FusedLinearLoss(torch.autograd.Function):
    """The head and the loss over chunks of tokens, without whole logits; values are not computed.

    Forward computes the gradients as well, and keeps only those of the input and of the weight.

    Source: Liger Kernel, Hsu et al., 2024 (arXiv 2410.10989), fused_linear_cross_entropy.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        parts = min(len(x), -(-weight.shape[0] // weight.shape[1]))
        size = 1 << (-(-len(x) // parts) - 1).bit_length()  # a power of two, as Triton needs
        gradient = torch.empty_like(x)
        total = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(x), size):
            rows = x[start : start + size]
            logits = rows @ weight.t()
            gradient[start : start + size] = logits @ weight
            if total is not None:
                total += logits.t() @ rows
        ctx.save_for_backward(gradient, *([] if total is None else [total]))
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        gradient, *total = ctx.saved_tensors
        return gradient * scale, total[0] * scale if total else None


class Block(nn.Module):
    """Attention and an MLP, both with a residual connection."""

    def __init__(self, shape: Shape, part: ModelPart) -> None:
        super().__init__()
        self.part = part
        self.attention_norm = _norm(shape)
        self.attention = SelfAttention(shape, part)
        self.mlp_norm = _norm(shape)
        self.mlp = _mlp(shape, part)

    def forward(self, x: Tensor, rotations: Tensor | None) -> Tensor:
        gather, scatter = self.part.gather_sequence, self.part.scatter_sequence
        x = x + scatter(self.attention(gather(self.attention_norm(x)), rotations))
        output: Tensor = x + scatter(self.mlp(gather(self.mlp_norm(x))))
        return output


class SelfAttention(nn.Module):
    """Causal attention. A GPT has one projection for queries, keys and values."""

    def __init__(self, shape: Shape, part: ModelPart) -> None:
        super().__init__()
        self.shape = shape
        self.attend = _attention(shape, part.configuration)
        heads = part.share("heads", shape.heads)
        ranks = part.configuration.tensor
        kv_heads = max(shape.kv_heads // ranks, 1)  # several ranks may share a head
        self.widths = [n * shape.head_dim for n in (heads, kv_heads, kv_heads)]
        self.is_fused = shape.arch == "gpt"
        has_bias = shape.has_bias or shape.has_qkv_bias
        if self.is_fused:
            self.qkv = _Linear(shape.hidden, sum(self.widths), bias=has_bias)
        else:
            self.q, self.k, self.v = (
                _Linear(shape.hidden, width, bias=has_bias) for width in self.widths
            )
        self.norms = nn.ModuleList(RMSNorm(shape.head_dim) for _ in range(2 * shape.has_qk_norm))
        self.out = _Linear(self.widths[0], shape.hidden, bias=shape.has_bias)

    def forward(self, x: Tensor, rotations: Tensor | None) -> Tensor:
        batch, time, _ = x.shape
        parts = self.qkv(x).split(self.widths, -1) if self.is_fused else self._project(x)
        heads = (batch, time, -1, self.shape.head_dim)
        q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
        if self.norms:
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        if rotations is not None:
            q, k = _rotate(q, rotations), _rotate(k, rotations)
        mixed = self.attend(q, k, v)
        merged = self.out(mixed.transpose(1, 2).reshape(batch, time, -1))
        output: Tensor = F.dropout(merged, self.shape.dropout, self.training)
        return output

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)


_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attention(shape: Shape, configuration: Configuration) -> _Attend:
    if configuration.context > 1:
        return partial(ring_attention, size=configuration.context)
    is_fused = configuration.attention == "flash"
    return _attend if is_fused else partial(_attend_unfused, shape.dropout)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _attend_unfused(dropout: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5  # [batch, heads, time, time]
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout) @ v


def _mlp(shape: Shape, part: ModelPart) -> nn.Module:
    width = part.share("ffn", shape.ffn)
    if shape.experts:
        return Experts(shape, width, part)
    if shape.arch == "llama":
        return SwiGLU(shape, width)
    return MLP(shape, width, part)


class MLP(nn.Module):
    def __init__(self, shape: Shape, width: int, part: ModelPart) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.activate = F.gelu if part.configuration.attention == "flash" else _gelu_unfused
        self.up = _Linear(shape.hidden, width, bias=shape.has_bias)
        self.down = _Linear(width, shape.hidden, bias=shape.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.activate(self.up(x))), self.dropout, self.training)


def _gelu_unfused(x: Tensor) -> Tensor:
    """GELU with tanh, written as in minGPT."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.gate, self.up = (_Linear(shape.hidden, width, bias=False) for _ in range(2))
        self.down = _Linear(width, shape.hidden, bias=False)
        self.is_fused = shape.loss == "fused_linear"  # which has Liger's kernels

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            inner = _FusedGate.apply(self.gate(x), self.up(x))  # type: ignore[no-untyped-call]
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output


class _FusedGate(torch.autograd.Function):
    """Has the memory of Liger's kernel, which overwrites its inputs with their gradients.

    Source: LigerSiLUMulFunction in liger_kernel/ops/swiglu.py.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.mul_(gradient) for one in ctx.saved_tensors)


class Experts(nn.Module):
    """A mixture of SwiGLU experts with equally many tokens each."""

    def __init__(self, shape: Shape, width: int, part: ModelPart) -> None:
        super().__init__()
        ranks = part.configuration.expert
        if shape.experts % ranks:
            raise ConfigError(f"expert={ranks}: expected a divisor of experts={shape.experts}")
        self.active, self.exchange = shape.active_experts, part.exchange_tokens
        self.experts = SwiGLUExperts(shape.experts // ranks, shape.hidden, width)
        self.router = _Linear(shape.hidden, shape.experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)  # [tokens, hidden]
        weights, chosen = self.router(flat).float().softmax(-1).topk(self.active)
        order = chosen.flatten().argsort()  # [tokens * active], by expert
        tokens = order // self.active
        sent = self.exchange(flat[tokens])
        answers, _inner = self.experts(sent)
        answers = self.exchange(answers)
        answers = answers * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(flat).index_add(0, tokens, answers).view_as(x)


class SwiGLUExperts(OwnExperts):
    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        inward, outward = (hidden, width), (width, hidden)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.empty(count, *sizes)) for sizes in (inward, inward, outward)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the answers to [tokens, hidden], equally many for each expert, in their order.

        Also return what the last product reads, which the caller keeps as long as its own values.
        """
        sent = tokens.view(len(self.gate), -1, tokens.shape[1])  # [experts, tokens of each, hidden]
        inner = F.silu(sent @ self.gate) * (sent @ self.up)
        return (inner @ self.down).flatten(0, 1), inner


class RMSNorm(nn.Module):
    """RMS norm in float32; the result is scaled in the dtype of the input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled.to(x.dtype) * self.weight


def _norm(shape: Shape) -> nn.Module:
    if shape.arch != "gpt":
        return RMSNorm(shape.hidden)
    return nn.LayerNorm(shape.hidden, bias=shape.has_bias)


def _rotations(shape: Shape, time: int, x: Tensor) -> Tensor:
    """Return cosines and sines of the positions' angles, [2, time, head_dim]."""
    speeds = torch.arange(0, shape.head_dim, 2, device=x.device) / -shape.head_dim
    angles = torch.outer(torch.arange(time, device=x.device), 10_000.0**speeds)
    angles = torch.cat([angles, angles], 1)
    return torch.stack([angles.cos(), angles.sin()]).to(x.dtype)


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    cosines, sines = rotations.unbind()
    left, right = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-right, left], dim=-1) * sines


# -- T5 ------------------------------------------------------------------------------------------

_BUCKETS = 32  # buckets of relative positions


class T5(nn.Module):
    """An encoder and a decoder with ``layers`` blocks each.

    Attention is written with matrix products, because a bias of relative positions is added.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.encoder = T5Stack(shape, is_decoder=False)
        self.decoder = T5Stack(shape, is_decoder=True)
        self.head = _Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        encoded = self.encoder(self.embedding(tokens), None)
        decoded = self.decoder(self.embedding(targets), encoded)
        if self.shape.tied_embeddings:
            decoded = decoded * self.shape.hidden**-0.5
        return _loss(self.shape, self.head(decoded), targets)


class T5Stack(nn.Module):
    def __init__(self, shape: Shape, *, is_decoder: bool) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.bias = Embedding(_BUCKETS, shape.heads)
        self.layers = nn.ModuleList(T5Block(shape, is_decoder) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)

    def forward(self, x: Tensor, encoded: Tensor | None) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        buckets = (positions[None] - positions[:, None]).clamp(0, _BUCKETS - 1)
        bias = self.bias(buckets).permute(2, 0, 1)  # [heads, time, time]
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, bias, encoded)
        return F.dropout(self.norm(x), self.dropout, self.training)


class T5Block(nn.Module):
    def __init__(self, shape: Shape, is_decoder: bool) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.norms = nn.ModuleList(RMSNorm(shape.hidden) for _ in range(3 if is_decoder else 2))
        self.attention = T5Attention(shape)
        self.cross_attention = T5Attention(shape) if is_decoder else None
        self.up = _Linear(shape.hidden, shape.ffn, bias=False)
        self.down = _Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, bias: Tensor, encoded: Tensor | None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self._drop(self.attention(normed, normed, bias))
        if self.cross_attention is not None:
            x = x + self._drop(self.cross_attention(self.norms[1](x), encoded, None))
        inner = self._drop(self.up(self.norms[-1](x)).relu())
        return x + self._drop(self.down(inner))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class T5Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q, self.k, self.v = (_Linear(shape.hidden, width, bias=False) for _ in range(3))
        self.out = _Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        projected = (self.q(x), self.k(source), self.v(source))
        heads = (-1, self.shape.head_dim)
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in projected)
        scores = q @ k.transpose(-2, -1)  # [batch, heads, time, time]
        if bias is not None:
            scores = scores + bias
        weights = scores.float().softmax(-1).to(v.dtype)
        mixed = F.dropout(weights, self.shape.dropout, self.training) @ v
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output
