"""The bytes of a rank, by hand."""

from dataclasses import replace

import pytest

from shardwise.plan.plan import Plan
from shardwise.train.build import build_model, build_plan
from shardwise.train.config import Config
from shardwise.train.memory import foresee_gathered, one_process, one_rank

BLOCK = 12 * 32 * 32 + 2 * 32  # four matrices of attention, eight of the perceptron, two norms
ROOT = 256 * 32 + 32  # the embedding, which is the head too, and the last norm
MODEL = ROOT + 2 * BLOCK
FLOAT = 4


def test_one_process_holds_everything(plan: Plan) -> None:
    footprint = one_process(plan)
    assert footprint.parameters == footprint.gradients == MODEL * FLOAT
    assert footprint.optimizer == 2 * MODEL * FLOAT
    assert footprint.total == 4 * MODEL * FLOAT


def test_a_rank_holds_its_part_and_what_is_gathered(plan: Plan) -> None:
    footprint = one_rank(plan, gathered=1000)
    assert footprint.parameters == footprint.gradients == MODEL * FLOAT // 4
    assert footprint.optimizer == 2 * MODEL * FLOAT // 4
    assert footprint.total == MODEL * FLOAT + 1000 + footprint.reducing


def deep(config: Config, prefetch: int) -> Plan:
    """Eight blocks, so that no prefetch of the test holds them all."""
    changed = {
        "model": config.model.model_copy(update={"layers": 8}),
        "shard": config.shard.model_copy(update={"prefetch": prefetch}),
    }
    config = config.model_copy(update=changed)
    return build_plan(build_model(config), config)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_the_root_and_one_block_more_than_are_prefetched(config: Config, prefetch: int) -> None:
    plan = deep(config, prefetch)
    assert foresee_gathered(plan) == (ROOT + (1 + prefetch) * BLOCK) * FLOAT


def test_gradients_of_few_blocks_are_whole_at_once(config: Config) -> None:
    plan = deep(config, prefetch=1)
    reducing = one_rank(plan, gathered=0).reducing
    assert ROOT * FLOAT < reducing <= (ROOT + 3 * BLOCK) * FLOAT
    assert one_rank(replace(plan, prefetch=2), gathered=0).reducing == reducing
