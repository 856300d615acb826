"""The backend "hostccl" gives what Gloo gives, whichever way its ranks are connected."""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from torch.distributed.distributed_c10d import _coalescing_manager

from shardwise.host.peers import INLINE_BYTES
from shardwise.host.point_to_point import PointToPoint
from shardwise.hostccl import HostGroup, RankLostError
from shardwise.hostccl.works import HostWork
from tests import ranks
from tests.covering import cover
from tests.host.ways import WAYS, only
from tests.ranks import RankFailed, on_ranks, run_on
from tests.runtime.one_process import rank, world_size as num_ranks

SIZES = [1, 7, 3 * INLINE_BYTES + 5]  # elements for each rank
DTYPES = [torch.float64, torch.bfloat16, torch.int64]
OPERATORS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
DEADLINE = 60.0  # of what takes a second

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

Group = dist.ProcessGroup | None


# -- the same results as Gloo --------------------------------------------------------------------


def _broadcast(group: Group, own: Tensor, root: int) -> list[Tensor]:
    dist.broadcast(own, root, group)
    return [own]


def _all_gather(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    slots = [torch.zeros_like(own) for _ in range(num_ranks())]
    dist.all_gather(slots, own, group)
    return slots


def _all_gather_single(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    whole = own.new_zeros(num_ranks() * own.numel())
    dist.all_gather_into_tensor(whole, own, group)
    in_place = own.new_zeros(num_ranks() * own.numel())
    slot = in_place.view(num_ranks(), -1)[rank()]
    slot.copy_(own)
    dist.all_gather_into_tensor(in_place, slot, group)
    return [whole, in_place]


def _all_gather_coalesced(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    wholes = [own.new_zeros(num_ranks() * own.numel()) for _ in range(3)]
    with _coalescing_manager(group):
        for number, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, own + number, group)
    return wholes


def _gather(group: Group, own: Tensor, root: int) -> list[Tensor]:
    slots = [torch.zeros_like(own) for _ in range(num_ranks())] if rank() == root else None
    dist.gather(own, slots, root, group)
    return slots or []


def _scatter(group: Group, own: Tensor, root: int) -> list[Tensor]:
    parts = [own + number for number in range(num_ranks())] if rank() == root else None
    into = torch.zeros_like(own)
    dist.scatter(into, parts, root, group)
    return [into]


def _all_to_all_single(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    rows = own.expand(num_ranks(), -1) + torch.arange(num_ranks()).to(own.dtype).view(-1, 1)
    into = torch.zeros_like(rows)
    dist.all_to_all_single(into, rows.contiguous(), group=group)
    return [into]


def _uneven_all_to_all_single(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    to, back = [(rank() + r) % 3 for r in range(num_ranks())], [0] * num_ranks()
    back = [(r + rank()) % 3 for r in range(num_ranks())]
    rows = own.repeat(sum(to), 1)
    into = own.new_zeros(sum(back), own.numel())
    dist.all_to_all_single(into, rows, back, to, group=group)
    return [into]


def _all_to_all(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    sent = [own.repeat(1 + (rank() + r) % 3) + r for r in range(num_ranks())]
    into = [own.new_zeros(own.numel() * (1 + (r + rank()) % 3)) for r in range(num_ranks())]
    if dist.get_backend(group) == "gloo":  # which has no such operation
        works = [dist.isend(sent[r], r, group) for r in range(num_ranks()) if r != rank()]
        works += [dist.irecv(into[r], r, group) for r in range(num_ranks()) if r != rank()]
        into[rank()].copy_(sent[rank()])
        for work in works:
            assert work is not None
            work.wait()
    else:
        dist.all_to_all(into, sent, group)
    return into


def _functional(group: Group, own: Tensor, _root: int) -> list[Tensor]:
    """What DTensors use; it comes from C++."""
    assert group is not None
    rows = own.repeat(num_ranks())
    return [
        all_reduce(own, "sum", group).clone(),
        all_gather_tensor(own, 0, group).clone(),
        reduce_scatter_tensor(rows, "max", 0, group).clone(),
        all_to_all_single(rows, None, None, group).clone(),
    ]


COLLECTIVES: list[Callable[[Group, Tensor, int], list[Tensor]]] = [
    *(_broadcast, _all_gather, _all_gather_single, _all_gather_coalesced, _gather, _scatter),
    *(_all_to_all_single, _uneven_all_to_all_single, _all_to_all, _functional),
]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda function: function.__name__[1:])
@on_ranks(2, thorough=(4,))
def test_data_arrives_as_with_gloo(collective: Callable[..., list[Tensor]]) -> None:
    rows = list(itertools.product(DTYPES, SIZES, (0, num_ranks() - 1)))
    _check_data(collective, dist.new_group(backend="hostccl"), rows)


def _check_data(
    collective: Callable[..., list[Tensor]], group: Group, rows: Iterable[tuple[Any, ...]]
) -> None:
    for dtype, size, root in rows:
        own = _numbers(size, dtype)
        expected = collective(dist.group.WORLD, own.clone(), root)
        found = collective(group, own.clone(), root)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (dtype, size, root)


def _all_reduce(group: Group, own: Tensor, operator: Any) -> list[Tensor]:
    dist.all_reduce(own, operator, group)
    return [own]


def _all_reduce_coalesced(group: Group, own: Tensor, operator: Any) -> list[Tensor]:
    tensors = [own, own + 1, own[:1].clone()]
    with _coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, operator, group)
    return tensors


def _reduce(group: Group, own: Tensor, operator: Any) -> list[Tensor]:
    root = num_ranks() - 1
    before = own.clone()
    dist.reduce(own, root, operator, group)
    if dist.get_backend(group) == "hostccl" and rank() != root:
        assert torch.equal(own, before)
    return [own] if rank() == root else []


def _reduce_scatter(group: Group, own: Tensor, operator: Any) -> list[Tensor]:
    total = torch.zeros_like(own)
    dist.reduce_scatter(total, [own * 2**r for r in range(num_ranks())], operator, group)
    return [total]


def _reduce_scatter_single(group: Group, own: Tensor, operator: Any) -> list[Tensor]:
    total = torch.zeros_like(own)
    rows = torch.cat([own * 2**r for r in range(num_ranks())])
    dist.reduce_scatter_tensor(total, rows, operator, group)
    return [total]


def _reduce_scatter_coalesced(group: Group, own: Tensor, operator: Any) -> list[Tensor]:
    totals = [torch.zeros_like(own) for _ in range(2)]
    with _coalescing_manager(group):
        for number, total in enumerate(totals):
            rows = torch.cat([own * 2 ** (r + number) for r in range(num_ranks())])
            dist.reduce_scatter_tensor(total, rows, operator, group)
    return totals


REDUCTIONS: list[Callable[[Group, Tensor, Any], list[Tensor]]] = [
    *(_all_reduce, _all_reduce_coalesced, _reduce),
    *(_reduce_scatter, _reduce_scatter_single, _reduce_scatter_coalesced),
]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda function: function.__name__[1:])
@on_ranks(2, thorough=(4,))
def test_reductions_are_those_of_gloo(reduction: Callable[..., list[Tensor]]) -> None:
    group = dist.new_group(backend="hostccl")
    rows = list(itertools.product(DTYPES, SIZES, [*OPERATORS, *BITWISE]))
    _check_reduction(reduction, group, rows)


@pytest.mark.parametrize("ways", [("sockets",) * 4, ("gloo",) * 4, ("memory",) * 2 + ("gloo",) * 2])
@on_ranks(4)
def test_all_collectives_work_however_ranks_are_connected(ways: tuple[str, ...]) -> None:
    """In the last case, each pair of ranks has one of the three ways.

    Each size, root and operator once: the other tests have all of their combinations.
    """
    data = cover(list(itertools.product([torch.float64], SIZES, (0, num_ranks() - 1))), 1)
    sums = cover(list(itertools.product([torch.float64], SIZES, OPERATORS)), 1)
    with only(ways[rank()]):
        group = dist.new_group(backend="hostccl")
    for collective in COLLECTIVES:
        _check_data(collective, group, data)
    for reduction in REDUCTIONS:
        _check_reduction(reduction, group, sums)


def _check_reduction(
    reduction: Callable[..., list[Tensor]], group: Group, rows: Iterable[tuple[Any, ...]]
) -> None:
    for dtype, size, operator in rows:
        if operator in (BITWISE if dtype.is_floating_point else [ReduceOp.AVG]):
            continue
        own = _numbers(size, dtype)
        expected = reduction(dist.group.WORLD, own.clone(), operator)
        found = reduction(group, own.clone(), operator)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (dtype, size, operator)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3)
def test_all_ranks_have_the_same_bits(way: str) -> None:
    """The numbers are such that another order of the sum has other bits."""
    with only(way):
        group = dist.new_group(backend="hostccl")
    for num_elements in (10, 4 * INLINE_BYTES + 1):
        own = torch.randn(num_elements, generator=torch.Generator().manual_seed(rank()))
        slots = [torch.zeros_like(own) for _ in range(3)]
        dist.all_gather(slots, own, group)
        dist.all_reduce(own, group=group)
        assert torch.equal(own, slots[0] + slots[1] + slots[2])
        assert not torch.equal(own, slots[0] + (slots[1] + slots[2]))


OTHER_DTYPES = [torch.float16, torch.float32, torch.complex64, torch.int8, torch.uint8, torch.int32]


@pytest.mark.parametrize("dtype", [*OTHER_DTYPES, torch.bool], ids=str)
@on_ranks(2)
def test_every_dtype_of_gloo_is_summed(dtype: torch.dtype) -> None:
    group = dist.new_group(backend="hostccl")
    for size in SIZES:
        expected, found = (_numbers(size, dtype) for _ in range(2))
        dist.all_reduce(expected)
        dist.all_reduce(found, group=group)
        assert torch.equal(found, expected), size


# -- works, threads and groups -------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_messages_find_each_other_by_tag(way: str) -> None:
    """Both ranks send first, and receive in another order than was sent."""
    with only(way):
        group, other = dist.new_group(backend="hostccl"), 1 - rank()
    for num_elements in (4, INLINE_BYTES):
        sent = [torch.full((num_elements,), 10.0 * rank() + n) for n in range(4)]
        received = [torch.zeros(num_elements) for _ in range(4)]
        tags = (1, 2, 2, 3)  # two messages with one tag arrive in order
        works = [dist.isend(sent[n], other, group, tags[n]) for n in range(4)]
        works += [dist.irecv(received[n], other, group, tags[n]) for n in (3, 1, 2, 0)]
        total = torch.ones(num_elements)
        dist.all_reduce(total, group=group)  # does not wait for the messages
        for work in works:
            assert work is not None
            work.wait()
        assert [one[0].item() for one in received] == [10.0 * other + n for n in range(4)]
        assert total[0] == 2


@on_ranks(2)
def test_tensors_of_any_layout_are_moved() -> None:
    group, strided = dist.new_group(backend="hostccl"), torch.zeros(6, 4).t()
    channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (strided, channels_last, torch.zeros(8)[::2], torch.zeros(())):
        expected = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        if rank() == 0:
            tensor.copy_(expected)
        dist.broadcast(tensor, 0, group)
        assert torch.equal(tensor, expected)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, 2 * expected)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank())))
    dist.broadcast(parameter, 1, group)
    assert parameter.tolist() == [1.0] * 3
    with torch.inference_mode():
        made = torch.ones(3)
        dist.all_reduce(made, group=group)
    assert made.tolist() == [2.0] * 3


