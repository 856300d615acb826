"""The configuration and the plan of a run, without ranks."""

import pytest

from shardwise.plan.plan import Plan
from shardwise.train.build import build_model, build_plan
from shardwise.train.config import Config


@pytest.fixture
def config() -> Config:
    """A model of two blocks on four ranks."""
    return Config.model_validate(
        {
            "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
            "train": {"steps": 20, "warmup_share": 0.1},
            "shard": {"nproc": 4},
        }
    )


@pytest.fixture
def plan(config: Config) -> Plan:
    return build_plan(build_model(config), config)
