"""The configuration of runs that are replicas: [replicas] and [outer]."""

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config import Config, read_config
from shardwise.train.replicas import check_replicas

pytest.importorskip("torchft", reason="torchft has wheels for Python 3.11 only")

ADDRESS = "http://a:1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 2}, r"count=2 needs a lighthouse; set replicas.lighthouse to http://host:port"),
        ({"minimum": 3, "count": 2, "lighthouse": ADDRESS}, "minimum=3: no step would ever count"),
        ({"number": 2, "count": 2, "lighthouse": ADDRESS}, "number=2: expected less than count=2"),
    ],
)
def test_replicas_without_a_lighthouse_or_a_number_are_refused(
    given: dict[str, Any], message: str
) -> None:
    overrides = [f"replicas.{key}={value}" for key, value in given.items()]
    with pytest.raises(ConfigError, match=message):
        read_config(None, overrides)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": {"lighthouse": "a:1"}}, "replicas.lighthouse='a:1': expected http://host"),
        ({"outer": {"every": 4, "dtype": "int5"}}, r"\[outer\]: .*expected one of int4"),
        ({"outer": {"every": 4, "fragments": 5}}, r"\[outer\]: Outer\(fragments=5\)"),
        ({"memory": {"step_in_backward": True}}, "memory.step_in_backward=true: replicas decide"),
        ({"precision": {"compute": "float16"}}, "set precision.compute=bfloat16"),
    ],
)
def test_keys_that_do_not_fit_replicas_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_replicas(Config.model_validate({"replicas": {"lighthouse": ADDRESS}} | given))


def test_local_steps_without_replicas_are_refused_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"outer\.every=4: .*set replicas\.lighthouse"):
        check_replicas(Config.model_validate({"outer": {"every": 4}}))


def test_the_batch_is_divided_among_the_ranks_of_all_replicas() -> None:
    replicas = {"lighthouse": ADDRESS, "count": 2}
    config = Config.model_validate({"replicas": replicas}).with_ranks(2)
    assert config.rank_batch == 4
    with pytest.raises(ConfigError, match="is not divisible by 6 ranks"):
        config.with_ranks(3)
