"""`sw.verify` judges pipelines: right with our stage, and FSDP2's zero-bubble error is found."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.pipeline import PipelineStage
from tests.ranks import on_ranks

WIDTH, MICROBATCHES, ROWS, NUM_STAGES = 6, 2, 8, 4


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh()
        return x + y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    return x, x.roll(step + 1, 1)


class Dropping:
    """The loss of every other micro-batch."""

    num_calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.num_calls += 1
        return loss_of(output, target) * (self.num_calls % MICROBATCHES)


class Pipeline:
    """An engine: two stages on each rank, which ``shard`` shards, run by a schedule."""

    def __init__(self, shard: Any, stage: Any, schedule: Any, loss: Any = loss_of) -> None:
        self.shard, self.stage, self.schedule, self.loss = shard, stage, schedule, loss

    def __call__(self, model: Any, mesh: DeviceMesh | None, _units: Any) -> Any:
        assert mesh is not None
        group, index = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
        own = {number: model[number] for number in (index, index + 2)}
        for module in own.values():
            self.shard(module, mesh=mesh["dp"])
        cpu = torch.device("cpu")
        stages = [self.stage(one, i, NUM_STAGES, cpu, group=group) for i, one in own.items()]
        schedule = self.schedule(stages, MICROBATCHES, loss_fn=self.loss)

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


def judge(engine: Pipeline) -> Any:
    return sw.verify(
        lambda: nn.Sequential(*(Stage() for _ in range(NUM_STAGES))),
        batch,
        loss_fn=lambda model, rows: loss_of(model(rows[0]), rows[1]),
        engine=engine,
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")),
        quiet=True,
    )


@on_ranks(4)
@pytest.mark.parametrize(
    "schedule", [pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleInterleavedZeroBubble]
)
def test_our_stage_is_right(schedule: Any) -> None:
    found = judge(Pipeline(sw.fully_shard, PipelineStage, schedule))
    assert found.ok, found.explanation


def by_layer(stage: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 with its defaults: units inside a stage are freed after forward."""
    for layer in (*stage.children(), stage):
        fsdp.fully_shard(layer, mesh=mesh)


@on_ranks(4)
def test_the_error_of_fsdp2_with_zero_bubble_is_found() -> None:
    schedule = pipelining.ScheduleInterleaved1F1B
    plain = judge(Pipeline(by_layer, pipelining.PipelineStage, schedule))
    assert plain.ok, plain.explanation
    zero_bubble = pipelining.ScheduleInterleavedZeroBubble
    found = judge(Pipeline(by_layer, pipelining.PipelineStage, zero_bubble))
    with pytest.raises(sw.VerificationError, match=r"the gradient of \d\.\w+\.\w+ in step 0"):
        found.raise_for_difference()


@on_ranks(4)
def test_a_dropped_micro_batch_is_named() -> None:
    schedule = pipelining.ScheduleInterleaved1F1B
    found = judge(Pipeline(sw.fully_shard, PipelineStage, schedule, Dropping()))
    cause = "lacks (rows . to .) of part 0, \\1 of part 1 of the batch: a dropped micro-batch"
    with pytest.raises(sw.VerificationError, match=rf"the gradient of \d.* in step 0 {cause}"):
        found.raise_for_difference()
    loss = Dropping() if dist.get_rank() // 2 else loss_of
    found = judge(Pipeline(sw.fully_shard, PipelineStage, schedule, loss))
    with pytest.raises(
        sw.VerificationError, match=r"step 0 lacks rows . to . of part 1 of the bat"
    ):
        found.raise_for_difference()
