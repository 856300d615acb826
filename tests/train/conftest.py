"""The configuration and the plan of a run, without ranks."""

import pytest

from shardwise.forecast.planned import plan_of
from shardwise.plan.plan import Plan
from shardwise.train.build import build_model
from shardwise.train.config import Config
from shardwise.train.planned import configuration_of


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
    return plan_of(build_model(config), configuration_of(config))
