"""Saves with ``wait=False``: they write the values at the call, one save at a time."""

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import save as save_module
from shardwise.checkpoint.collect import WriteJob, checkpoint_mesh
from shardwise.checkpoint.coordination import Coordinator, coordinator_of
from shardwise.checkpoint.offline import examine
from shardwise.checkpoint.save import Save
from shardwise.checkpoint.slices import HostCopies, TensorSlice
from shardwise.checkpoint.write import write
from tests.checkpoint.training import Training, differing, digests
from tests.ranks import on_ranks
from tests.runtime.one_process import rank
from tests.waiting import PATIENCE_SECONDS


@on_ranks(2)
def test_an_asynchronous_save_writes_the_values_at_the_call(tmp_path: Path) -> None:
    training = Training("conv")
    training.step()
    everything = {
        "model": training.model,
        "optimizer": training.optimizer,
        "ballast": ballast(),
        "at": {"step": 1},
    }
    sw.save(tmp_path / "blocking", **everything)
    pending = sw.save(tmp_path / "asynchronous", wait=False, **everything)
    for number in range(3):
        training.step(number)
    pending.wait()
    assert pending.is_done
    assert digests(tmp_path / "asynchronous") == digests(tmp_path / "blocking")


@on_ranks(2)
def test_each_asynchronous_save_writes_its_own_values(tmp_path: Path) -> None:
    """All saves copy to the same host memory, one after the other."""
    for name, wait in (("blocking", True), ("asynchronous", False)):
        _save_each_step(tmp_path / name, wait)
    steps = [digests(tmp_path / "asynchronous" / str(number)) for number in range(4)]
    assert steps == [digests(tmp_path / "blocking" / str(number)) for number in range(4)]
    assert len({str(step) for step in steps}) == 4


