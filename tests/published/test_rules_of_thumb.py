"""Compares rules of thumb with the packages that define them."""

import pytest
import torch
from benchmarks.published.rules_of_thumb import (
    Rule,
    accelerate_bytes,
    deepspeed_stage2_bytes,
    deepspeed_stage3_bytes,
    memory_rule,
)

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.models.model import known_models, resolve_model


@pytest.mark.thorough
@pytest.mark.parametrize("name", known_models())
def test_accelerate_estimates_the_same_bytes(name: str) -> None:
    estimate = pytest.importorskip("accelerate.commands.estimate")
    parameters = resolve_model(name).num_parameters
    for dtype, word in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        parts = estimate.estimate_training_usage(4 * parameters, word)
        assert accelerate_bytes(parameters, dtype) == max(parts.values())


def test_each_strategy_has_the_estimator_of_its_stage() -> None:
    """DeepSpeed 0.17.0 gives these figures for 7e9 parameters and a largest layer of 1e8."""
    assert deepspeed_stage3_bytes(7_000_000_000, 100_000_000, 64) == 2_368_750_000
    assert deepspeed_stage2_bytes(7_000_000_000, 64) == 15_968_750_000
    found = {
        one.strategy: dict(memory_rule(1000, 100, one))
        for one in (
            Configuration(strategy="fsdp", shard_size=4),
            Configuration(strategy="zero2", shard_size=4),
            Configuration(strategy="ddp", replicas=4),
        )
    }
    assert found["fsdp"] == {Rule.ACCELERATE: 8000, Rule.DEEPSPEED: 4900}
    assert found["zero2"] == {Rule.ACCELERATE: 8000, Rule.DEEPSPEED: 6500}
    assert found["ddp"] == {Rule.ACCELERATE: 8000}
