"""Tests that the states of each optimizer are those that the table lists."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.plan.optimizers import ASSUMED, OPTIMIZERS, State, optimizer_spec
from shardwise.train.config import TrainConfig
from shardwise.train.optimizer import build_optimizer, spec_of
from shardwise.verification.optimizers import names, optimizer_fn

TRAINABLE = [name for name, spec in OPTIMIZERS.items() if spec.path]
SIZE = 64
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TRAINABLE),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0}),
    ("adam", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
    ("adam8bit", {"block": 32}),
    ("adam8bit", {"state_bits": 32}),
    ("adam8bit", {"min_elements": 1 << 20}),
    ("muon", {"momentum": 0.5}),
    ("torch.optim:Adamax", {"eps": 1e-7}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_hidden_matrix_has_the_states_of_the_table(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(8, SIZE), nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, 8)
    )
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, optimizer_options=options))
    for _ in range(2):
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
    weight = model[1].weight
    assert isinstance(weight, Tensor)
    kept = optimizer.state[weight].items()
    states: dict[str, Tensor] = {key: value for key, value in kept if value is not None}
    states = {key: state for key, state in states.items() if state.dim()}
    spec = optimizer_spec(name, options)
    listed = spec.states
    if weight.numel() < spec.min_elements:
        listed = OPTIMIZERS[ASSUMED].states
    expected = sum(one.num_bytes(weight.numel(), 4) for one in listed)
    expected += spec.side_states * 2 * SIZE * SIZE * 4
    assert sum(state.nbytes for state in states.values()) == expected
    if ":" not in name:
        assert {one.name for one in listed} <= states.keys()


def test_a_name_is_the_same_everywhere() -> None:
    for name, spec in OPTIMIZERS.items():
        assert Configuration(optimizer=name).states == spec
    assert list(names()) == TRAINABLE
    for name in TRAINABLE:
        assert spec_of(TrainConfig(optimizer=name)) == OPTIMIZERS[name]
        assert optimizer_fn(name)(nn.Linear(4, 4).parameters())


def test_an_unknown_name_is_refused_everywhere() -> None:
    with pytest.raises(PlanError, match="did you mean 'adamw'"):
        Configuration(optimizer="adanw")
    with pytest.raises(ConfigError, match=r"train\.optimizer='adanw'.*did you mean 'adamw'"):
        spec_of(TrainConfig(optimizer="adanw"))
    with pytest.raises(ConfigError, match=r"'lion': there is no class that works on shards"):
        spec_of(TrainConfig(optimizer="lion"))
    with pytest.raises(ConfigError) as unknown:
        spec_of(TrainConfig(optimizer="adanw"))
    assert f"expected one of {', '.join(TRAINABLE)};" in str(unknown.value)


def test_blocks_start_in_each_row() -> None:
    state = State("exp_avg", "uint8", 1, block=32)
    assert state.num_bytes(480, 4, row=48) == 480 + 4 * 10 * 2, "two scales in each of ten rows"
    assert state.num_bytes(0, 4, row=48) == 0
    assert State("exp_avg").num_bytes(480, 2) == 960
