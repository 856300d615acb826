"""A small T5-like model with mixed precision and activation checkpointing (FSDP1).

torchrun --nproc-per-node 2 examples/porting/t5.py
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from shardwise.fsdp import FullyShardedDataParallel as FSDP
from shardwise.fsdp import MixedPrecision, ShardingStrategy
from shardwise.fsdp.wrap import transformer_auto_wrap_policy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, HEADS, VOCABULARY = 32, 4, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, context, causal=False):
        def heads(t):
            return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        key, value = self.key_value(context).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(
            heads(self.query(x)), heads(key), heads(value), is_causal=causal
        )
        return self.out(y.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, decodes):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(3 if decodes else 2)])
        self.attention = Attention()
        self.cross = Attention() if decodes else None
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, memory=None):
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal, causal=memory is not None)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.down(F.relu(self.up(self.norms[-1](x))))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([T5Block(decodes=False) for _ in range(2)])
        self.decoder = nn.ModuleList([T5Block(decodes=True) for _ in range(2)])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source, target):
        memory = self.shared(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(F.pad(target[:, :-1], (1, 0)))
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), target.flatten())


def main():
    torch.manual_seed(0)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    bfloat16 = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    )
    model = FSDP(
        T5(),
        auto_wrap_policy=policy,
        mixed_precision=bfloat16,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=DEVICE,
        limit_all_gathers=True,
    )
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, T5Block)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        source = torch.randint(VOCABULARY, (4, 12), generator=generator).to(DEVICE)
        optimizer.zero_grad()
        loss = model(source, source.flip(1))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
