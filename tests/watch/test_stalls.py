"""The errors and warnings of ranks on one machine when one of them diverges or is late."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.comm.communicator import communicator
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import resolve_mesh
from shardwise.watch.monitor import Patience
from tests import ranks
from tests.logged import logged
from tests.models import WIDTH, Block, Stack
from tests.ranks import RankFailed, on_ranks, run_on
from tests.runtime.one_process import full
from tests.waiting import eventually
from tests.watching import is_silent, monitor_of, quick_to_lose, watch_with

HURRIED = Patience(poll_seconds=0.05, beat_seconds=0.1, silent_seconds=60.0, log_seconds=0.3)
SECONDS = 45.0
ODD = 1  # the rank that diverges
WAITED = " has waited for "  # in the log


class Job:
    """Training steps of one rank."""

    def __init__(self, patience: Patience) -> None:
        group = dist.new_group(list(range(dist.get_world_size())))
        mesh = DeviceMesh.from_group(group, "cpu")
        world = resolve_mesh(mesh, PRESETS["fsdp"]).world
        with watch_with(patience):
            self.comm = communicator(world, torch.device("cpu"))
        self.model = sw.fully_shard(Stack(), units={Block}, mesh=mesh)
        self.is_odd = dist.get_rank() == ODD
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()

    def error(self, run: Callable[[], None], kind: type[sw.StepError]) -> str:
        """Return the error that ``run`` raises, well before any timeout."""
        began = time.monotonic()
        with pytest.raises(kind) as caught:
            run()
        assert time.monotonic() - began < SECONDS
        return str(caught.value)

    def wait_until_seen(self, rank: int, place: str) -> None:
        """Wait until the innermost call in a heartbeat of ``rank`` contains ``place``."""
        monitor = monitor_of(self.comm)

        def is_there() -> bool:
            beat = monitor.heartbeat(rank)
            return beat is not None and any(place in call for call in beat.python[:1])

        assert eventually(is_there)


def assert_same(text: str) -> None:
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {text}


def row(text: str, rank: int) -> str:
    """Return the row of ``rank`` in the table of ``text``."""
    assert re.search(r"\n  rank +step +in +last completed +waits for +Python", text)
    [found] = re.findall(rf"\n  {rank} .*", text)
    assert isinstance(found, str)
    return found


PATIENCES = [HURRIED, pytest.param(Patience(), marks=pytest.mark.thorough)]


@on_ranks(2, thorough=(4,))
@pytest.mark.parametrize("patience", PATIENCES, ids=["hurried", "default"])
def test_a_rank_that_skips_a_step(patience: Patience) -> None:
    """It reaches the end of the loop first, and waits for the others in torch's barrier."""
    job = Job(patience)

    def train() -> None:
        for number in range(3):
            if not (job.is_odd and number == 1):
                job.step()
        dist.barrier()
        job.step()  # raises on the rank that was in the barrier

    if job.is_odd:
        text = job.error(train, sw.RanksDiverged)
    else:
        text = job.error(train, sw.RanksDiverged)
        dist.barrier()
    assert "ranks wait for different things" in text
    assert re.search(r"  a collective of torch +.*test_stalls\.py:\d+ in train$", row(text, ODD))
    assert re.search(r"gather .*test_stalls\.py:\d+ in step$", row(text, 0))
    assert_same(text)


@on_ranks(2)
@pytest.mark.parametrize("patience", PATIENCES, ids=["hurried", "default"])
def test_a_rank_that_calls_an_extra_collective(patience: Patience) -> None:
    job = Job(patience)

    def train() -> None:
        if job.is_odd:
            next(job.model.parameters()).detach().norm()  # of all shards
        job.step()

    text = job.error(train, sw.RanksDiverged)
    assert re.search(r"  gather scalars +.*test_stalls\.py:\d+ in train$", row(text, ODD))
    assert re.search(r"  gather first|gather Stack +.* in step$", row(text, 0))
    assert_same(text)
    job.step()


@on_ranks(2)
def test_a_rank_that_calls_an_extra_collective_of_torch() -> None:
    job = Job(HURRIED)

    def train() -> None:
        if job.is_odd:
            dist.all_reduce(torch.zeros(1))
        job.step()

    text = job.error(train, sw.RanksDiverged)
    if not job.is_odd:
        dist.all_reduce(torch.zeros(1))
    assert re.search(r"  a collective of torch +.*test_stalls\.py:\d+ in train$", row(text, ODD))
    assert_same(text)
    job.step()


@on_ranks(2)
@pytest.mark.parametrize("patience", PATIENCES, ids=["hurried", "default"])
def test_a_rank_that_is_stopped(tmp_path: Path, patience: Patience) -> None:
    over, pids = tmp_path / "over", [0, 0]
    dist.all_gather_object(pids, os.getpid())
    job = Job(patience)
    dist.barrier()
    if job.is_odd:
        while not over.exists():
            time.sleep(0.01)  # stopped here
        text = job.error(job.step, sw.PeerSilent)
    else:
        job.wait_until_seen(ODD, "in test_a_rank_that_is_stopped")  # not in its first step
        os.kill(pids[ODD], signal.SIGSTOP)
        try:
            with quick_to_lose(job.comm) if patience == HURRIED else nullcontext():
                text = job.error(job.step, sw.PeerSilent)
        finally:
            os.kill(pids[ODD], signal.SIGCONT)
            over.touch()
        assert eventually(lambda: not is_silent(job.comm))
    assert text.startswith(f"rank 0 lost rank {ODD}: its process gave no sign of life")
    assert re.search(r"no sign of life for \d+ s; was at .*test_stalls\.py:\d+", row(text, ODD))
    assert_same(text)
    job.step()


