"""The bytes of a rank, calculated by hand."""

import pytest

from shardwise.train.build import memory_of
from shardwise.train.config import Config

BLOCK = 12 * 32 * 32 + 2 * 32  # four matrices of attention, eight of the perceptron, two norms
ROOT = 256 * 32 + 32  # the embedding, which is the head too, and the last norm
MODEL = ROOT + 2 * BLOCK
FLOAT = 4


def test_one_process_holds_the_whole_model(config: Config) -> None:
    _, process = memory_of(config, "cuda")
    assert process["parameters"] == process["gradients"] == MODEL * FLOAT
    assert process["optimizer"] == 2 * MODEL * FLOAT
    assert process["transient"] == process["host"] == 0


def test_a_rank_holds_its_shards_and_the_gathered_units(config: Config) -> None:
    rank, _ = memory_of(config, "cuda")
    assert rank["parameters"] == rank["gradients"] == MODEL * FLOAT // 4
    assert rank["optimizer"] == 2 * MODEL * FLOAT // 4


@pytest.mark.parametrize(("offload", "near"), [("all", 0), ("optimizer", MODEL * FLOAT // 4)])
def test_offloaded_bytes_are_on_the_host(config: Config, offload: str, near: int) -> None:
    rank, _ = memory_of(with_section(config, "memory", offload=offload), "cuda")
    assert rank["host"] == 4 * MODEL * FLOAT // 4, "shards, gradients and two states"
    kept = sum(rank[name] for name in ("parameters", "gradients", "optimizer"))
    assert kept - rank["host"] == near


def with_section(config: Config, section: str, **changes: object) -> Config:
    changed = getattr(config, section).model_copy(update=changes)
    return config.model_copy(update={section: changed})


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_gathered_blocks_are_bounded_by_the_prefetch(config: Config, prefetch: int) -> None:
    """The root, its pending gradients, the gathered blocks and two reductions.

    There are eight blocks, which is more than any prefetch here gathers.
    """
    deep = with_section(with_section(config, "model", layers=8), "shard", prefetch=prefetch)
    rank, _ = memory_of(deep, "cuda")
    assert rank["transient"] == (2 * ROOT + (1 + prefetch + 2) * BLOCK) * FLOAT
