"""``--memory``: settings that fit a budget."""

from pathlib import Path

import pytest
from torch import nn

from shardwise.errors import ConfigError, PlanError
from shardwise.train.build import build_model, forecast_model
from shardwise.train.config import Config, ModelConfig, ReplicasConfig, TrainConfig
from shardwise.train.planned import shared_settings
from shardwise.train.within import within
from tests.models import llama_config


def config_of(*, layers: int = 3, **train: object) -> Config:
    return Config(
        model=ModelConfig(layers=layers, heads=2, width=32, context=16),
        train=TrainConfig(global_batch=4, **train),  # type: ignore[arg-type]
    )


@pytest.mark.thorough
def test_less_memory_takes_smaller_batches_or_recomputes() -> None:
    large = within(config_of(), "1GB")
    assert large.memory.checkpoint_every == 0
    least = smallest(config_of())
    small = within(config_of(), str(least))
    assert small.num_micro_batches > 1 or small.memory.checkpoint_every
    with pytest.raises(PlanError, match="no configuration fits"):
        within(config_of(), str(int(0.95 * least)))


def test_optimizers_with_fewer_and_smaller_states_need_less_memory() -> None:
    names = ("sgd", "muon", "soap")
    least = [smallest(config_of(layers=2, optimizer=name)) for name in names]
    assert least == sorted(set(least))


@pytest.mark.thorough
def test_every_optimizer_of_the_trainer_has_a_budget() -> None:
    names = ("sgd", "sgd_momentum", "muon", "adamw", "radam", "soap")
    least = {name: smallest(config_of(optimizer=name)) for name in names}
    assert sorted(least, key=lambda name: least[name]) == list(least)
    assert least["adamw"] == least["radam"]
    momentum = config_of(optimizer="sgd", optimizer_options={"momentum": 0.9})
    assert smallest(momentum) == least["sgd_momentum"]


def smallest(config: Config) -> int:
    """Return the bytes of the smallest configuration."""
    with pytest.raises(PlanError, match="no configuration fits; the smallest needs") as raised:
        within(config, "1kB")
    return int(str(raised.value).split("smallest needs ")[1].split(" bytes")[0].replace(",", ""))


def test_adapters_are_counted_once_and_blocks_are_not_compiled(tmp_path: Path) -> None:
    llama_config(vocab_size=300).save_pretrained(str(tmp_path))
    model = {"path": str(tmp_path), "context": 16, "lora_rank": 4}
    train = {"global_batch": 4, "compile": True}
    tokenizer = {"vocabulary": 300}
    base = Config.model_validate({"model": model, "tokenizer": tokenizer, "train": train})
    built = forecast_model(base).build(shared_settings(base))
    assert num_trained(built) == num_trained(build_model(base))
    compiled = [one for one in built.modules() if one._compiled_call_impl is not None]
    assert compiled == []


def num_trained(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters() if one.requires_grad)


def test_the_batch_of_a_run_is_that_of_all_its_replicas() -> None:
    replicas = ReplicasConfig(lighthouse="http://localhost:1", count=2)
    found = within(config_of().model_copy(update={"replicas": replicas}), "1GB")
    assert found.train.global_batch == 4
    assert found.micro_batch * found.num_micro_batches == 1


def test_divided_layers_are_refused() -> None:
    config = config_of()
    shard = config.shard.model_copy(update={"nproc": 4, "tensor": 2})
    with pytest.raises(ConfigError, match=r"shard.tensor=2; .* --tensor 2 --config PLAN.toml"):
        within(config.model_copy(update={"shard": shard}), "1GB")
