"""transformers' `DistributedConfig` with shardwise instead of FSDP2; a program for torchrun.

    torchrun --nproc-per-node=2 examples/hf/distributed_config.py OUT [--tp 1] [--engine torch]

`from_pretrained` builds the model on the meta device, applies tensor parallelism over ``--tp``
ranks, shards the model, and reads this rank's part of the weights. The program writes the losses to
OUT/ENGINE.json, and the trained model to OUT/ENGINE. The model is tiny and random.
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from shardwise.fsdp.frameworks import replace_torch_fsdp


def save_base(path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def main(out: Path, tp_size: int, engine: str) -> list[float]:
    """Train and save; return the mean loss of each step."""
    fsdp_size = dist.get_world_size() // tp_size
    config = DistributedConfig(fsdp_size=fsdp_size, tp_size=tp_size)
    model = AutoModelForCausalLM.from_pretrained(out / "base", distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    part = dist.get_rank() // tp_size
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (4 * fsdp_size, 12), generator=generator).chunk(fsdp_size)[part]
        tokens = tokens.to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    model.save_pretrained(out / engine)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engine", choices=["shardwise", "torch"], default="shardwise")
    options = parser.parse_args()
    dist.init_process_group()
    if dist.get_rank() == 0:
        save_base(options.out / "base")
    dist.barrier()
    with contextlib.ExitStack() as stack:
        if options.engine == "shardwise":
            stack.enter_context(replace_torch_fsdp("transformers.distributed.fsdp"))
        losses = main(options.out, options.tp, options.engine)
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()
