"""The sections, their defaults and the batches that they allow."""

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from shardwise.errors import ConfigError
from shardwise.train.config import Config, TrainConfig, check_batch, read_config

DEFAULT = Path(__file__).parents[2] / "configs" / "stdlib.toml"


def test_the_default_file_is_valid_on_one_two_and_four_ranks() -> None:
    config = read_config(DEFAULT)
    assert [config.with_ranks(n).shard.nproc for n in (1, 2, 4)] == [1, 2, 4]


def test_the_default_file_has_every_key_with_its_default() -> None:
    assert read_config(DEFAULT) == Config()
    text = DEFAULT.read_text(encoding="utf-8")
    for section, values in Config().model_dump().items():
        assert f"[{section}]" in text
        for key in values:
            assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), f"{section}.{key}"


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().train.steps = 3


def test_a_micro_batch_of_0_is_the_batch_of_a_rank() -> None:
    config = Config.model_validate({"train": {"global_batch": 12}}).with_ranks(4)
    assert (config.rank_batch, config.micro_batch) == (3, 3)
    config = Config.model_validate({"train": {"global_batch": 12, "micro_batch": 2}}).with_ranks(2)
    assert (config.rank_batch, config.micro_batch) == (6, 2)


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "num_ranks", "way_out"),
    [
        (16, 0, 3, "set train.global_batch to 15 or 18"),
        (1, 0, 4, "set train.global_batch to 4"),
        (48, 8, 5, "set train.global_batch to 40 or 80"),
        (16, 8, 4, "set train.global_batch to 32, or train.micro_batch to 4"),
        (6, 4, 2, "set train.global_batch to 8, or train.micro_batch to 3"),
    ],
)
def test_an_indivisible_batch_names_the_nearest_divisible_ones(
    global_batch: int, micro_batch: int, num_ranks: int, way_out: str
) -> None:
    train = TrainConfig(global_batch=global_batch, micro_batch=micro_batch)
    with pytest.raises(ConfigError, match=f"{re.escape(way_out)}$"):
        check_batch(train, num_ranks)


@given(st.integers(1, 200), st.integers(0, 40), st.integers(1, 16))
def test_the_proposed_batches_are_valid(
    global_batch: int, micro_batch: int, num_ranks: int
) -> None:
    train = TrainConfig(global_batch=global_batch, micro_batch=micro_batch)
    try:
        check_batch(train, num_ranks)
    except ConfigError as error:
        ways_out = re.findall(r"train\.(\w+_batch) to (\d+)(?: or (\d+))?", str(error))
        assert ways_out
        for key, *numbers in ways_out:
            for number in filter(None, numbers):
                check_batch(train.model_copy(update={key: int(number)}), num_ranks)
    else:
        assert global_batch % (num_ranks * max(micro_batch, 1)) == 0


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_at_least_one_rank(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 or more ranks"):
        Config().with_ranks(num_ranks)
