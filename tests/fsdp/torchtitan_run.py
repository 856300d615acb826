"""torchtitan's own Trainer on its Llama-3 debug model, on CPU ranks: a program for torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node=4 -m tests.fsdp.torchtitan_run \
        {torch,shardwise} DIRECTORY [NAME=VALUE of torchtitan's parallelism ...]

Rank 0 writes the loss and gradient norm of each step to DIRECTORY/losses.json. To run on a CPU with
a released torch, these parts of torchtitan are replaced: the device and its memory statistics; flex
attention, whose backward needs a GPU, by causal attention; averages in Gloo, which lacks torch's
scaled sums, by sums; one timeout; the arguments of ``schedule.step``, which differ in torch's next
release; and the data, by random tokens.
"""

# ruff: noqa: PLC0415 - torchtitan looks for a GPU when it is imported
# mypy: disable-error-code="import-not-found"

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.pipelining import schedules
from torch.nn.functional import scaled_dot_product_attention

from shardwise.fsdp.frameworks import replace_torch_fsdp
from shardwise.pipeline import PipelineStage

SEQUENCE, VOCABULARY = 32, 2000


class Cpu:
    """`torch.cpu` with the functions that torchtitan calls on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_args: None)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 64

    def get_device_name(self, _device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, _device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 34, name="cpu")

    def memory_stats(self, _device: Any = None) -> dict[str, int]:
        return {}


def run_on_cpu(uses_torch: bool) -> None:
    """Import torchtitan, and replace the parts that need a GPU."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _kind: Cpu()  # type: ignore[assignment]
    dist.set_timeout = lambda *_args, **_options: None  # type: ignore[attr-defined]
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.distributed import (
        fsdp as titan_fsdp,
        pipeline_parallel,
        utils as distributed_utils,
    )
    from torchtitan.models.common import attention
    from torchtitan.tools import utils

    for module in (utils, distributed_utils):
        module.get_local_device = lambda: torch.device("cpu")
    attention._compiled_create_block_mask = create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(_attend)
    for kind in ("_PipelineSchedule", "PipelineScheduleSingle", "PipelineScheduleMulti"):
        setattr(getattr(schedules, kind), "step", _step)  # noqa: B010 - mypy minds assignments
    if uses_torch:
        titan_fsdp.disable_fsdp_gradient_division = _divide_by_one
    else:
        pipeline_parallel.PipelineStage = PipelineStage


def _attend(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, scale: Any, **_: Any) -> Any:
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa, scale=scale)
    return out, None


def _divide_by_one(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _step(
    self: Any,
    *,
    arg_mbs: Any = None,
    kwarg_mbs: Any = None,
    target_mbs: Any = None,
    losses: Any = None,
    loss_kwargs: Any = None,
    return_outputs: bool = False,
) -> None:
    """A step of a schedule on micro-batches."""
    for stage in getattr(self, "_stages", None) or [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(
        arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


class Tokens:
    """Random tokens that depend on the step and the data-parallel rank alone."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch, self.step = rank, batch, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
            self.step += 1
            shape = self.batch, SEQUENCE + 1
            tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
            positions = torch.arange(SEQUENCE).expand(self.batch, -1).contiguous()
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Built:
    """A part of the configuration that builds the result of a given function."""

    def __init__(self, build: Any) -> None:
        self.build = build

    def traverse(self, *_args: Any, **_options: Any) -> Iterator[Any]:
        return iter(())


def configuration(directory: Path, steps: int, options: dict[str, str]) -> Any:
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    training, parallelism = config.training, config.parallelism
    training.disable_cuda_graphs = True
    training.seq_len, training.local_batch_size, training.steps = SEQUENCE, 4, steps
    training.mixed_precision_param = training.mixed_precision_reduce = "float32"
    config.validator.enable = False
    config.debug.seed = 0
    config.dump_folder = str(directory)
    config.compile.backend = options.pop("compile", "")
    config.compile.enable = bool(config.compile.backend)
    config.checkpoint.enable = options.pop("checkpoint", "") == "yes"
    config.checkpoint.interval = 2
    config.tokenizer = Built(lambda **_: None)
    config.dataloader = Built(
        lambda *, dp_rank, local_batch_size, **_: Tokens(dp_rank, local_batch_size)
    )
    parallelism.spmd_backend = "partial_dtensor"
    for name, value in options.items():
        setattr(parallelism, name, type(getattr(parallelism, name))(value))
    type(config).to_dict = lambda _self: {}
    return config


def main(engine: str, directory: Path, *options: str) -> None:
    torch.set_num_threads(1)
    if engine == "shardwise":
        with replace_torch_fsdp():
            train(engine, directory, *options)
    else:
        train(engine, directory, *options)


def train(engine: str, directory: Path, *options: str) -> None:
    run_on_cpu(uses_torch=engine == "torch")
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    losses: list[tuple[int, float, float]] = []

    def log(_self: Any, step: int, loss: float, _worst: float, norm: Any, **_options: Any) -> None:
        losses.append((step, float(loss), float(norm)))

    MetricsProcessor.log = log
    chosen = dict(option.split("=") for option in options)
    steps = int(chosen.pop("steps", "3"))
    trainer = Trainer(configuration(directory, steps, chosen))
    trainer.train()
    if os.environ["RANK"] == os.environ.get("LOGS", "0"):
        (directory / "losses.json").write_text(json.dumps(losses))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
