"""Replicas of a run that meet at a hub: [outer]."""

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config import Config, read_config
from shardwise.train.replica import check_outer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 2}, r"replicas=2 need a hub; set outer.hub to host:port"),
        ({"replica": 2, "replicas": 2, "hub": "a:1"}, "replica=2: expected less than replicas=2"),
    ],
)
def test_replicas_without_a_hub_or_a_number_are_refused(
    given: dict[str, Any], message: str
) -> None:
    overrides = [f"outer.{key}={value}" for key, value in given.items()]
    with pytest.raises(ConfigError, match=message):
        read_config(None, overrides)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outer": {"hub": "a"}}, "outer.hub='a': expected host:port"),
        ({"outer": {"hub": "a:1", "dtype": "int5"}}, r"\[outer\]: .*expected one of int4"),
        ({"outer": {"hub": "a:1", "fragments": 33}}, r"\[outer\]: Outer\(fragments=33\)"),
        (
            {"outer": {"hub": "a:1"}, "memory": {"step_in_backward": True}},
            "memory.step_in_backward=true: replicas synchronize after",
        ),
        (
            {"outer": {"hub": "a:1"}, "precision": {"compute": "float16"}},
            "set precision.compute=bfloat16",
        ),
    ],
)
def test_keys_that_do_not_fit_replicas_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_outer(Config.model_validate(given))


def test_the_batch_is_divided_among_the_ranks_of_all_replicas() -> None:
    config = Config.model_validate({"outer": {"hub": "a:1", "replicas": 2}}).with_ranks(2)
    assert config.rank_batch == 4
    with pytest.raises(ConfigError, match="does not divide into 6 ranks"):
        config.with_ranks(3)