def test_host_memory_is_reused_by_one_save_at_a_time() -> None:
    values = torch.arange(4.0)
    shares = {0: TensorSlice(3, values), 1: TensorSlice(0, torch.ones(2))}
    copies = HostCopies()
    first = copies.copy(shares)
    place = first[0].elements.data_ptr()
    copies.reclaim(first)
    values += 1
    again = copies.copy(shares)[0]
    assert (again.start, again.elements.data_ptr()) == (3, place)
    assert torch.equal(again.elements, values)
    under_way = copies.copy(shares)[0]
    assert under_way.elements.data_ptr() != place
    copies.reclaim({0: again})
    wider = {0: TensorSlice(0, torch.ones(4, dtype=torch.float64))}
    assert torch.equal(copies.copy(wider)[0].elements, wider[0].elements)


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_blocking_call_frees_the_host_memory(call: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    sw.save(tmp_path / "1", model=model, wait=False).wait()
    copies = coordinator_of(checkpoint_mesh([model]), model).host_copies
    copy_ = copies.copy({0: TensorSlice(0, torch.ones(6))})[0].elements
    copies.reclaim({0: TensorSlice(0, copy_)})
    kept = weakref.ref(copy_)
    del copy_
    assert kept() is not None
    if call == "save":
        sw.save(tmp_path / "2", model=model)
    else:
        sw.load(tmp_path / "1", model=model)
    assert kept() is None


def test_a_save_that_was_not_waited_for_keeps_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C interrupts the next save while it waits; then a third save starts."""
    model = nn.Linear(2, 3)
    expected = model.weight.detach().clone()
    gate = threading.Event()

    def write_later(job: WriteJob, ranks: Coordinator) -> None:
        _pass(gate)
        write(job, ranks)

    def interrupt(_: Save) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save_module, "write", write_later)
    first = sw.save(tmp_path / "1", model=model, wait=False)
    with monkeypatch.context() as context:
        context.setattr(Save, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sw.save(tmp_path / "2", model=model, wait=False)
    nn.init.zeros_(model.weight)
    second = sw.save(tmp_path / "2", model=model, wait=False)
    gate.set()
    first.wait()
    second.wait()
    sw.load(tmp_path / "1", model=model)
    assert torch.equal(model.weight, expected)
    sw.load(tmp_path / "2", model=model)
    assert not model.weight.any()


@on_ranks(2)
def test_a_pending_save_goes_on_after_a_step_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save has connections of its own, since ranks may have left an exchange."""
    training, gate = Training("gpt"), threading.Event()

    def write_later(job: WriteJob, ranks: Coordinator) -> None:
        _pass(gate)
        write(job, ranks)

    with monkeypatch.context() as context:
        context.setattr(save_module, "write", write_later)
        pending = sw.save(tmp_path / "1", model=training.model, wait=False)
    error = ArithmeticError if rank() == 0 else sw.PeerAborted
    with pytest.raises(error, match="it hurts"), sw.transaction(training.model):
        _raise_if(rank() == 0)
    training.step()
    assert not pending.is_done
    gate.set()
    sw.save(tmp_path / "2", model=training.model)
    assert examine(tmp_path / "1") == examine(tmp_path / "2") == []
    pending.wait()


@on_ranks(2)
def test_the_next_call_waits_for_the_pending_save(tmp_path: Path) -> None:
    training = Training("gpt")
    for number in range(4):
        training.step(number)
        time.sleep(0.01 * rank())
        sw.save(tmp_path / f"step-{number}", model=training.model, wait=False)
        if number:
            assert (tmp_path / f"step-{number - 1}" / "checkpoint.json").exists()
    expected = training.bits()
    sw.save(tmp_path / "step-4", model=training.model, wait=False, ballast=ballast())
    other = Training("gpt", seed=2)
    sw.load(tmp_path / "step-3", model=other.model)
    assert (tmp_path / "step-4" / "checkpoint.json").exists()
    names = dict(other.model.named_parameters())
    assert [name for name in differing(other.bits(), expected) if name in names] == []


def test_the_next_call_raises_the_error_of_the_pending_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    (tmp_path / "taken").write_bytes(b"")
    failed = sw.save(tmp_path / "taken", model=model, wait=False)
    with pytest.raises(sw.CheckpointError, match="taken"):
        sw.save(tmp_path / "x", model=model)
    failed.wait()  # does not raise again
    sw.save(tmp_path / "x", model=model)
    sw.load(tmp_path / "x", model=model)


@on_ranks(2)
def test_the_next_call_raises_on_all_ranks_if_only_one_has_waited(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    model = sw.fully_shard(nn.Linear(2, 3))
    failed = sw.save(tmp_path / "taken", model=model, wait=False)
    if rank() == 0:
        with pytest.raises(sw.CheckpointError, match="taken"):
            failed.wait()
    with pytest.raises(sw.CheckpointError, match="taken"):
        sw.save(tmp_path / "x", model=model)
    sw.save(tmp_path / "x", model=model)


def test_an_error_that_is_never_raised_becomes_a_warning() -> None:
    def fail() -> None:
        raise sw.CheckpointError("no room")

    with pytest.warns(UserWarning, match="the save to somewhere failed: no room"):
        _start_and_drop(fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = Save(Path("somewhere"), fail)
        with pytest.raises(sw.CheckpointError, match="no room"):
            asked.wait()
        del asked


def _start_and_drop(job: Callable[[], None]) -> None:
    dropped = Save(Path("somewhere"), job)
    while not dropped.is_done:
        time.sleep(0.01)


def _raise_if(is_true: bool) -> None:
    if is_true:
        raise ArithmeticError("it hurts")


def _pass(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_SECONDS)


def ballast() -> torch.Tensor:
    """Sorts before the model, and takes several steps to write."""
    return torch.zeros(1 << 25, dtype=torch.uint8)


def _save_each_step(folder: Path, wait: bool) -> None:
    training = Training("conv")
    for number in range(4):
        training.step(number)
        sw.save(folder / str(number), model=training.model, optimizer=training.optimizer, wait=wait)
    training.step()
    sw.save(folder / "last", model=training.model)
