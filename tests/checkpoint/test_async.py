"""A save beside the training: of what was there when it was called, one at a time."""

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.save import Save
from tests.checkpoint.training import Training, differing, digests
from tests.ranks import run_on
from tests.runtime.one_process import rank


def test_it_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    run_on(2, _save_and_step, tmp_path)
    assert digests(tmp_path / "beside") == digests(tmp_path / "at once")


def test_the_next_call_waits_for_it(tmp_path: Path) -> None:
    run_on(2, _save_in_a_row, tmp_path)


def test_its_error_surfaces_at_the_next_call(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    (tmp_path / "taken").write_bytes(b"")
    failed = sw.save(tmp_path / "taken", model=model, wait=False)
    with pytest.raises(sw.CheckpointError, match="taken"):
        sw.save(tmp_path / "x", model=model)
    failed.wait()  # has been said
    sw.save(tmp_path / "x", model=model)
    sw.load(tmp_path / "x", model=model)


def test_an_error_that_nobody_asked_for_is_a_warning() -> None:
    def fail() -> None:
        raise sw.CheckpointError("no room")

    with pytest.warns(UserWarning, match="the save to somewhere failed: no room"):
        _start_and_drop(fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = Save(Path("somewhere"), fail)
        asked.run()
        with pytest.raises(sw.CheckpointError, match="no room"):
            asked.wait()
        del asked


def test_writing_is_beside_the_caller(tmp_path: Path) -> None:
    """While the writer waits for another, the caller has its hands free."""
    model = nn.Linear(2, 3)
    gate = threading.Event()
    pending = Save(tmp_path, lambda: _pass(gate))
    pending.start()
    assert not pending.is_done
    nn.init.zeros_(model.weight)
    gate.set()
    pending.wait()
    assert pending.is_done


def _start_and_drop(job: Callable[[], None]) -> None:
    dropped = Save(Path("somewhere"), job)
    dropped.start()
    while not dropped.is_done:
        time.sleep(0.01)


def _pass(gate: threading.Event) -> None:
    assert gate.wait(20)


def ballast() -> torch.Tensor:
    """Written before the model, by name, and long enough for some steps to pass meanwhile."""
    return torch.zeros(1 << 25, dtype=torch.uint8)


def _save_and_step(folder: Path) -> None:
    training = Training("conv")
    training.step()
    everything = {
        "model": training.model,
        "optimizer": training.optimizer,
        "ballast": ballast(),
        "at": {"step": 1},
    }
    sw.save(folder / "at once", **everything)  # type: ignore[arg-type]
    pending = sw.save(folder / "beside", wait=False, **everything)  # type: ignore[arg-type]
    for number in range(3):
        training.step(number)
    pending.wait()
    assert pending.is_done


def _save_in_a_row(folder: Path) -> None:
    training = Training("gpt")
    for number in range(4):
        training.step(number)
        time.sleep(0.01 * rank())
        sw.save(folder / f"step-{number}", model=training.model, wait=False)
        if number:
            assert (folder / f"step-{number - 1}" / "checkpoint.json").exists()
    expected = training.bits()
    sw.save(folder / "step-4", model=training.model, wait=False, ballast=ballast())
    other = Training("gpt", seed=2)
    sw.load(folder / "step-3", model=other.model)
    assert (folder / "step-4" / "checkpoint.json").exists()
    names = dict(other.model.named_parameters())
    assert [name for name in differing(other.bits(), expected) if name in names] == []
