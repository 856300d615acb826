"""What a switch costs and saves, by hand."""

from shardwise.train.build import build_model
from shardwise.train.config import Config
from shardwise.train.switches import Figures, weigh
from tests.train.test_memory import BLOCK, FLOAT, MODEL, ROOT, with_memory

SHARD = MODEL * FLOAT // 4


def change(config: Config, device: str = "cuda") -> dict[str, Figures]:
    return {s.name: s.change for s in weigh(config, build_model(config), device)}


def test_defaults_are_not_told(config: Config) -> None:
    assert weigh(config, build_model(config), "cuda") == []


def test_offload_moves_shards_to_the_host(config: Config) -> None:
    changes = change(with_memory(config, offload="all"))
    assert list(changes) == ["memory.offload"]
    figures = changes["memory.offload"]
    assert figures.host_bytes == 4 * SHARD
    # Two reduced blocks more wait to be copied while the peak is held.
    assert -4 * SHARD < figures.device_bytes <= -4 * SHARD + 2 * BLOCK * FLOAT // 4
    root_and_last_block_once = ROOT + BLOCK
    brought = (root_and_last_block_once + 2 * BLOCK) * FLOAT // 4
    assert figures.copied_bytes == brought + SHARD
    assert figures.link_bytes == 0


def test_a_copy_on_the_device_is_brought_once(config: Config) -> None:
    figures = change(with_memory(config, offload="optimizer"))["memory.offload"]
    assert figures.copied_bytes == 2 * SHARD, "parameters there, gradients back"
    assert figures.device_bytes > -4 * SHARD


def test_half_the_bytes_on_the_links(config: Config) -> None:
    precision = config.precision.model_copy(update={"compute": "bfloat16", "norms": "compute"})
    figures = change(config.model_copy(update={"precision": precision}))["precision.compute"]
    gathers = (ROOT + 3 * BLOCK) * FLOAT
    assert figures.link_bytes == -gathers // 2


def test_whole_gradients_are_reduced_once(config: Config) -> None:
    train = config.train.model_copy(update={"global_batch": 16, "micro_batch": 1})
    config = config.model_copy(update={"train": train})
    figures = change(with_memory(config, accumulate="whole"))["memory.accumulate"]
    assert figures.link_bytes == -3 * MODEL * FLOAT, "three of four reductions"
    assert figures.device_bytes > 0


def test_blocks_that_run_twice(config: Config) -> None:
    figures = change(with_memory(config, checkpoint_every=2))["memory.checkpoint_every"]
    assert figures == Figures(0, 0, 0, 0, recomputed=0.5)
