"""``--memory``: settings that fit a budget."""

import pytest

from shardwise.errors import ConfigError, PlanError
from shardwise.train.config import Config, ModelConfig, TrainConfig
from shardwise.train.within import optimizer_of, within


def config_of(**train: object) -> Config:
    return Config(
        model=ModelConfig(layers=3, heads=2, width=32, context=16),
        train=TrainConfig(global_batch=4, **train),  # type: ignore[arg-type]
    )


@pytest.mark.thorough
def test_less_memory_takes_smaller_batches_or_recomputes() -> None:
    large = within(config_of(), "1GB")
    assert large.memory.checkpoint_every == 0
    with pytest.raises(PlanError, match="no configuration fits; the smallest needs") as raised:
        within(config_of(), "1kB")
    least = int(str(raised.value).split("smallest needs ")[1].split(" bytes")[0].replace(",", ""))
    small = within(config_of(), str(least))
    assert small.accumulates or small.memory.checkpoint_every
    with pytest.raises(PlanError, match="no configuration fits"):
        within(config_of(), str(int(0.95 * least)))


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory of train\.optimizer='radam' is not known"):
        within(config_of(optimizer="radam"), "1GB")


def test_momentum_of_sgd_is_counted() -> None:
    given: tuple[dict[str, float], ...] = ({}, {"momentum": 0.9})
    found = [
        optimizer_of(TrainConfig(optimizer="sgd", optimizer_options=options), "1GB")
        for options in given
    ]
    assert found == ["sgd", "sgd_momentum"]