def test_a_rank_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 30.0)
    with pytest.raises(RankFailed) as failure:
        run_on(3, _outlive, tmp_path)
    assert failure.value.headlines == {2: "was killed by SIGKILL"}
    for rank in (0, 1):
        text = (tmp_path / str(rank)).read_text()
        assert "lost rank 2" in text
        # The position at a heartbeat, in the file of the test or of the model.
        assert re.search(r" tests/[\w/]+\.py:\d+ in \w+", row(text, rank))


def _outlive(folder: Path) -> None:
    job = Job(HURRIED)
    if dist.get_rank() == 2:
        for rank in (0, 1):
            job.wait_until_seen(rank, "tests/")
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / str(dist.get_rank())).write_text(job.error(job.step, sw.PeerLost))
    while not all((folder / str(rank)).exists() for rank in (0, 1)):  # the store is rank 0's
        time.sleep(0.05)


@on_ranks(2)
@pytest.mark.parametrize("patience", PATIENCES, ids=["hurried", "default"])
def test_a_rank_that_is_elsewhere_is_logged(tmp_path: Path, patience: Patience) -> None:
    """For example in a slow data loader or a long evaluation."""
    job, texts = Job(patience), [tmp_path / str(rank) for rank in range(2)]
    with logged("shardwise", texts[dist.get_rank()]) as said:
        for _ in load_slowly(texts[0]) if job.is_odd else range(1):
            if job.is_odd:
                assert WAITED not in "\n".join(said)
            else:
                job.wait_until_seen(ODD, "load_slowly")
            job.step()
    if job.is_odd:
        return
    waits = [message for message in said if WAITED in message][:2]  # before the odd rank came
    first, second = (float(re.findall(rf"{WAITED}(\d+\.\d) s", one)[0]) for one in waits)
    assert first >= patience.log_seconds
    assert second > 1.5 * first, "at double the time"
    pattern = (
        rf"rank 0 has waited for .* s: step 1, forward of \w+, gather \w+; waits for rank {ODD}, "
        r"which is alive in step 0, end of backward, Python at .*test_stalls\.py:\d+ in "
        r"load_slowly < .*test_stalls\.py:\d+ in test_a_rank_that_is_elsewhere"
    )
    assert all(re.match(pattern, message) for message in waits)


@on_ranks(2)
def test_a_rank_that_does_not_go_on_after_an_error_is_logged(tmp_path: Path) -> None:
    job, texts = Job(HURRIED), [tmp_path / str(rank) for rank in range(2)]
    if job.is_odd:
        job.error(job.step, sw.PeerAborted)
    else:
        job.comm.watch.abort(ValueError("it hurts"))
    with logged("shardwise", texts[dist.get_rank()]) as said:
        for _ in load_slowly(texts[0]) if job.is_odd else range(1):
            if job.is_odd:
                assert WAITED not in "\n".join(said)
            else:
                job.wait_until_seen(ODD, "load_slowly")
            job.step()
    if job.is_odd:
        return
    pattern = (
        rf"rank 0 has waited for .* s to go on after an error; waits for rank {ODD}, "
        r"which is alive in step .*, Python at .*test_stalls\.py:\d+ in load_slowly"
    )
    first, second = [one for one in said if WAITED in one][:2]  # before the odd rank came
    assert re.match(pattern, first)
    assert re.match(pattern, second)


def load_slowly(said: Path) -> Iterator[int]:
    """Return when the other rank has logged twice that it waits."""
    while not said.exists() or said.read_text().count(WAITED) < 2:
        time.sleep(0.01)
    yield 0


@on_ranks(2)
def test_a_forked_process_cannot_use_the_model_and_does_not_disturb_its_parent() -> None:
    """Its threads are the parent's, and it must not write into the parent's connections."""
    model = sw.fully_shard(Stack().double(), units={Block})
    x = torch.ones(2, WIDTH).double()
    model(x).sum().backward()
    expected = [full(p.grad) for p in model.parameters()]
    uses: dict[str, Callable[[], object]] = {
        "a forward": lambda: model(x),
        "whole tensors": lambda: full(next(model.parameters())),
        "a gradient norm": lambda: sw.clip_grad_norm_(model.parameters(), 1.0),
    }
    for use in uses.values():
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                use()
            except sw.StepError as error:
                os.write(tell, str(error).encode())
            finally:
                os._exit(0)
        os.close(tell)
        with os.fdopen(told) as answer:
            assert f"was forked from rank {dist.get_rank()}" in answer.read()
        os.waitpid(child, 0)
        model.zero_grad()
        model(x).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(full(parameter.grad), gradient, rtol=0.0, atol=1e-10)
