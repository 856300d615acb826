"""A training loop with accelerate: accumulation, clipping, and a checkpoint that is reloaded.

    torchrun --nproc-per-node=2 examples/hf/accelerate_loop.py OUT [--engine ddp] [--bf16]

Compared with a program that uses DDP, two lines change: the import and the call of `Accelerator`.
"""

import argparse
import json
from pathlib import Path

import accelerate
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardwise.integrations.accelerate import Accelerator

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
PARTS = 2  # micro-batches per step


def make_accelerator(engine: str, bf16: bool = False) -> accelerate.Accelerator:
    options = {
        "cpu": not torch.cuda.is_available(),
        "gradient_accumulation_steps": PARTS,
        "mixed_precision": "bf16" if bf16 else "no",
    }
    if engine == "ddp":
        return accelerate.Accelerator(**options)
    return Accelerator(fully_shard={"units": LlamaDecoderLayer}, **options)


def main(out: Path, accelerator: accelerate.Accelerator) -> list[tuple[float, float]]:
    """Train and save; return the loss and the gradient norm of each step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(torch.randint(64, (96, 12)), batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    history = []
    total = torch.zeros((), device=accelerator.device)
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            total += loss.detach() / PARTS
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            history.append((float(accelerator.reduce(total, "mean")), float(norm)))
            total.zero_()
            if len(history) == 3:
                accelerator.save_state(str(out / "state"))
            if len(history) == 4:  # the reloaded checkpoint undoes this step
                accelerator.load_state(str(out / "state"))
    accelerator.save_model(model, str(out / "model"))
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    accelerator = make_accelerator(options.engine, options.bf16)
    history = main(options.out / options.engine, accelerator)
    if accelerator.is_main_process:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history))
    accelerator.end_training()
