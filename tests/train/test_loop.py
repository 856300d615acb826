"""Losses do not depend on ranks, strategy or [memory], and only a little on [precision]."""

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train import trainer
from shardwise.train.build import check
from shardwise.train.config import Config, DataConfig, ReplicasConfig
from shardwise.train.loop import train
from shardwise.train.replicas import Replicas
from shardwise.train.run_directory import RunDirectory
from shardwise.train.sinks import StepMetrics
from shardwise.train.trainer import Trainer
from tests.covering import leaving
from tests.ranks import run_on
from tests.train.running import Document, Recorder, config_with, cpu_world

UNCLIPPED: dict[str, Any] = {"train": {"grad_clip": 0.0}}
OPTIONS: dict[str, dict[str, Any]] = {
    "step in backward": {"memory": {"step_in_backward": True}},
    "step in backward, whole gradients, on the host": {
        "memory": {"step_in_backward": True, "accumulate": "whole", "offload": "all"},
        "train": {"micro_batch": 1},
    },
    "activations on the host": {"memory": {"activations": "host", "offload": "optimizer"}},
    "data workers": {"data": {"workers": 2}},
    "products": {"memory": {"checkpoint_every": 1, "checkpoint": "products"}},
    "selective": {"memory": {"checkpoint_every": 2, "checkpoint": "selective"}},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    return path


@pytest.fixture(scope="module")
def plain(text: Path) -> list[StepMetrics]:
    """The records of a run on two ranks with the defaults."""
    return _run(text)


@pytest.fixture(scope="module")
def unclipped(text: Path) -> list[StepMetrics]:
    """The records of a run without clipping, which ``memory.step_in_backward`` requires."""
    return _run(text, UNCLIPPED)


OTHER_RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "4 ranks": (4, {}),
    "hfsdp": (4, {"shard": {"strategy": "hfsdp", "replicas": 2}}),
    "ddp": (2, {"shard": {"strategy": "ddp"}}),
    "zero1, checkpointing, whole gradients": (
        2,
        {
            "shard": {"strategy": "zero1"},
            "train": {"micro_batch": 1},
            "memory": {"accumulate": "whole", "checkpoint_every": 1},
        },
    ),
}


@pytest.mark.parametrize("name", leaving(("4 ranks", "ddp"), OTHER_RANKS))
def test_losses_do_not_depend_on_ranks_and_strategy(
    text: Path, plain: list[StepMetrics], name: str
) -> None:
    num_ranks, changes = OTHER_RANKS[name]
    other = _run(text, changes, num_ranks=num_ranks)
    assert _losses(other) == pytest.approx(_losses(plain), rel=1e-5)
    assert other[-1].validation_loss == pytest.approx(plain[-1].validation_loss, rel=1e-5)


def test_bfloat16_has_nearly_the_same_losses(text: Path, plain: list[StepMetrics]) -> None:
    half = _run(text, {"precision": {"compute": "bfloat16"}})
    assert _losses(half) == pytest.approx(_losses(plain), rel=0.02)
    assert _losses(half) != _losses(plain)


@pytest.mark.parametrize("name", leaving(("step in backward", "selective"), OPTIONS))
def test_losses_equal_those_of_a_plain_run(
    text: Path, unclipped: list[StepMetrics], name: str
) -> None:
    changed = _run(text, UNCLIPPED, OPTIONS[name])
    losses = _losses(unclipped)
    assert losses[-1] < losses[0] - 0.5
    assert _losses(changed) == pytest.approx(losses, rel=1e-5)
    in_backward = "step in backward" in name
    assert all((record.grad_norm is None) == in_backward for record in changed)


def test_float16_skips_steps_until_its_loss_scale_fits(
    text: Path, plain: list[StepMetrics]
) -> None:
    half = _run(text, {"precision": {"compute": "float16"}})
    assert all(record.loss_scale is None for record in plain)
    scales = [record.loss_scale for record in half]
    assert all(scale is not None and 1 <= scale <= 2**16 for scale in scales)
    assert half[-1].loss == pytest.approx(plain[-1].loss, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({}, "set train.grad_clip=0"),
        (UNCLIPPED | {"precision": {"compute": "float16"}}, "set precision.compute=bfloat16"),
        (
            {"train": {"grad_clip": 0.0, "micro_batch": 1, "global_batch": 4}},
            "set memory.accumulate=whole",
        ),
    ],
)
def test_a_step_in_backward_rejects_options_that_need_all_gradients(
    text: Path, changes: dict[str, Any], way_out: str
) -> None:
    config = _config(text, changes, {"memory": {"step_in_backward": True}})
    with pytest.raises(ConfigError, match=way_out):
        check(config)


def _config(text: Path, *layers: dict[str, Any]) -> Config:
    document: Document = {
        "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
        "data": {"path": str(text)},
        "train": {"steps": 8, "warmup_share": 0.0, "global_batch": 4, "validation_batches": 0},
        "sample": {"bytes": 0},
        "checkpoint": {"every": 0},
    }
    return config_with(document, *layers)


def _run(text: Path, *layers: dict[str, Any], num_ranks: int = 2) -> list[StepMetrics]:
    config = _config(text, *layers).with_ranks(num_ranks)
    return run_on(num_ranks, _train, config)[0]


def _losses(records: list[StepMetrics]) -> list[float]:
    return [record.loss for record in records]


def _train(config: Config) -> list[StepMetrics]:
    recorder = Recorder()
    train(config, cpu_world(), RunDirectory(Path(config.data.path).parent), [recorder])
    return recorder.records


def _train_as_one_of_two(config: Config) -> list[StepMetrics]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replicas, "metrics", lambda _self: {"replicas": 2, "goodput": 1.0})
        patch.setattr(trainer, "share_of_peak", lambda *_: 1e-6)
        return _train(config)


def test_mfu_is_that_of_the_devices_of_one_replica(text: Path) -> None:
    """The tokens of all replicas are counted in tokens/s."""
    replicas = ReplicasConfig.model_construct(**{**ReplicasConfig().model_dump(), "count": 2})
    config = _config(text, {"train": {"steps": 2}}).with_ranks(1)
    config = config.model_copy(update={"replicas": replicas})
    for record in run_on(1, _train_as_one_of_two, config)[0]:
        assert record.mfu == pytest.approx(record.tokens_per_second / 2 * 1e-6)


def test_validation_counts_no_sequence_twice(text: Path) -> None:
    """More batches than there are sequences are those of validation_batches=0."""
    every = _run(text, num_ranks=1)[-1].validation_loss
    more = _run(text, {"train": {"validation_batches": 1000}}, num_ranks=1)[-1].validation_loss
    assert more == every


def _open_own(config: Config, other: str) -> str:
    world = cpu_world()
    if world.rank:
        config = config.model_copy(update={"data": DataConfig(path=other)})
    with pytest.raises((ConfigError, SystemExit)) as caught:
        Trainer(config, world)
    return str(caught.value)


def test_hosts_with_other_data_are_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text.read_text()[:-300])
    messages = run_on(2, _open_own, _config(text).with_ranks(2), str(tmp_path / "text"))
    assert re.search("rank 1: data.path=.*bytes to train on, but .* on rank 0", messages[0])
    assert messages[1] == "2"  # the exit code