@on_ranks(2)
def test_works_overlap_with_the_caller_and_run_in_order() -> None:
    group, may_begin = dist.new_group(backend="hostccl"), threading.Event()
    exchange = PointToPoint.exchange

    def wait_first(*args: Any, **options: Any) -> None:
        assert may_begin.wait(DEADLINE)
        exchange(*args, **options)

    tensor = torch.ones(4)
    with mock.patch.object(PointToPoint, "exchange", wait_first):
        works = [_launch_all_reduce(tensor, group) for _ in range(3)]
        futures = [work.get_future() for work in works]
        assert not any(work.is_completed() for work in works)
        with pytest.raises(TimeoutError, match="all_reduce has not ended"):
            works[0].wait(timedelta(milliseconds=10))
        seen: list[float] = []
        chained = futures[0].then(lambda future: seen.append(future.value()[0][0].item()))
        may_begin.set()
        dist.all_reduce(tensor, ReduceOp.PRODUCT, group)  # on this thread, but not before the works
        assert torch.equal(tensor, torch.full((4,), 64.0))
        assert torch.equal(futures[2].wait()[0], tensor)
        chained.wait()
        assert seen
    assert all(work.is_completed() and work.is_success() for work in works)


def test_a_work_is_complete_while_another_thread_waits_for_it() -> None:
    work = HostWork("work", lambda: None, [])
    assert not work.is_completed()
    assert work.run() is None
    with work._running:  # as in the `wait` of that thread
        assert work.is_completed()
        assert work.get_future().wait() == []


