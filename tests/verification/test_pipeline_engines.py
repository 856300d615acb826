"""`sw.verify` checks pipelines: our stage is right, and FSDP2's zero-bubble error is found."""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.pipeline import PipelineStage
from tests.ranks import on_ranks

EXAMPLE = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "parallelism" / "judge_pipeline.py")
)
loss_of = EXAMPLE["loss_of"]
INTERLEAVED = pipelining.ScheduleInterleaved1F1B


class Dropping:
    """A loss that is zero for every other micro-batch."""

    num_calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        self.num_calls += 1
        return loss_of(output, target) * (self.num_calls % EXAMPLE["MICROBATCHES"])


def judge(engine: Any) -> sw.Verification:
    build, batch, loss_fn = EXAMPLE["subject"]()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    return sw.verify(build, batch, loss_fn=loss_fn, engine=engine, mesh=mesh, quiet=True)


def pipeline(shard: Any, stage: Any, schedule: Any, loss: Any = loss_of) -> Any:
    """Return an engine that runs a pipeline."""

    def engine(model: Any, mesh: Any, _units: Any) -> Any:
        return EXAMPLE["run_pipeline"](model, mesh, shard, stage, schedule, loss)

    return engine


def by_stage(stage: Any, mesh: Any) -> None:
    sw.fully_shard(stage, mesh=mesh)


@on_ranks(4)
def test_our_stage_is_right() -> None:
    for engine in (EXAMPLE["ours"], pipeline(by_stage, PipelineStage, INTERLEAVED)):
        found = judge(engine)
        assert found.ok, found.explanation


@on_ranks(4)
def test_the_error_of_fsdp2_with_zero_bubble_is_found_and_named() -> None:
    by_layer = EXAMPLE["shard_by_layer"]
    plain = judge(pipeline(by_layer, pipelining.PipelineStage, INTERLEAVED))
    assert plain.ok, plain.explanation
    found = judge(EXAMPLE["fsdp2"])
    cause = "is None, expected .* no backward reached it: .* a zero-bubble schedule requested"
    where = r"the gradient of \d\.\w+\.\w+ in step 0"
    with pytest.raises(sw.VerificationError, match=f"{where} {cause}"):
        found.raise_for_difference()


@on_ranks(4)
def test_a_dropped_micro_batch_is_named() -> None:
    engine = partial(pipeline, by_stage, PipelineStage, INTERLEAVED)
    found = judge(engine(Dropping()))
    cause = (
        "lacks (rows . to .) of part 0, \\1 of part 1 of the batch; possible causes: a dropped "
        "micro-batch, gradients that were reset .*, or rows that the loss leaves out"
    )
    with pytest.raises(sw.VerificationError, match=rf"the gradient of \d.* in step 0 {cause}"):
        found.raise_for_difference()
    loss = Dropping() if dist.get_rank() // 2 else loss_of
    found = judge(engine(loss))
    with pytest.raises(
        sw.VerificationError, match=r"step 0 lacks rows . to . of part 1 of the bat"
    ):
        found.raise_for_difference()
