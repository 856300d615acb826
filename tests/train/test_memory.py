"""The bytes of a rank, calculated by hand."""

import pytest

from shardwise.plan.plan import Plan
from shardwise.train.build import build_model, build_plan, process_footprint, rank_footprint
from shardwise.train.config import Config

BLOCK = 12 * 32 * 32 + 2 * 32  # four matrices of attention, eight of the perceptron, two norms
ROOT = 256 * 32 + 32  # the embedding, which is the head too, and the last norm
MODEL = ROOT + 2 * BLOCK
FLOAT = 4


def test_one_process_holds_the_whole_model(plan: Plan, config: Config) -> None:
    footprint = process_footprint(plan, config)
    assert footprint.parameters == footprint.gradients == MODEL * FLOAT
    assert footprint.optimizer == 2 * MODEL * FLOAT
    assert footprint.total == 4 * MODEL * FLOAT


def test_a_rank_holds_its_shards_and_the_gathered_units(plan: Plan, config: Config) -> None:
    footprint = rank_footprint(plan, config, "cuda")
    assert footprint.parameters == footprint.gradients == MODEL * FLOAT // 4
    assert footprint.optimizer == 2 * MODEL * FLOAT // 4
    assert footprint.total == MODEL * FLOAT + footprint.transient


@pytest.mark.parametrize(("offload", "near"), [("all", 0), ("optimizer", MODEL * FLOAT // 4)])
def test_offloaded_bytes_are_on_the_host(config: Config, offload: str, near: int) -> None:
    config = with_memory(config, offload=offload)
    plan = build_plan(build_model(config), config)
    footprint = rank_footprint(plan, config, "cuda")
    assert footprint.host == 4 * MODEL * FLOAT // 4, "shards, gradients and two states"
    assert footprint.total - footprint.host == footprint.transient + near


def with_memory(config: Config, **changes: object) -> Config:
    memory = config.memory.model_copy(update=changes)
    return config.model_copy(update={"memory": memory})


def deep(config: Config, prefetch: int) -> Plan:
    """Eight blocks: more than any prefetch of the test gathers."""
    changed = {
        "model": config.model.model_copy(update={"layers": 8}),
        "shard": config.shard.model_copy(update={"prefetch": prefetch}),
    }
    config = config.model_copy(update=changed)
    return build_plan(build_model(config), config)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_gathered_blocks_are_bounded_by_the_prefetch(config: Config, prefetch: int) -> None:
    """The root, its pending gradients, the gathered blocks and two reductions."""
    plan = deep(config, prefetch)
    transient = rank_footprint(plan, config, "cuda").transient
    assert transient == (2 * ROOT + (1 + prefetch + 2) * BLOCK) * FLOAT