@on_ranks(2)
def test_callbacks_may_wait_for_later_works() -> None:
    """As in DDP's hook for PowerSGD."""
    group, tensor = dist.new_group(backend="hostccl"), torch.ones(INLINE_BYTES)
    may_begin = threading.Event()

    def reduce_again(_future: Any) -> Any:
        assert may_begin.wait(DEADLINE)  # so that the last work is already waiting
        return _launch_all_reduce(tensor, group).get_future().wait()[0]

    first = _launch_all_reduce(tensor, group).get_future().then(reduce_again)
    last = _launch_all_reduce(tensor, group)
    may_begin.set()
    assert first.wait() is not None
    last.wait()
    assert tensor.tolist() == [8.0] * INLINE_BYTES


def _launch_all_reduce(tensor: Tensor, group: Group) -> Any:
    return dist.all_reduce(tensor, group=group, async_op=True)


@on_ranks(4)
def test_groups_and_subgroups_are_independent() -> None:
    """Ranks of two groups meet in different orders."""
    everyone = dist.new_group(backend="hostccl")
    pairs = [dist.new_group([0, 2], backend="hostccl"), dist.new_group([1, 3], backend="hostccl")]
    pair = pairs[rank() % 2]
    assert isinstance(pair, HostGroup)
    one, other = torch.full((INLINE_BYTES,), float(rank())), torch.full((3,), float(rank()))
    works = [
        dist.all_reduce(one, group=everyone, async_op=True),
        dist.all_reduce(other, group=pair, async_op=True),
    ]
    for work in works if rank() % 2 else reversed(works):
        assert work is not None
        work.wait()
    assert one[0] == 6
    assert other[0] == (4 if rank() % 2 else 2)
    last = torch.full((2,), float(rank()))
    dist.broadcast(last, 2 + rank() % 2, pair)  # a rank of the job
    assert last[0] == 2 + rank() % 2
    dist.barrier(pair)
    dist.destroy_process_group(pair)
    dist.barrier(everyone)


