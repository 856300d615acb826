"""Sequence parallelism: each rank has some positions, and within attention some heads.

    torchrun --nproc-per-node=4 examples/parallelism/ulysses.py

The ranks of ``cp`` share a batch of sequences, and parameters are sharded over all ranks,
including those of ``cp``::

    rank                 0        1        2        3
    dp, batch            0        0        1        1
    cp, positions     0 to 15  16 to 31  0 to 15  16 to 31     outside attention, all heads
    heads             0 and 1   2 and 3  0 and 1   2 and 3     in attention, all positions

Each rank's loss is the mean over its own tokens. All ranks have the same number of tokens.

Source: Jacobs et al., DeepSpeed-Ulysses, 2023 (arXiv 2309.14509).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise as sw

WIDTH, HEADS, LAYERS, LENGTH, BATCH, VOCABULARY = 32, 4, 2, 32, 4, 50


class Attention(nn.Module):
    """Causal self-attention over sequences that the ranks of ``group`` share; None: one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, own positions, width]."""
        batch, length, _ = x.shape
        qkv = self.into(x).view(batch, length, HEADS, 3, -1)
        qkv = exchange(qkv, self.group, split=2, join=1)  # [batch, positions, own heads, 3, size]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [batch, own heads, positions, size]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = exchange(y.transpose(1, 2), self.group, split=1, join=2)
        result: Tensor = self.out(y.reshape(batch, length, WIDTH))
        return result


def exchange(x: Tensor, group: dist.ProcessGroup | None, *, split: int, join: int) -> Tensor:
    """Give each rank its part of dim ``split``, with the parts of dim ``join`` of all ranks."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    sent = torch.stack(x.chunk(size, split))  # [ranks, ...]
    received = all_to_all_single_autograd(sent, None, None, group)
    return torch.cat(received.unbind(), join)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = x + self.mlp(x)
        return y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Tokens and their places in the sequence, both [batch, own positions]."""
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def shard(model: Transformer, dp: int, cp: int) -> tuple[int, int]:
    """Divide sequences among ``cp`` ranks; return this rank's indices in ``dp`` and ``cp``."""
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    for module in model.modules():
        if isinstance(module, Attention):
            module.group = mesh["cp"].get_group()
    sw.fully_shard(model, units=Block)  # over all ranks
    return mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()


def batch_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, positions and next tokens of all ranks, [batch, positions] each."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return text[:, :-1], torch.arange(LENGTH).expand(BATCH, -1), text[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, cp = Transformer(), 2
    dp = dist.get_world_size() // cp
    row, column = shard(model, dp, cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        parts = [x.chunk(dp)[row].chunk(cp, 1)[column] for x in batch_of(step)]
        loss = loss_of(model, *parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
