"""A small GPT: pre-norm blocks, rotary embeddings, fused attention, tied head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.plan.policies import choose_units
from shardwise.train.config import MemoryConfig

__all__ = ["GPT", "Block", "gpt_shape", "modes_of", "prepare_blocks"]

INIT_STD = 0.02

ROTARY_BASE = 10_000.0


def gpt_shape(vocabulary: int, context: int, width: int, layers: int, heads: int) -> Shape:
    """Return the shape of a GPT whose sequences have at most ``context`` tokens."""
    return Shape(
        arch="gpt",
        layers=layers,
        hidden=width,
        heads=heads,
        vocab=vocabulary,
        context=context,
        tied_embeddings=True,
    )


class GPT(nn.Module):
    """A GPT that maps tokens to the logits of each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.rotations: Tensor  # [2, context, head_width]
        self.register_buffer("rotations", rotary_table(shape), persistent=False)
        for module in self.modules():
            self.fill(module)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Initialize the parameters and buffers of ``module`` itself, without its children.

        Weights are normally distributed. As in GPT-2, layers whose output is added to the residual
        stream have a smaller deviation. Otherwise the variance of the stream would grow with its
        2 * layers additions; this way it stays near that of one addition.
        """
        if module is self:
            self.rotations.copy_(rotary_table(self.shape))
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            is_residual = isinstance(module, ResidualLinear)
            std = INIT_STD / math.sqrt(2 * self.shape.layers) if is_residual else INIT_STD
            nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, time] token numbers to [batch, time, vocabulary] logits.

        Args:
            tokens: token numbers, int64 [batch, time].
            positions: position of each token in its document, int64 [batch, time]; tokens attend
                only to their own document. None if all tokens of a row are one text.
        """
        rotations, mask = self.rotations[:, : tokens.shape[1]], None
        if positions is not None:
            rotations = self.rotations[:, positions].unsqueeze(2)  # [2, batch, 1, time, head_width]
            mask = document_mask(positions)
        x = self.embedding(tokens)  # [batch, time, width]
        for block in self.blocks:
            x = block(x, rotations, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ResidualLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream."""


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.hidden, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, 4 * shape.hidden, bias=False),
            nn.GELU(approximate="tanh"),
            ResidualLinear(4 * shape.hidden, shape.hidden, bias=False),
        )

    def forward(self, x: Tensor, rotations: Tensor, mask: Tensor | None = None) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), rotations, mask)
        output: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = ResidualLinear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotations: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch, heads, time, head_width] each
        q, k = rotate(q, rotations), rotate(k, rotations)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return merged


def document_mask(positions: Tensor) -> Tensor:
    """A causal mask within each document, bool [batch, 1, time, time]."""
    number = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)  # [batch, time]
    same = number.unsqueeze(2) == number.unsqueeze(1)  # [batch, time, time]
    return same.tril().unsqueeze(1)


def rotary_table(shape: Shape) -> Tensor:
    """Cosine and sine of each position's angles, [2, context, head_width] (arXiv 2104.09864)."""
    pairs = shape.head_dim // 2
    speeds = ROTARY_BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)  # [pairs]
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), speeds)
    angles = torch.cat([angles, angles], dim=1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_width / 2) of ``x`` by its position's angle."""
    # A cast only if a block is recomputed under the FSDP2 of torch 2.11, which forgets to cast.
    cosines, sines = rotations.to(x.dtype).unbind()
    left, right = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-right, left], dim=-1) * sines


def prepare_blocks(model: nn.Module, memory: MemoryConfig, *, compiles: bool = False) -> None:
    """Make every n-th block of ``model`` keep fewer activations, and compile all blocks."""
    blocks = choose_units(model, "auto")[1:] if memory.checkpoint_every or compiles else []
    if memory.checkpoint_every:
        checkpoint_blocks(model, modes_of(memory, len(blocks)))
    for name in blocks if compiles else ():
        model.get_submodule(name).compile()


def modes_of(memory: MemoryConfig, num_blocks: int) -> tuple[str, ...]:
    every = memory.checkpoint_every
    return tuple(
        memory.checkpoint if every and number % every == 0 else "none"
        for number in range(1, num_blocks + 1)
    )
