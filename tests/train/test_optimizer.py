"""The learning rate of each step, and what decays."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.config import TrainConfig
from shardwise.train.models import GPT, Shape
from shardwise.train.optimizer import build_optimizer, learning_rate, set_learning_rate

CONFIG = TrainConfig(steps=110, warmup_steps=10, lr=2.0, final_lr_share=0.1)


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.2), (5, 1.0), (10, 2.0), (60, 1.1), (110, 0.2)]
)
def test_it_rises_on_a_line_and_falls_on_a_cosine(step: int, expected: float) -> None:
    assert learning_rate(step, CONFIG) == pytest.approx(expected)


@given(st.integers(1, 50), st.integers(0, 49), st.floats(0, 0.9))
def test_it_never_leaves_its_bounds(steps: int, warmup_steps: int, share: float) -> None:
    config = TrainConfig(
        steps=steps, warmup_steps=min(warmup_steps, steps - 1), lr=1.0, final_lr_share=share
    )
    rates = [learning_rate(step, config) for step in range(1, steps + 1)]
    peak = max(config.warmup_steps, 1)
    assert max(rates) == pytest.approx(max(rates[peak - 1 : peak + 1]))
    assert max(rates) <= 1.0 + 1e-12
    assert rates[-1] == pytest.approx(share)
    assert rates[: peak - 1] == sorted(rates[: peak - 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_matrices_decay_and_norms_do_not() -> None:
    model = GPT(Shape(vocabulary=10, context=4, width=8, layers=1, heads=2))
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


def test_the_rate_reaches_every_group() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 2))]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=1.0)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
