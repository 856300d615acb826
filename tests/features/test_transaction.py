"""C8: a step is made on every rank or on none, and a second attempt gives the bits of the first."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.runtime.tensor import ShardedTensor
from tests.models import WIDTH, Block
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import rank, world_size
from tests.runtime.test_failures import Touchy
from tests.runtime.test_strategies import _options

SECONDS = 15  # within which every rank has the error
PLACES = (
    "middle of step", "data", "forward", "backward", "after backward", "clip", "before step",
    "middle of step", "after step", "interrupt",
)  # fmt: skip
FEW = ("middle of step", "data", "backward")


@on_ranks(deadline=120.0)
@pytest.mark.parametrize(
    ("world_size", "strategy", "optimizer", "raising", "places"),
    [
        (1, "fsdp", "adamw", (0,), PLACES),
        (2, "fsdp", "adamw", (1,), PLACES),
        (2, "fsdp", "sgd", (0, 1), FEW),
        (2, "zero2", "adamw", (1,), FEW),
        (4, "hsdp", "sgd", (3,), FEW),
        (4, "ddp", "adamw", (1, 2), FEW),
        pytest.param(2, "fsdp", "sgd", (0, 1), PLACES, marks=pytest.mark.thorough),
        pytest.param(2, "ddp", "sgd", (0,), FEW, marks=pytest.mark.thorough),
        pytest.param(4, "fsdp", "sgd", (3,), FEW, marks=pytest.mark.thorough),
        pytest.param(4, "hsdp", "adamw", (0,), FEW, marks=pytest.mark.thorough),
    ],
)
def test_a_second_attempt_gives_the_bits_of_an_undisturbed_step(
    strategy: str, optimizer: str, raising: Sequence[int], places: Sequence[str]
) -> None:
    undisturbed = Training(strategy, optimizer)
    expected = [undisturbed.fingerprint()]
    for _ in places:
        undisturbed.step()
        expected.append(undisturbed.fingerprint())
    training = Training(strategy, optimizer)
    own = rank() in raising
    for number, place in enumerate(places):
        cause = KeyboardInterrupt if place == "interrupt" else ValueError
        began = time.monotonic()
        with pytest.raises(cause if own else sw.PeerAborted):
            training.step(place if own else "")
        assert time.monotonic() - began < SECONDS
        assert training.fingerprint() == expected[number], f"undone: {place}"
        training.step()
        assert training.fingerprint() == expected[number + 1], f"second attempt: {place}"


@on_ranks(2, deadline=40.0)
def test_kept_gradients_come_back() -> None:
    training = Training()
    training.model(torch.randn(5, WIDTH)).square().mean().backward()
    before = training.fingerprint()
    for place in ("after backward", "middle of step", "after step"):
        with pytest.raises(ValueError if rank() == 0 else sw.PeerAborted):
            training.step(place if rank() == 0 else "")
        assert training.fingerprint() == before
    training.step()
    assert training.fingerprint() != before


@on_ranks(2, deadline=40.0)
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
    assert rank() == 0 or "rank 0 gave up in step 1: StopIteration" in str(caught.value)


@on_ranks(2, deadline=40.0)
def test_an_exception_that_others_know_of_cannot_be_caught_inside() -> None:
    training = Training()
    before = training.fingerprint()
    expected = "caught inside" if rank() == 0 else "gave up"
    with pytest.raises(sw.StepError, match=expected), _transaction(training):  # noqa: PT012
        training.touchy.where = "forward" if rank() == 0 else ""
        if rank() == 0:
            with pytest.raises(ValueError, match="it hurts"):
                training.model(torch.randn(5, WIDTH))
        else:
            training.model(torch.randn(5, WIDTH))
    assert training.fingerprint() == before
    training.step()


@on_ranks(2, deadline=40.0)
def test_a_rank_that_is_interrupted_in_the_vote_does_what_the_others_do() -> None:
    """Rank 0 waits for rank 1 in the vote when its alarm goes off."""
    undisturbed = Training()
    undisturbed.step()
    expected = undisturbed.fingerprint()
    training = Training()
    if rank() == 1:
        with _transaction(training):
            training._body("")
            time.sleep(2.0)
    else:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            training.step()
    assert training.fingerprint() == expected
    training.step()


@on_ranks(2, deadline=40.0)
def test_the_next_step_may_be_a_plain_one() -> None:
    undisturbed = Training()
    undisturbed._body("")
    expected = undisturbed.fingerprint()
    training = Training()
    with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted):
        training.step("data" if rank() == 1 else "")
    training._body("")
    assert training.fingerprint() == expected


@on_ranks(2, deadline=40.0)
def test_two_failures_in_a_row() -> None:
    """The second time before a rank has used the model, so it owes the others a report first."""
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


class Net(nn.Module):
    """With all that a forward changes: batch statistics, and the generator by dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.Sequential(Block(), Touchy(), Block())
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.dropout(self.norm(self.first(x))))
        return y


