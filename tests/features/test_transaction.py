"""C8: a step runs on every rank or on none, and a retry gives the bits of an undisturbed step."""

import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwise as sw
from shardwise.comm.api import Work
from shardwise.features import transaction as transactions
from shardwise.runtime.scheduler import Scheduler
from tests.features.training import SECONDS, Training
from tests.models import WIDTH
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import comm_of, rank

PLACES = (
    "middle of step", "data", "forward", "backward", "after backward", "clip", "before step",
    "middle of step", "after step", "interrupt",
)  # fmt: skip
FEW = ("middle of step", "data", "backward")


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "strategy", "optimizer", "raising", "places"),
    [
        (1, "fsdp", "adamw", (0,), PLACES),
        (2, "fsdp", "adamw", (1,), PLACES),
        (2, "ddp", "sgd", (0, 1), FEW),
        (4, "hsdp", "sgd", (3,), FEW),
        pytest.param(2, "zero2", "adamw", (1,), FEW, marks=pytest.mark.thorough),
        pytest.param(4, "ddp", "adamw", (1, 2), FEW, marks=pytest.mark.thorough),
        pytest.param(2, "fsdp", "sgd", (0, 1), PLACES, marks=pytest.mark.thorough),
        pytest.param(2, "ddp", "sgd", (0,), FEW, marks=pytest.mark.thorough),
        pytest.param(4, "fsdp", "sgd", (3,), FEW, marks=pytest.mark.thorough),
        pytest.param(4, "hsdp", "adamw", (0,), FEW, marks=pytest.mark.thorough),
    ],
)
def test_a_retry_gives_the_bits_of_an_undisturbed_step(
    strategy: str, optimizer: str, raising: Sequence[int], places: Sequence[str]
) -> None:
    undisturbed = Training(strategy, optimizer)
    expected = [undisturbed.fingerprint()]
    for _ in places:
        undisturbed.step()
        expected.append(undisturbed.fingerprint())
    training = Training(strategy, optimizer)
    own = rank() in raising
    ranks = dist.new_group(list(raising)) if len(raising) > 1 else None
    for number, place in enumerate(places):
        cause = KeyboardInterrupt if place == "interrupt" else ValueError
        began = time.monotonic()
        with pytest.raises(cause if own else sw.PeerAborted):
            training.step(place if own else "", ranks)
        assert time.monotonic() - began < SECONDS
        assert training.fingerprint() == expected[number], f"undone: {place}"
        training.step()
        assert training.fingerprint() == expected[number + 1], f"second attempt: {place}"


@on_ranks(2)
def test_gradients_from_before_the_step_are_restored() -> None:
    training = Training()
    training.model(torch.randn(5, WIDTH)).square().mean().backward()
    before = training.fingerprint()
    for place in ("after backward", "middle of step", "after step"):
        with pytest.raises(ValueError if rank() == 0 else sw.PeerAborted):
            training.step(place if rank() == 0 else "")
        assert training.fingerprint() == before
    training.step()
    assert training.fingerprint() != before


@on_ranks(2)
def test_rounding_errors_of_gradients_are_restored() -> None:
    wire = sw.Wire(reduce="int4", block=8, error_feedback=True)
    undisturbed = Training(wire=wire)
    for _ in range(3):
        undisturbed.step()
    expected = undisturbed.fingerprint()
    training = Training(wire=wire)
    training.step()
    for place in ("backward", "after step"):
        with pytest.raises(ValueError if rank() == 0 else sw.PeerAborted):
            training.step(place if rank() == 0 else "")
        training.step()
    assert training.fingerprint() == expected


