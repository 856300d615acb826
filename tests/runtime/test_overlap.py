"""C4: gathers run while units compute, as the order of events shows."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.host.peers import Message
from shardwise.host.point_to_point import PointToPoint
from shardwise.runtime.ledger import Ledger
from shardwise.schedule.events import EventKind
from tests.ranks import on_ranks

SECONDS = 20.0
NUM_UNITS = 6
COMPUTING = threading.Event()  # exchanges between ranks run only while it is set


@on_ranks(2)
def test_gathers_that_are_launched_ahead_overlap_compute() -> None:
    """Exchanges stop between units, and a unit's compute ends only after all gathers."""
    model = _train(prefetch=1)
    events = sw.ledger(model).events()
    forwards = [event.unit for event in events if event.kind is EventKind.FORWARD]
    backwards = [event.unit for event in events if event.kind is EventKind.BACKWARD]
    for kind, order in ((EventKind.FORWARD, forwards), (EventKind.BACKWARD, backwards)):
        computes = {event.unit: i for i, event in enumerate(events) if event.kind is kind}
        inner = [unit for unit in order if unit]  # without the root
        for unit, following in itertools.pairwise(inner):
            between = events[computes[unit] : computes[following]]
            assert EventKind.WAIT in {e.kind for e in between if e.unit == following}
            assert EventKind.GATHER not in {e.kind for e in between if e.unit == following}


@on_ranks(2)
def test_gathers_that_are_launched_when_needed_are_waited_for() -> None:
    model = nn.Sequential(*(Gated() for _ in range(NUM_UNITS)))
    sw.fully_shard(model, units=Gated, prefetch=0)
    for _ in range(2):
        model(torch.randn(2, 32)).sum().backward()
    events = sw.ledger(model).events()
    under_way: set[int] = set()
    for event in events:
        if event.kind is EventKind.GATHER:
            under_way.add(event.unit)
        elif event.kind is EventKind.WAIT:
            under_way.discard(event.unit)
        elif event.kind in (EventKind.FORWARD, EventKind.BACKWARD):
            assert not under_way, str(event)
    assert sum(event.kind is EventKind.GATHER for event in events) >= NUM_UNITS


class Compute(torch.autograd.Function):
    """The identity; it ends when the collectives in flight have ended."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ledger: Ledger, is_first: bool, is_last: bool) -> Tensor:
        ctx.ledger, ctx.is_first = ledger, is_first
        _wait_for_collectives(ledger)
        if not is_last:
            COMPUTING.clear()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _wait_for_collectives(ctx.ledger)
        if not ctx.is_first:
            COMPUTING.clear()
        return gradients[0], None, None, None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.ledger: Ledger | None = None
        self.is_first = self.is_last = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.ledger is None:
            return y
        return Compute.apply(  # type: ignore[no-untyped-call, no-any-return]
            y, self.ledger, self.is_first, self.is_last
        )


def _train(prefetch: int) -> nn.Module:
    """Run a step that records the order of units, and one with stopped exchanges."""
    model = nn.Sequential(*(Gated() for _ in range(NUM_UNITS)))
    sw.fully_shard(model, units=Gated, prefetch=prefetch)
    x = torch.randn(2, 32)
    model(x).sum().backward()
    for position, unit in enumerate(model):
        assert isinstance(unit, Gated)
        unit.ledger = sw.ledger(model)
        unit.is_first, unit.is_last = position == 0, position == NUM_UNITS - 1
    COMPUTING.set()
    with _stopped_between_units():
        model(x).sum().backward()
    return model


def _wait_for_collectives(ledger: Ledger) -> None:
    COMPUTING.set()
    for record in ledger.records(ledger.step):
        if record.event.kind in (EventKind.GATHER, EventKind.REDUCE):
            assert all(work.wait(SECONDS) for work in record.works), str(record.event)


@contextmanager
def _stopped_between_units() -> Iterator[None]:
    exchange, swap = PointToPoint.exchange, PointToPoint.swap_messages

    def exchange_in_compute(peers: PointToPoint, *arguments: Any, **options: Any) -> None:
        assert COMPUTING.wait(SECONDS), "compute waits for an exchange"
        exchange(peers, *arguments, **options)

    def swap_in_compute(peers: PointToPoint, *arguments: Any) -> dict[int, Message]:
        assert COMPUTING.wait(SECONDS), "compute waits for an exchange"
        return swap(peers, *arguments)  # before and after a gather in shared memory

    with (
        mock.patch.object(PointToPoint, "exchange", exchange_in_compute),
        mock.patch.object(PointToPoint, "swap_messages", swap_in_compute),
    ):
        yield
