"""Replicas of a run that meet at a hub: [outer]."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.outer.serving import HubThread
from shardwise.train.config import Config, read_config
from shardwise.train.loop import steps
from shardwise.train.replica import check_outer
from shardwise.train.trainer import Trainer
from tests.ranks import run_on
from tests.train.running import cpu_world


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
    with pytest.raises(ConfigError, match="is not divisible by 6 ranks"):
        config.with_ranks(3)


@pytest.mark.thorough  # tests/outer/test_group.py tests this without the trainer
def test_a_replica_on_other_ranks_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """After step 5 of 9, shared parameters have momentum, and a difference is in transit."""
    text, saved = tmp_path / "text", tmp_path / "saved"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 200)

    def run(num_ranks: int, *, resumes: bool) -> list[float]:
        with HubThread() as hub:
            config = _config(text, hub.address).with_ranks(num_ranks)
            return run_on(num_ranks, _train, config, saved, resumes)[0]

    whole = run(2, resumes=False)
    assert len(whole) == 9
    assert run(1, resumes=True) == pytest.approx(whole[5:], rel=1e-5)


def _config(text: Path, hub: str) -> Config:
    outer = {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.25, "dtype": "float64"}
    document = {
        "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
        "data": {"path": str(text)},
        "train": {"steps": 9, "global_batch": 4, "validation_batches": 1},
        "outer": outer | {"hub": hub, "lr": 1.0},
    }
    return Config.model_validate(document)


def _train(config: Config, saved: Path, resumes: bool) -> list[float]:
    """The losses of a run that saves a checkpoint after step 5, or begins with it."""
    trainer = Trainer(config, cpu_world())
    if resumes:
        trainer.load(saved)
    losses = []
    with trainer.joined():
        for record in steps(trainer):
            losses.append(record.loss)
            if record.step == 5:
                trainer.save(saved).wait()
    return losses
