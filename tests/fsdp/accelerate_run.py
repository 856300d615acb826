"""accelerate's FSDP plugin with shardwise in place of PyTorch's FSDP; a program for torchrun.

    torchrun --nproc-per-node=2 tests/fsdp/accelerate_run.py OUT [--version 1] [--engine torch]
        [--bf16]

Runs the loop of `examples/hf/accelerate_loop.py`, and writes the losses and gradient norms to
OUT/ENGINE.json.
"""

import argparse
import contextlib
import json
import os
import runpy
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType

from shardwise.fsdp.frameworks import replace_torch_fsdp

LOOP = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hf" / "accelerate_loop.py"))


def make_accelerator(engine: str, version: int, bf16: bool) -> Accelerator:
    on_cpu = not torch.cuda.is_available()
    precision = "bf16" if bf16 else "no"
    steps = LOOP["PARTS"]
    common = {"cpu": on_cpu, "gradient_accumulation_steps": steps, "mixed_precision": precision}
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
        history = LOOP["main"](options.out / options.engine, accelerator)
    if accelerator.is_main_process:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history))
    accelerator.end_training()
    if options.engine == "torch":  # whose threads once aborted the process at its end (SIGABRT)
        os._exit(0)
