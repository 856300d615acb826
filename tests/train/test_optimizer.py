"""The schedule of the learning rate, and the groups of weight decay."""

import pytest
import torch
from hypothesis import given, strategies as st

from shardwise.train.build import build_optimizer, build_scheduler
from shardwise.train.config import TrainConfig
from shardwise.train.model import GPT, Shape

CONFIG = TrainConfig(steps=110, warmup_steps=10, lr=2.0, final_lr_share=0.1)


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
    ("step", "expected"), [(1, 0.2), (5, 1.0), (10, 2.0), (60, 1.1), (110, 0.2)]
)
def test_linear_warm_up_and_cosine_decay(step: int, expected: float) -> None:
    assert rates(CONFIG)[step - 1] == pytest.approx(expected)


@pytest.mark.parametrize("after", [1, 9, 10, 57, 109])
def test_a_resumed_schedule_has_the_same_bits(after: int) -> None:
    assert rates(CONFIG, after=after) == rates(CONFIG)[after:]


@given(st.integers(1, 50), st.integers(0, 49), st.floats(0, 0.9))
def test_the_rate_stays_within_its_bounds(steps: int, warmup_steps: int, share: float) -> None:
    config = TrainConfig(
        steps=steps, warmup_steps=min(warmup_steps, steps - 1), lr=1.0, final_lr_share=share
    )
    found = rates(config)
    peak = max(config.warmup_steps, 1)
    assert max(found) == pytest.approx(max(found[peak - 1 : peak + 1]))
    assert max(found) <= 1.0 + 1e-12
    assert found[-1] == pytest.approx(share)
    assert found[: peak - 1] == sorted(found[: peak - 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


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
