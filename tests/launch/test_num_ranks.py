"""The number of local ranks of a command, with and without GPUs."""

from typing import Any

import pytest

from shardwise.bench import harness
from shardwise.cli import run_verify
from shardwise.errors import ConfigError
from shardwise.launch import local
from shardwise.train import run
from shardwise.train.config import read_config

REFUSAL = r"this machine has 1 GPU\(s\)"


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in (local, harness):
        monkeypatch.setattr(module, "num_local_accelerators", lambda: count)


def _ranks_of_train(monkeypatch: pytest.MonkeyPatch, nproc: int | None, settings: list[str]) -> int:
    started: list[int] = []

    def check_and_note(config: Any) -> None:
        local.check_num_ranks(config.shard.nproc, "shard.nproc")
        started.append(config.shard.nproc)

    monkeypatch.setattr(run, "launch", check_and_note)
    run.run(read_config(None, settings), nproc)
    return started[0]


def _ranks_of_verify(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    started: list[int] = []

    def note(num_ranks: int, *_args: Any) -> list[None]:
        started.append(num_ranks)
        return []

    monkeypatch.setattr(run_verify, "run_on_local_ranks", note)
    nproc = options.pop("nproc", None)
    run_verify.run_verify(run_verify.VerifyOptions("gpt", None, 2, None, **options), nproc)
    return started[0]


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (8, 8)])
def test_by_default_a_rank_for_each_gpu_or_two_on_cpus(
    gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpus(monkeypatch, gpus)
    assert _ranks_of_train(monkeypatch, None, []) == ranks
    assert _ranks_of_verify(monkeypatch) == ranks


def test_an_explicit_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 8)
    assert _ranks_of_train(monkeypatch, 4, []) == 4
    assert _ranks_of_train(monkeypatch, None, ["shard.nproc=2"]) == 2
    assert _ranks_of_train(monkeypatch, 4, ["shard.nproc=2"]) == 4
    assert _ranks_of_verify(monkeypatch, nproc=4) == 4
    assert _ranks_of_verify(monkeypatch, engine="ddp", mesh="dp2") == 2


def test_an_explicit_number_above_that_of_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match=REFUSAL):
        _ranks_of_train(monkeypatch, None, ["shard.nproc=2"])
    with pytest.raises(ConfigError, match=REFUSAL):
        _ranks_of_verify(monkeypatch, nproc=2)


def test_bench_names_the_program_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 1)
    with pytest.raises(
        ConfigError, match=r"on CPU ranks.*CUDA_VISIBLE_DEVICES=''.*benchmarks\.gpu"
    ):
        harness.check_place()
