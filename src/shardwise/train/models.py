"""A small GPT: pre-norm blocks, rotary positions, fused attention, a head tied to the embedding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.train.checkpointing import recomputed

__all__ = ["GPT", "Attention", "Block", "Shape", "is_matrix"]

DEVIATION = 0.02  # of first weights

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a GPT."""

    vocabulary: int
    context: int  # the longest sequence, in tokens
    width: int
    layers: int
    heads: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class GPT(nn.Module):
    """Tokens in, the logits of each next token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.checkpoint_every = 0  # blocks, of which one is recomputed in backward; 0 is none
        self.checkpoint = "full"  # what of it, as in `train.checkpointing`
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.rotations: Tensor  # [2, context, head_width]
        self.register_buffer("rotations", rotary_table(shape), persistent=False)
        for module in self.modules():
            self.fill(module)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give what ``module``, a part of this model, holds itself its first values.

        Small normal weights, smaller ones in layers that add to the residual stream, as in GPT-2:
        with 2 * layers additions of equal variance the stream would grow with depth; the smaller
        deviation keeps its variance near that of one addition.
        """
        if module is self:
            self.rotations.copy_(rotary_table(self.shape))
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            shrinks = isinstance(module, ResidualLinear)
            std = DEVIATION / math.sqrt(2 * self.shape.layers) if shrinks else DEVIATION
            nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] token numbers to [batch, time, vocabulary] logits."""
        rotations = self.rotations[:, : tokens.shape[1]]
        x = self.embedding(tokens)  # [batch, time, width]
        for number, block in enumerate(self.blocks, start=1):
            if self.training and self.checkpoint_every and number % self.checkpoint_every == 0:
                x = recomputed(block, self.checkpoint)(x, rotations)
            else:
                x = block(x, rotations)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ResidualLinear(nn.Linear):
    """What it gives is added to the residual stream."""


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its own input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(approximate="tanh"),
            ResidualLinear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), rotations)
        output: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = ResidualLinear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch, heads, time, head_width] each
        q, k = rotate(q, rotations), rotate(k, rotations)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return merged


def rotary_table(shape: Shape) -> Tensor:
    """Cosines and sines of every position's angles, [2, context, head_width] (arXiv 2104.09864)."""
    pairs = shape.head_width // 2
    speeds = ROTARY_BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)  # [pairs]
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), speeds)
    angles = torch.cat([angles, angles], dim=1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn each pair (i, i + head_width/2) of ``x`` by its position's angle."""
    cosines, sines = rotations.unbind()
    left, right = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-right, left], dim=-1) * sines


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it mixes features, unlike the scales of a norm."""
    return parameter.ndim > 1
