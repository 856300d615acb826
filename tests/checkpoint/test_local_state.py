"""A returning replica takes the state of another one."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.local_state import LocalState
from shardwise.errors import PlanError
from tests.features.training import TrippingSGD
from tests.models import WIDTH, Block, Stack
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks
from tests.runtime.one_process import own_part

Make = Callable[[Iterator[nn.Parameter]], Optimizer]


def muon(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return sw.optim.Muon(matrix_groups(parameters))


def soap(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return sw.optim.SOAP(matrix_groups(parameters), precondition_frequency=2, damping=1e-3)


def adam8bit(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return sw.optim.Adam8bit(parameters, min_elements=0, block=4)


class Flattened(torch.optim.SGD):
    """Keeps sums of gradients, flattened, as Prodigy does."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["sum"] = state.get("sum", 0) + parameter.grad.flatten()
                parameter.sub_(state["sum"].view_as(parameter), alpha=0.01)


class Replica:
    """A replica on the same ranks as the others; its outer optimizer is plain SGD."""

    def __init__(self, make: Make, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = sw.fully_shard(Stack(1).double(), units=Block, granularity="row")
        self.inner = make(self.model.parameters())
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0, momentum=0.9)
        self.state = LocalState(self.model, self.inner, self.outer)

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            batch = torch.randn(12, WIDTH, dtype=torch.float64)
            self.model(own_part(batch)).square().mean().backward()
            self.inner.step()
            self.outer.step()
            self.inner.zero_grad()


def give(giver: Replica, taker: Replica) -> None:
    """Copy the state through the bytes that torchft sends."""
    file = io.BytesIO()
    giver.state.mark()
    torch.save(giver.state.save(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)  # plain data
    taker.state.load(state)


@pytest.mark.parametrize("make", [torch.optim.AdamW, muon, soap, adam8bit, Flattened])
@on_ranks(2)
def test_a_replica_continues_with_the_states_of_any_optimizer(make: Make) -> None:
    giver, taker = Replica(make, seed=3), Replica(make, seed=9)
    giver.train(range(3))
    taker.train(range(1))  # it was cut off since then
    give(giver, taker)
    for replica in (giver, taker):
        replica.train(range(3, 6))
    for given, taken in zip(giver.model.parameters(), taker.model.parameters(), strict=True):
        assert given.equal(taken)


@on_ranks(2)
def test_states_that_belong_to_no_parameter_are_taken_too() -> None:
    giver, taker = Replica(TrippingSGD, seed=3), Replica(TrippingSGD, seed=9)
    giver.train(range(3))
    give(giver, taker)
    giver.train(range(3, 4))
    states: dict[Any, Any] = taker.inner.state
    assert states["k"].tolist() == [3], "also a copy"
    stateless = Replica(TrippingSGD, seed=3)
    give(stateless, taker)
    assert "k" not in states


@on_ranks(2)
def test_parameters_that_another_optimizer_steps_are_taken_too() -> None:
    def norms_alone(parameters: Iterator[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.ndim == 1])

    giver, taker = Replica(norms_alone, seed=3), Replica(norms_alone, seed=9)
    giver.train(range(1))
    give(giver, taker)
    for given, taken in zip(giver.model.parameters(), taker.model.parameters(), strict=True):
        assert given.equal(taken)


@on_ranks(2)
def test_the_state_of_another_optimizer_changes_nothing() -> None:
    giver, taker = Replica(muon, seed=3), Replica(torch.optim.AdamW, seed=9)
    giver.train(range(1))
    before = [parameter.detach().clone() for parameter in taker.model.parameters()]
    with pytest.raises(PlanError, match=r"2 groups .* momentum.* expected 1 groups of AdamW"):
        give(giver, taker)
    for parameter, value in zip(taker.model.parameters(), before, strict=True):
        assert parameter.equal(value)