class Tripping(torch.optim.Optimizer):
    """Raises when it has updated half of its parameters, if told to."""

    trips = False
    num_steps = 0  # that were made whole; torch calls hooks of a step that calls another twice

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.trips:
            super().step(closure)
            self.num_steps += 1
            return
        (group,) = self.param_groups
        parameters = group["params"]
        group["params"] = parameters[: len(parameters) // 2]
        super().step(closure)
        group["params"] = parameters
        raise ValueError("it hurts")


class TrippingAdamW(Tripping, torch.optim.AdamW):
    pass


class TrippingSGD(Tripping, torch.optim.SGD):
    pass


OPTIMIZERS: dict[str, Callable[[nn.Module], Tripping]] = {
    "adamw": lambda model: TrippingAdamW(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: TrippingSGD(model.parameters(), lr=1e-2, momentum=0.9),
}


class Training:
    """A model and its optimizer, and the places at which their steps can fail."""

    def __init__(self, strategy: str = "fsdp", optimizer: str = "adamw") -> None:
        torch.manual_seed(7)
        net = Net()
        options = _options(strategy) if world_size() > 1 else {}
        self.model = sw.fully_shard(net, units={Block, Touchy}, **options)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        touchy = net.blocks[1]
        assert isinstance(touchy, Touchy)
        self.touchy = touchy
        torch.manual_seed(100 + rank())

    def step(self, place: str = "") -> None:
        """One step, which fails at ``place``."""
        self.touchy.where = place
        self.optimizer.trips = place == "middle of step"
        hook = self.optimizer.register_step_pre_hook(lambda *_: _trip(place, "before step"))
        try:
            with sw.transaction(self.model, self.optimizer):
                self._body(place)
        finally:
            hook.remove()

    def _body(self, place: str) -> None:
        _trip(place, "data")
        batch = torch.randn(5, WIDTH)  # from the generator that is put back
        self.model(batch).square().mean().backward()
        _trip(place, "after backward")
        if place == "interrupt":
            raise KeyboardInterrupt
        sw.clip_grad_norm_((_trip(place, "clip", p) for p in self.model.parameters()), 0.1)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.optimizer.step()
        _trip(place, "after step")
        self.optimizer.zero_grad()

    def fingerprint(self) -> list[bytes]:
        """The bits of everything that a step changes."""
        (group,) = self.optimizer.param_groups
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [*self.model.parameters(), *self.model.buffers(), *gradients, *states]
        texts = [str(group["lr"]), str(len(gradients)), str(len(states))]
        return [
            *(_bits(x) for x in (*tensors, torch.get_rng_state())),
            *(text.encode() for text in texts),
        ]


def _trip(place: str, here: str, value: Any = None) -> Any:
    if place == here:
        raise ValueError("it hurts")
    return value


def _bits(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
    return local.detach().numpy().tobytes()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _mistakes() -> None:
    training = Training()
    model, optimizer = training.model, training.optimizer
    with pytest.raises(sw.PlanError, match="not sharded"):
        sw.transaction(nn.Linear(2, 2)).__enter__()
    with pytest.raises(sw.PlanError, match=r"blocks\.1 is a unit inside"):
        sw.transaction(training.touchy).__enter__()
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
        training._body("")
    assert not optimizer._optimizer_step_pre_hooks
    with sw.transaction(model, optimizer):
        training._body("")
        with torch.no_grad():
            next(model.parameters()).clamp_(-1, 1)  # after the optimizer's step, so it is undone


def _transaction(training: Training) -> Any:
    return sw.transaction(training.model, training.optimizer)
