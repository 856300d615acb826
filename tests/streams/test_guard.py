"""Stuck ranks of the strict group all raise one error, and their next step is correct."""

import importlib
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from shardwise.watch.monitor import Patience
from tests import ranks
from tests.covering import leaving
from tests.logged import logged
from tests.models import Block
from tests.ranks import RankFailed, on_ranks, run_on
from tests.runtime.one_process import adamw, assert_equal_models, comm_of, own_part
from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Simulation
from tests.waiting import eventually
from tests.watching import is_silent, quick_to_lose

PATIENCE = Patience(poll_seconds=0.05, beat_seconds=0.1, silent_seconds=60.0, log_seconds=0.5)
DEADLINE = 120.0
SECONDS = 45.0  # until each rank has the error
LAST = 1
IN_ORDER = (0, 1, 2, 3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Reordered(nn.Module):
    """Calls its layers, the third of which is smaller, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Small(), Block()])
        self.order = IN_ORDER

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class Training:
    """Training steps of one rank, in transactions, and of a reference in one process."""

    def __init__(self, simulation: Simulation, **options: Any) -> None:
        torch.manual_seed(0)
        self.reference, self.model = Reordered().double(), Reordered().double()
        self.model.load_state_dict(self.reference.state_dict())
        simulation.current_device = DEVICE.index
        sw.fully_shard(self.model.to(DEVICE), units={Block, Small}, **options)
        self.optimizers = [adamw(net.parameters()) for net in (self.reference, self.model)]
        self.num_steps = 0

    def step(self, before_backward: Callable[[], None] = lambda: None) -> None:
        torch.manual_seed(self.num_steps)
        batch = torch.randn(12, 6, dtype=torch.float64)
        with sw.transaction(self.model, self.optimizers[1]):
            loss = self.model(own_part(batch).to(DEVICE)).square().mean()
            before_backward()
            torch.autograd.backward(loss)
            self.optimizers[1].step()
            self.optimizers[1].zero_grad()
        with _disable_current_modes():
            torch.autograd.backward(self.reference(batch).square().mean())
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            self.num_steps += 1
            assert_equal_models(self.model, self.reference, self.num_steps)

    def error(self, kind: type[sw.StepError], **options: Callable[[], None]) -> str:
        """Return the error of a step that fails on every rank."""
        began = time.monotonic()
        with pytest.raises(kind) as caught:
            self.step(**options)
        assert time.monotonic() - began < SECONDS
        return str(caught.value)


@contextmanager
def training(**options: Any) -> Iterator[Training]:
    simulation = Simulation(is_concurrent=True)
    with simulated(simulation, patience=PATIENCE):
        yield Training(simulation, **options)


def assert_same(text: str) -> None:
    """Check that ``text`` is the same on all ranks."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {text}


def epochs(run: Training) -> set[int]:
    comm = comm_of(run.model)
    queues: list[Any] = [comm.gather, comm.reduce]
    return {queue._epoch for queue in queues}


@on_ranks(2, thorough=(4,), deadline=DEADLINE)
def test_ranks_that_diverge(tmp_path: Path) -> None:
    # Without prefetch, since the first difference would be two gathers of equal size otherwise.
    with training(prefetch=0) as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/")
        run.step()
        run.model.order = (0, 2, 1, 3) if dist.get_rank() == LAST else IN_ORDER
        text = run.error(sw.RanksDiverged)
        run.model.order = IN_ORDER
        assert re.search(rf"\n  {LAST} +1 +\w+ of layers\.\d +gather .* gather layers", text)
        assert f"rank {LAST} entered layers.2" in text
        assert_same(text)
        run.step()
        assert epochs(run) == {1}
    dist.barrier()
    records = sorted(tmp_path.glob("*_gather_*"))
    assert len(records) == dist.get_world_size()
    if not dist.get_rank():
        _assert_torch_finds_the_difference(tmp_path, records[0].name[:-1])


@on_ranks(2, deadline=DEADLINE)
def test_a_rank_that_raises_before_there_are_process_groups() -> None:
    with training() as run:
        if dist.get_rank() == LAST:
            with pytest.raises(ValueError, match="no data"), sw.transaction(run.model):
                raise ValueError("no data")
        else:
            assert f"rank {LAST} gave up" in run.error(sw.PeerAborted)
        run.step()
        assert epochs(run) == {1}


def _assert_torch_finds_the_difference(folder: Path, prefix: str) -> None:
    # Imported here, because the import prints something.
    fr_trace = importlib.import_module("torch.distributed.flight_recorder.fr_trace")
    database = folder / "database"
    fr_trace.main([str(folder), "--prefix", prefix, "-o", str(database)])
    _, collected = pickle.loads(database.read_bytes())
    first = next(one for one in collected.collectives if not one.pass_check)
    assert first.collective_frames[0]["name"].startswith("gather layers.")
    assert any("SIZE" in str(one.type_of_mismatch) for one in first.mismatch_collectives.values())


@on_ranks(2, thorough=(4,), deadline=DEADLINE)
def test_ranks_that_run_different_units_of_equal_size() -> None:
    """No rank waits, but all numbers are wrong."""
    with training(prefetch=0) as run:  # otherwise the prefetch would have another size
        run.step()
        run.model.order = (1, 0, 2, 3) if dist.get_rank() == LAST else IN_ORDER
        with pytest.raises(sw.RanksDiverged) as caught:
            _run_for(run.model, SECONDS)
        text = str(caught.value)
        # Both neighbors of that rank find the difference.
        assert "run different units" in text
        assert re.search(r"gather layers\.0 on rank [02]\b", text)
        assert f"gather layers.1 on rank {LAST}" in text
        assert re.search(rf"\n  {LAST} +\d+ +", text)
        run.model.order = IN_ORDER
        run.model.zero_grad()
        run.step()


def _run_for(model: nn.Module, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        model(torch.ones(2, 6).double().to(DEVICE)).sum().backward()


@on_ranks(2, deadline=DEADLINE)
def test_a_rank_that_skips_a_step() -> None:
    """It waits in torch's barrier, and the other ranks wait for it on the device."""
    with training() as run:
        run.step()
        if dist.get_rank() == LAST:
            dist.barrier()
        text = run.error(sw.RanksDiverged)
        if dist.get_rank() != LAST:
            dist.barrier()
        assert re.search(rf"\n  {LAST} +0 .* a collective of torch +.*test_guard\.py:\d+ in ", text)
        assert re.search(r"\n  0 +1 .* gather layers\.\d ", text)
        assert_same(text)
        run.step()


@on_ranks(2, deadline=DEADLINE)
def test_a_rank_that_is_elsewhere_is_no_error_but_named(tmp_path: Path) -> None:
    texts = [tmp_path / str(rank) for rank in range(2)]
    for text in texts:
        text.touch()
    pattern = rf"has waited for .*waits for rank {LAST}, which is alive in step 1, .*in wait\b"

    def wait() -> None:
        if dist.get_rank() == LAST:
            before = texts[LAST].read_text().count("has waited for")
            assert eventually(lambda: re.search(pattern, texts[0].read_text()) is not None)
            assert texts[LAST].read_text().count("has waited for") == before

    with training() as run, logged("shardwise", texts[dist.get_rank()]):
        run.step()
        run.step(wait)


@on_ranks(2, thorough=(4,), deadline=DEADLINE)
@pytest.mark.parametrize("place", leaving(["before backward"], ["before backward", "at the end"]))
def test_a_rank_that_raises(place: str) -> None:
    """The other ranks wait for it on the device, where nothing raises."""

    def fail(*_args: object) -> None:
        raise ValueError("it hurts")

    with training() as run:
        run.step()
        if dist.get_rank() != LAST:
            text = run.error(sw.PeerAborted)
            assert re.fullmatch(rf"rank {LAST} gave up in step 1, .*: ValueError: it hurts", text)
        elif place == "before backward":
            with pytest.raises(ValueError, match="it hurts"):
                run.step(fail)
        else:
            handle = run.optimizers[1].register_step_post_hook(fail)
            with pytest.raises(ValueError, match="it hurts"):
                run.step()
            handle.remove()
        run.step()


@on_ranks(2, deadline=DEADLINE)
def test_a_rank_that_raises_while_no_host_waits() -> None:
    """The other ranks receive the error after their last wait in the block, before they vote."""
    with training() as run:
        run.step()
        comm = comm_of(run.model)

        def act(*_args: object) -> None:
            if dist.get_rank() == LAST:
                raise ValueError("it hurts")
            comm.gather.all_gather(torch.zeros(2, device=DEVICE), comm.world, "gather nothing")
            while not comm.watch.is_broken:
                time.sleep(0.01)

        handle = run.optimizers[1].register_step_post_hook(act)
        with pytest.raises((ValueError, sw.PeerAborted), match="it hurts"):
            run.step()
        handle.remove()
        run.step()


@on_ranks(2, deadline=DEADLINE)
def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    over = tmp_path / "over"
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())

    def wait_to_be_stopped() -> None:
        while not over.exists():
            time.sleep(0.01)

    with training() as run:
        run.step()
        if dist.get_rank() != LAST:
            os.kill(pids[LAST], signal.SIGSTOP)
            try:
                with quick_to_lose(comm_of(run.model)):
                    text = run.error(sw.PeerSilent)
            finally:
                over.touch()
                os.kill(pids[LAST], signal.SIGCONT)
            assert eventually(lambda: not is_silent(comm_of(run.model)))
        else:
            text = run.error(sw.PeerSilent, before_backward=wait_to_be_stopped)
        assert text.startswith(f"rank 0 lost rank {LAST}: its process gave no sign of life")
        assert re.search(r"; step 1, \w+ of layers\.\d, waits for gather", text)
        assert_same(text)
        run.step()
        assert epochs(run) == {1}


def test_a_rank_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", DEADLINE)
    with pytest.raises(RankFailed) as failure:
        run_on(3, _outlive, tmp_path, deadline=DEADLINE)
    assert failure.value.headlines == {2: "was killed by SIGKILL"}
    first, second = ((tmp_path / str(rank)).read_text() for rank in (0, 1))
    assert first == second
    assert "lost rank 2: its process gave no sign of life" in first
    assert re.search(r"; step 1, \w+ of layers\.\d, waits for", first)


def _outlive(folder: Path) -> None:
    own, dies = folder / str(dist.get_rank()), folder / "dies"

    def die() -> None:
        if dist.get_rank() == 2:
            dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif dist.get_rank() == 1:  # which watches rank 2
            assert eventually(dies.exists)
            hurry.enter_context(quick_to_lose(comm_of(run.model)))

    with training() as run, ExitStack() as hurry:
        run.step()
        own.write_text(run.error(sw.PeerSilent, before_backward=die))
        while not all((folder / str(rank)).exists() for rank in (0, 1)):  # the store is rank 0's
            time.sleep(0.05)
