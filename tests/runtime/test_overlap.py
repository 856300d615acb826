"""C4: gathers run while units compute. Both are slow by design, so that chance has no say."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

import shardwise as sw
from shardwise.transport.host.point_to_point import PointToPoint
from tests.ranks import run_on

WIRE_SECONDS = 0.03
COMPUTE_SECONDS = 0.06
NUM_UNITS = 6


def test_gathers_that_are_launched_ahead_overlap_compute() -> None:
    # A machine that stalls hides overlap and cannot feign it: the best of three counts.
    shares: list[float] = []
    while len(shares) < 3 and max(shares, default=0.0) <= 0.8:
        shares.append(min(run_on(2, _share_of_second_step, 1)))
    assert max(shares) > 0.8, shares


def test_gathers_that_are_launched_when_needed_are_waited_for() -> None:
    assert max(run_on(2, _share_of_second_step, 0)) < 0.2


class Pause(torch.autograd.Function):
    """Takes its time, in forward and backward; sleeping leaves the processor to the wire."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Pause.apply(self.linear(x), self.seconds)  # type: ignore[no-untyped-call]
        return y


@contextmanager
def slow_wire() -> Iterator[None]:
    exchange, swap = PointToPoint.exchange, PointToPoint.swap_messages

    def slow(wire: PointToPoint, *arguments: Any, **options: Any) -> None:
        time.sleep(WIRE_SECONDS)
        exchange(wire, *arguments, **options)

    def swap_slowly(wire: PointToPoint, *arguments: Any) -> dict[int, bytes]:
        time.sleep(WIRE_SECONDS / 2)  # before and after a gather in shared memory
        return swap(wire, *arguments)

    with (
        mock.patch.object(PointToPoint, "exchange", slow),
        mock.patch.object(PointToPoint, "swap_messages", swap_slowly),
    ):
        yield


def _share_of_second_step(prefetch: int) -> float:
    model = nn.Sequential(*(Slow() for _ in range(NUM_UNITS)))
    sw.fully_shard(model, units=Slow, prefetch=prefetch)
    x = torch.randn(2, 8)
    model(x).sum().backward()  # finds out the order of units
    for unit in model:
        assert isinstance(unit, Slow)
        unit.seconds = COMPUTE_SECONDS
    dist.barrier()  # the first gather should not wait for a rank that is still at the above
    with slow_wire():
        model(x).sum().backward()
    return sw.ledger(model).overlapped_share()