# -- errors --------------------------------------------------------------------------------------


def test_a_dead_rank_raises_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", DEADLINE)
    for num_elements in (4, 4 * INLINE_BYTES):
        with pytest.raises(RankFailed) as failure:
            run_on(3, _outlive, num_elements, deadline=DEADLINE)
        assert failure.value.headlines == {2: "was killed by SIGKILL"}


def _outlive(num_elements: int) -> None:
    group = dist.new_group(backend="hostccl", timeout=timedelta(minutes=9))
    tensor = torch.ones(num_elements)
    dist.all_reduce(tensor, group=group)
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError, match=f"rank {rank()} lost rank 2"):
        dist.all_reduce(tensor, group=group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError, match="lost rank 2"):  # as from Gloo
        work.get_future().wait()
    assert isinstance(work.exception(), RankLostError)
    dist.send(tensor, 1, group) if rank() == 0 else dist.recv(tensor, 0, group)


@on_ranks(2)
def test_a_rank_that_does_not_come_is_a_lost_one_after_the_timeout() -> None:
    group = dist.new_group(backend="hostccl", timeout=timedelta(seconds=0.2))
    if rank() == 0:
        with pytest.raises(RankLostError, match=r"rank 0 lost rank 1: it sent nothing for 0.2 s"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_destroyed_group_ends_works_that_wait(way: str) -> None:
    with only(way):
        group = dist.new_group(backend="hostccl")
    if rank() == 0:
        work = dist.all_reduce(torch.ones(3 * INLINE_BYTES), group=group, async_op=True)
        assert work is not None
        with pytest.raises(RankLostError, match="rank 0 lost rank 1"):
            work.wait()
    else:
        dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(2)
def test_an_error_of_one_rank_ends_the_group() -> None:
    group, tensor = dist.new_group(backend="hostccl"), torch.ones(3 * INLINE_BYTES)
    failing = mock.patch.object(PointToPoint, "exchange", side_effect=MemoryError("too little"))
    with failing if rank() == 0 else nullcontext():
        error = MemoryError if rank() == 0 else RankLostError
        with pytest.raises(error, match=("too little", "rank 1 lost rank 0")[rank()]):
            dist.all_reduce(tensor, group=group)


@on_ranks(2)
def test_mistakes_are_named_before_anything_is_sent() -> None:
    """The next collective has the same number on all ranks, even if only one has made a mistake."""
    group = dist.new_group(backend="hostccl")
    if rank() == 0:
        with pytest.raises(ValueError, match=r"ReduceOp\.AVG of torch\.int64"):
            dist.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.AVG, group)
        with pytest.raises(ValueError, match="on meta"):
            dist.all_reduce(torch.ones(2, device="meta"), group=group)
        with pytest.raises(ValueError, match="3 elements for an output of 4 elements"):
            dist.all_gather([torch.ones(4)] * 2, torch.ones(3), group)
        with pytest.raises(ValueError, match="expected a number from 0"):
            dist.send(torch.ones(1), 1, group, tag=1 << 30)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 2.0]


def _numbers(size: int, dtype: torch.dtype) -> Tensor:
    """1 to 3, so that sums and products of several are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(rank())
    return torch.randint(1, 4, (size,), generator=generator).to(dtype)
