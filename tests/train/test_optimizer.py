"""Optimizers by name, learning rate schedules and weight decay."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.train.config import TrainConfig
from shardwise.train.model import GPT, gpt_shape
from shardwise.train.optimizer import build_optimizer, build_scheduler, check_optimizer

CONFIG = TrainConfig(steps=100, warmup_share=0.1, lr=2.0, final_lr_share=0.1)


def rates(config: TrainConfig, *, after: int = 0) -> list[float]:
    """The learning rate of each step after ``after``."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=123.0)  # as if loaded from a checkpoint
    scheduler = build_scheduler(optimizer, config, after=after)
    found = []
    for _ in range(after, config.steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.2), (5, 1.0), (10, 2.0), (55, 1.1), (100, 0.2)]
)
def test_linear_warm_up_and_cosine_decay(step: int, expected: float) -> None:
    assert rates(CONFIG)[step - 1] == pytest.approx(expected)


@pytest.mark.parametrize("after", [1, 9, 10, 57, 99])
def test_a_resumed_schedule_has_the_same_bits(after: int) -> None:
    assert rates(CONFIG, after=after) == rates(CONFIG)[after:]


@given(st.integers(1, 50), st.floats(0, 0.99), st.floats(0, 0.9))
def test_the_rate_stays_within_its_bounds(steps: int, warmup: float, share: float) -> None:
    config = TrainConfig(steps=steps, warmup_share=warmup, lr=1.0, final_lr_share=share)
    assert config.warmup_steps < steps
    found = rates(config)
    peak = max(config.warmup_steps, 1)
    assert max(found) == pytest.approx(max(found[peak - 1 : peak + 1]))
    assert max(found) <= 1.0 + 1e-12
    assert found[-1] == pytest.approx(share)
    assert found[: peak - 1] == sorted(found[: peak - 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_matrices_decay_and_norms_do_not() -> None:
    model = GPT(gpt_shape(vocabulary=10, context=4, width=8, layers=1, heads=2))
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.3, betas=(0.8, 0.9)))
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.3), name
    assert optimizer.defaults["fused"]
    assert optimizer.defaults["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("wsd", [1.0, 1.0, 1.0, 0.0]),
        ("math:sqrt", [0.5, 0.5**0.5, 0.75**0.5, 1.0]),
    ],
)
def test_a_schedule_has_a_name(schedule: str, expected: list[float]) -> None:
    config = TrainConfig(schedule=schedule, steps=4, warmup_share=0, lr=1.0, final_lr_share=0)
    assert rates(config) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adanw"}, "did you mean 'adamw'"),
        ({"optimizer": "torch.optim:Nothing"}, "train.optimizer='torch.optim:Nothing'"),
        ({"optimizer_options": {"momentun": 0.9}}, "train.optimizer_options.*momentun"),
        ({"optimizer_options": {"weight_decay": 1}}, "set train.weight_decay instead"),
        ({"optimizer": "muon", "optimizer_options": {"lr": 1.0}}, "set train.lr instead"),
        ({"schedule": "cosin"}, "train.schedule='cosin' is not known; did you mean 'cosine'"),
        ({"schedule": "math:log"}, "train.schedule='math:log': .* step 21 would be -5.07"),
        ({"schedule": "math:comb"}, "train.schedule='math:comb': .*expected 2 arguments"),
    ],
)
def test_an_unknown_name_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optimizer(TrainConfig.model_validate(changes))


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_optimizers_of_matrices_take_groups_and_options(name: str) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 12), nn.Linear(4, 7))
    options = {"split": {"1.weight": 3}, "eps": 1e-5, "weight_decay": 0.25}
    config = TrainConfig(optimizer=name, optimizer_options=options, lr=0.5, weight_decay=0.1)
    check_optimizer(config)
    optimizer = build_optimizer(model, config)
    groups = {tuple(map(id, group["params"])): group for group in optimizer.param_groups}
    matrices = groups[(id(model[1].weight),)]
    assert (matrices["method"], matrices["split"], matrices["eps"]) == (name, 3, 1e-5)
    gpt = GPT(gpt_shape(vocabulary=10, context=4, width=8, layers=1, heads=2))
    assert build_optimizer(gpt, TrainConfig(optimizer=name)).param_groups[0]["params"]
    decays = {group["method"]: group["weight_decay"] for group in groups.values()}
    assert decays == {name: 0.25, "adamw": 0.0}, "of vectors last"
    with pytest.raises(ConfigError, match=r"'2\.bias\.x' matches no parameter"):
        build_optimizer(
            model, config.model_copy(update={"optimizer_options": {"others": ["2.bias.x"]}})
        )


def test_8_bit_adam_is_built_by_name() -> None:
    config = TrainConfig(optimizer="adam8bit", weight_decay=0.25)
    check_optimizer(config)
    optimizer = build_optimizer(nn.Linear(64, 64), config)
    assert isinstance(optimizer, sw.optim.Adam8bit)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
