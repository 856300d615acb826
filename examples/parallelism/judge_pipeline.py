"""Pipelines that `shardwise verify` checks, with a zero-bubble schedule.

    shardwise verify examples/parallelism/judge_pipeline.py:subject --mesh dp2,pp2 \
        --engine examples/parallelism/judge_pipeline.py:ours

``ours`` gives the results of one process. ``fsdp2``, PyTorch's FSDP2 with its defaults and
PyTorch's own stage, does not: the schedule computes gradients of weights that FSDP2 has sharded
again after forward, and gets none.

Each rank has two of four stages, and runs its rows as two micro-batches.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.pipeline import PipelineStage

WIDTH, MICROBATCHES, ROWS, NUM_STAGES = 6, 2, 8, 4


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh()
        return x + y


def build() -> nn.Module:
    return nn.Sequential(*(Stage() for _ in range(NUM_STAGES)))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks, both [rows, width]."""
    x = torch.randn(ROWS, WIDTH)
    return x, x.roll(step + 1, 1)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def subject() -> tuple[Any, ...]:
    return build, batch_of, lambda model, batch: loss_of(model(batch[0]), batch[1])


def run_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    shard: Callable[[nn.Module, DeviceMesh], object],
    stage_class: Any,
    schedule_class: Any = pipelining.ScheduleInterleavedZeroBubble,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
) -> Any:
    """Return this rank's stages, and a function that computes the gradients of its rows."""
    group, index = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    own = {number: model.get_submodule(str(number)) for number in (index, index + 2)}
    for module in own.values():
        shard(module, mesh["dp"])
    device = torch.device(mesh.device_type)
    stages = [stage_class(one, i, NUM_STAGES, device, group=group) for i, one in own.items()]
    schedule = schedule_class(stages, MICROBATCHES, loss_fn=loss_fn)

    def backward(_loss_fn: Any, rows: tuple[Tensor, Tensor]) -> float:
        x, y = rows
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(()).double()
        dist.all_reduce(loss, group=group)
        return float(loss)

    return nn.ModuleDict({str(number): one for number, one in own.items()}), backward


def shard_by_layer(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shard with FSDP2's defaults: units inside a stage are freed after forward."""
    for layer in (*stage.children(), stage):
        fsdp.fully_shard(layer, mesh=mesh)


def ours(model: nn.Module, mesh: DeviceMesh, _units: Any) -> Any:
    def shard(stage: nn.Module, data_parallel: DeviceMesh) -> None:
        sw.fully_shard(stage, mesh=data_parallel)

    return run_pipeline(model, mesh, shard, PipelineStage)


def fsdp2(model: nn.Module, mesh: DeviceMesh, _units: Any) -> Any:
    return run_pipeline(model, mesh, shard_by_layer, pipelining.PipelineStage)