@on_ranks(2)
def test_ranks_with_other_parts_of_the_model_are_refused() -> None:
    def sharded(dp: int, tp: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(nn.Linear(WIDTH, WIDTH), mesh["tp"], ColwiseParallel())
        return sw.fully_shard(model, mesh=mesh["dp"])

    with sw.transaction(sharded(dp=2, tp=1)):
        pass
    divided = sharded(dp=1, tp=2)
    match = "tensor parallelism divides weight .* some could keep a step that others undo"
    with pytest.raises(sw.PlanError, match=match), sw.transaction(divided):
        pass


@on_ranks(2)
def test_the_end_of_the_data_on_one_rank_ends_the_step_on_all() -> None:
    training = Training()
    batches = iter([torch.randn(5, WIDTH)] * (1 + rank()))
    made = 0
    with pytest.raises(StopIteration if rank() == 0 else sw.PeerAborted) as caught:  # noqa: PT012
        while True:
            with sw.transaction(training.model, training.optimizer):
                training.model(next(batches)).square().mean().backward()
                training.optimizer.step()
            made += 1
    assert made == 1
    assert rank() == 0 or "gave up in step 1, a transaction: StopIteration" in str(caught.value)


@on_ranks(2)
def test_an_exception_that_reached_other_ranks_cannot_be_caught_inside() -> None:
    training = Training()
    before = training.fingerprint()
    expected = "caught inside" if rank() == 0 else "gave up"
    with pytest.raises(sw.StepError, match=expected), _transaction(training):  # noqa: PT012
        training.failing.where = "forward" if rank() == 0 else ""
        if rank() == 0:
            with pytest.raises(ValueError, match="it hurts"):
                training.model(torch.randn(5, WIDTH))
        else:
            training.model(torch.randn(5, WIDTH))
    assert training.fingerprint() == before
    training.step()


@on_ranks(2)
def test_a_rank_that_is_interrupted_in_the_vote_follows_its_outcome(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in the vote when its alarm goes off."""
    rang = tmp_path / "rang"

    def interrupt(*_: object) -> None:
        rang.touch()
        raise KeyboardInterrupt

    undisturbed = Training()
    undisturbed.step()
    expected = undisturbed.fingerprint()
    training = Training()
    comm = comm_of(training.model)

    def wait_with_an_alarm(work: Work) -> None:
        comm_wait.stop()  # also for the wait after the interrupt
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        comm.wait(work)

    comm_wait = mock.patch.object(comm, "wait", wait_with_an_alarm)
    if rank() == 1:
        with _transaction(training):
            training.body("")
            while not rang.exists():
                time.sleep(0.01)
    else:
        signal.signal(signal.SIGALRM, interrupt)
        with pytest.raises(KeyboardInterrupt), _transaction(training):  # noqa: PT012
            training.body("")
            comm_wait.start()  # the vote is all that follows
    assert training.fingerprint() == expected
    training.step()


@on_ranks(2)
def test_an_interrupt_while_a_step_is_undone_does_not_leave_it_half_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = Training()
    undisturbed.step()
    expected = undisturbed.fingerprint()
    training = Training()
    before = training.fingerprint()
    # At the third write of the first attempt and the fifth of the second one; then at the begin.
    for owner, name, numbers in ((transactions, "_write", (3, 8)), (Scheduler, "abandon", (1,))):
        error, text = (KeyboardInterrupt, "again") if rank() == 0 else (sw.PeerAborted, "")
        with monkeypatch.context() as patch:
            if rank() == 0:
                _interrupt(patch, owner, name, numbers)
            with pytest.raises(error, match=text):
                training.step("after step" if rank() == 0 else "")
        assert training.fingerprint() == before
    training.step()
    assert training.fingerprint() == expected


def _interrupt(patch: pytest.MonkeyPatch, owner: object, name: str, numbers: Sequence[int]) -> None:
    """Interrupt the calls of a function of ``owner`` that have these ``numbers``."""
    calls, function = itertools.count(1), getattr(owner, name)

    def interrupt(*args: object) -> None:
        if next(calls) in numbers:
            raise KeyboardInterrupt("again")
        function(*args)

    patch.setattr(owner, name, interrupt)


@on_ranks(2)
def test_a_step_that_cannot_be_undone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    with monkeypatch.context() as patch:
        if rank() == 0:
            patch.setattr(transactions, "_write", mock.Mock(side_effect=MemoryError("too much")))
        text = r"load a checkpoint \(MemoryError: too much\)" if rank() == 0 else "it hurts"
        with pytest.raises(sw.StepError, match=text):
            training.step("after step" if rank() == 0 else "")


@on_ranks(2)
def test_the_next_step_may_have_no_transaction() -> None:
    undisturbed = Training()
    undisturbed.body("")
    expected = undisturbed.fingerprint()
    training = Training()
    with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted):
        training.step("data" if rank() == 1 else "")
    training.body("")
    assert training.fingerprint() == expected


@on_ranks(2)
def test_two_failures_in_a_row() -> None:
    """The second one occurs before a rank has used the model, so it must first publish a report."""
    training = Training()
    before = training.fingerprint()
    for place in ("data", "data", "after step"):
        with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted):
            training.step(place if rank() == 1 else "")
    assert training.fingerprint() == before
    training.step()


def test_mistakes_are_named() -> None:
    run_on(1, _mistakes)
    run_on(2, _mistakes)


def _mistakes() -> None:
    training = Training()
    model, optimizer = training.model, training.optimizer
    with pytest.raises(sw.PlanError, match="not sharded"):
        sw.transaction(nn.Linear(2, 2)).__enter__()
    with pytest.raises(sw.PlanError, match=r"blocks\.1 is a unit inside"):
        sw.transaction(training.failing).__enter__()
    with pytest.raises(sw.PlanError, match="got function"):
        sw.transaction(model, _mistakes).__enter__()  # type: ignore[arg-type]
    with pytest.raises(sw.StepError, match="open already"), _transaction(training):
        training.step()
    with (
        pytest.raises(sw.StepError, match=r"sw\.gathered"),
        sw.gathered(model),
        _transaction(training),
    ):
        pass
    missing = pytest.raises(sw.StepError, match=r"first\.weight.*pass every optimizer")
    with missing, sw.transaction(model):
        training.body("")
    assert not optimizer._optimizer_step_pre_hooks
    with sw.transaction(model, optimizer):
        training.body("")
        with torch.no_grad():
            next(model.parameters()).clamp_(-1, 1)  # after the optimizer's step, so it is undone


@pytest.mark.parametrize("stepped_by", ["fused", "foreach", "adam8bit", "hand"])
@on_ranks(2)
def test_a_change_that_cannot_be_undone_is_refused(stepped_by: str) -> None:
    granularity: Any = "row" if stepped_by == "adam8bit" else "dim"
    model: Any = sw.fully_shard(nn.Linear(WIDTH, WIDTH), granularity=granularity)
    parameters: Any = list(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()

    def step() -> None:
        if stepped_by == "hand":
            parameters[0].to_local().detach().add_(1)
        elif stepped_by == "adam8bit":
            sw.optim.Adam8bit(parameters).step()
        else:
            options: Any = {stepped_by: True}
            torch.optim.AdamW(parameters, **options).step()

    stray = pytest.raises(sw.StepError, match=r"^weight.*pass every optimizer")
    with stray, sw.transaction(model):
        step()
    model.load_state_dict({n: p * 2 for n, p in model.state_dict().items()}, assign=True)
    with sw.transaction(model):  # neither what came before it nor a conversion is a change in it
        model.to(torch.float32)
        model(torch.ones(2, WIDTH))
        model.to(torch.float32)
    parameters[:] = model.parameters()
    model(torch.ones(2, WIDTH)).sum().backward()
    with (
        pytest.raises(sw.PlanError, match=r"weight.*step outside"),
        sw.gathered(model, write_back=True),
    ):
        step()


def _transaction(training: Training) -> Any:
    return sw.transaction(training.model, training.optimizer)
