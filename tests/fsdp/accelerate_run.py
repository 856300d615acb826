"""accelerate's FSDP plugin with shardwise in the place of PyTorch's FSDP; a program for torchrun.

    torchrun --nproc-per-node=2 tests/fsdp/accelerate_run.py OUT [--version 1] [--engine torch]
        [--bf16]

Saves and loads a checkpoint after the third of six steps, and writes the losses and gradient norms
to OUT/ENGINE.json. The model is tiny and random.
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.fsdp.frameworks import replace_torch_fsdp

PARTS = 2  # micro-batches per step


def make_model() -> LlamaForCausalLM:
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
    return LlamaForCausalLM(config)


def make_accelerator(engine: str, version: int, bf16: bool) -> Accelerator:
    on_cpu = not torch.cuda.is_available()
    precision = "bf16" if bf16 else "no"
    common = {"cpu": on_cpu, "gradient_accumulation_steps": PARTS, "mixed_precision": precision}
    if engine == "ddp":
        return Accelerator(**common)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(**common, fsdp_plugin=plugin)
    if on_cpu:  # on a CPU, accelerate uses DDP regardless of the plugin
        if bf16:
            plugin.set_mixed_precision(precision)
        PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def main(out: Path, accelerator: Accelerator) -> list[tuple[float, float]]:
    """Train; return the loss and the gradient norm of each step."""
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    history = []
    for step in range(6):
        total = torch.zeros((), device=accelerator.device)
        for part in range(PARTS):
            seed = (step * PARTS + part) * accelerator.num_processes + accelerator.process_index
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(64, (4, 12), generator=generator).to(accelerator.device)
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                total += loss.detach() / PARTS
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        history.append((float(accelerator.reduce(total, "mean")), float(norm)))
        if step == 2:
            accelerator.save_state(str(out))
        if step == 3:  # undoes this step
            accelerator.load_state(str(out))
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", type=int, choices=[1, 2], default=2)
    parser.add_argument("--engine", choices=["shardwise", "torch", "ddp"], default="shardwise")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    accelerator = make_accelerator(options.engine, options.version, options.bf16)
    with contextlib.ExitStack() as stack:
        if options.engine == "shardwise":
            stack.enter_context(replace_torch_fsdp())
        history = main(options.out / options.engine, accelerator)
    if accelerator.is_main_process:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history))
    accelerator.end_training()
