"""Checkpoints do not depend on the ranks and strategy that wrote them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.checkpoint.training import (
    Training,
    differing,
    digests,
    load_wide,
    options_for,
    save_wide,
)
from tests.models import CASES
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import rank

HOPS = [(4, "fsdp"), (3, "zero2"), (1, "ddp"), (4, "hsdp"), (2, "fsdp")]
SMALL = 100  # bytes: several files
VARIATIONS: dict[str, dict[str, Any]] = {
    "zero2": {"units": None},
    "hsdp": {"granularity": "row", "prefetch": 2},
}


@pytest.mark.parametrize(
    "name",
    ["conv", "mixed dtypes"]
    + [pytest.param(name, marks=pytest.mark.thorough) for name in ("tiny", "gpt")],
)
def test_every_hop_keeps_every_bit_and_every_file(name: str, tmp_path: Path) -> None:
    assert name in CASES
    run_on(*HOPS[0][:1], _begin, name, HOPS[0][1], tmp_path / "0")
    expected = digests(tmp_path / "0")
    assert len(expected) > 3, "not split"
    for number, (ranks, strategy) in enumerate(HOPS[1:], start=1):
        path = tmp_path / str(number)
        assert run_on(ranks, _hop, name, strategy, tmp_path / str(number - 1), path) == [[]] * ranks
        assert digests(path) == expected, f"{strategy} on {ranks} ranks wrote other bytes"


@on_ranks(2)
def test_training_resumes_with_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted = Training("gpt")
    uninterrupted.step(0)
    sw.save(tmp_path / "x", model=uninterrupted.model, optimizer=uninterrupted.optimizer)
    uninterrupted.step(1)
    resumed = Training("gpt", seed=3, strategy="fsdp")
    resumed.step(7)
    sw.load(tmp_path / "x", model=resumed.model, optimizer=resumed.optimizer)
    resumed.step(1)
    assert differing(uninterrupted.bits(), resumed.bits()) == []


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, "zero2"), pytest.param(4, "hfsdp", marks=pytest.mark.thorough), (4, "hsdp")],
)
def test_checksums_of_blocks_that_ranks_share(ranks: int, strategy: str, tmp_path: Path) -> None:
    """Parameters larger than a block, with boundaries inside blocks; replicas divide them."""
    run_on(ranks, save_wide, 613, strategy, tmp_path / "x")
    run_on(1, save_wide, 613, "ddp", tmp_path / "y")
    assert digests(tmp_path / "x") == digests(tmp_path / "y")
    run_on(3, load_wide, 613, tmp_path / "x")


def test_modules_schedulers_and_plain_data_are_restored(tmp_path: Path) -> None:
    run_on(2, _save_state, tmp_path / "x")
    run_on(3, _load_state, tmp_path / "x")


def _begin(name: str, strategy: str, path: Path) -> None:
    training = Training(name, **options_for(strategy))
    for number in range(2):
        training.step(number)
    training.optimizer.param_groups[0]["lr"] = 0.03125
    sw.save(path, model=training.model, optimizer=training.optimizer, max_file_bytes=SMALL)


def _hop(name: str, strategy: str, source: Path, path: Path) -> list[str]:
    """Load and save; return the names of the tensors that changed."""
    options = {**options_for(strategy), **VARIATIONS.get(strategy, {})}
    training = Training(name, seed=5, **options)
    loaded = sw.load(source, model=training.model, optimizer=training.optimizer)
    assert loaded.bytes_read == training.own_bytes()
    assert not str(loaded.report)
    sw.save(path, model=training.model, optimizer=training.optimizer, max_file_bytes=SMALL)
    again = Training(name, seed=6, **options)
    again.step()  # its states are overwritten
    sw.load(path, model=again.model, optimizer=again.optimizer)
    return differing(training.bits(), again.bits())


def _averaged(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    average = partial(torch.optim.swa_utils.get_ema_multi_avg_fn, 0.5)()
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)


def _save_state(path: Path) -> None:
    training = Training("gpt")
    ema = _averaged(training.model)
    training.step()
    ema.update_parameters(training.model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [1, 5])
    scheduler.step()
    sw.save(
        path,
        model=training.model,
        optimizer=training.optimizer,
        ema=ema,
        scheduler=scheduler,
        cursor={"file": 3, "at": (7, 0.5)},
        rng=torch.get_rng_state() if rank() == 0 else torch.zeros(5056, dtype=torch.uint8),
    )
    expected = {name: x.full_tensor() for name, x in ema.named_parameters()}  # type: ignore[attr-defined]
    if rank() == 0:
        torch.save((expected, scheduler.state_dict(), torch.get_rng_state()), path / "expected.pt")


def _load_state(path: Path) -> None:
    training = Training("gpt", seed=4)
    ema = _averaged(training.model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [2, 3])
    loaded = sw.load(path, model=training.model, ema=ema, scheduler=scheduler)
    expected, schedule, random_state = torch.load(path / "expected.pt", weights_only=False)
    for name, parameter in ema.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name])  # type: ignore[attr-defined]
    assert scheduler.state_dict() == schedule
    assert loaded.state["cursor"] == {"file": 3, "at": (7, 0.5)}
    assert torch.equal(loaded.state["rng"], random_state)
    assert set(loaded.state) == {"cursor", "rng"}
