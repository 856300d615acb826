"""All-gathers and reductions between real ranks, and how ranks resynchronize after errors."""

import contextlib
import itertools
import re
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.comm.api import (
    CollectiveId,
    Operation,
    RankGroup,
    Reduction,
    Stage,
    Work,
)
from shardwise.comm.communicator import Collectives, Communicator, communicator
from shardwise.comm.device import ThreadStream
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.queue import QueueState
from shardwise.comm.tree import tree_sum
from shardwise.features.host_collectives import HostCollectives
from shardwise.host import point_to_point
from shardwise.host.peers import INLINE_BYTES
from shardwise.host.point_to_point import _PIECE_BYTES
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.mesh import DataParallelMesh, resolve_mesh
from shardwise.watch.monitor import Patience
from tests.covering import covered_first
from tests.host.ways import only
from tests.ranks import on_ranks
from tests.waiting import PATIENCE_SECONDS, eventually
from tests.watching import monitor_of, watch_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]
WINDOWS = 2 * _PIECE_BYTES // 4 + 1  # float32 elements that need more than one window
SIZES = [0, 1, 7, 1025, 300_001]  # the last one is read from memory, in pieces
CASTS = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float32, torch.bfloat16),
]
IMPATIENT = 0.05  # seconds between looks during a wait


@on_ranks(3, thorough=(2, 4))
def test_all_reduces_equal_those_of_the_backend() -> None:
    """Small ones, which are sent whole; and large ones, also with elements left over."""
    mesh = _mesh("ddp")
    comm, stages = _communicator(), mesh.reduction
    for size in (*SIZES[1:], 20_003, 4 * WINDOWS + 3):
        flat = torch.randint(0, 50, (size,)).add_(comm.rank).float()
        out = torch.empty_like(flat)
        comm.wait(comm.reduce.reduce(Reduction(flat, out, None, out, stages), "reduce"))
        expected = flat.clone()
        dist.all_reduce(expected)
        assert torch.equal(out, expected), size


@on_ranks(2, 3, thorough=(4,))
def test_results_equal_those_of_torch() -> None:
    comm = _communicator()
    for dtype in DTYPES:
        for size in SIZES:
            # Sums of small integers are exact in every dtype and order.
            own = torch.randint(0, 50, (size,)).add_(comm.rank).to(dtype)
            pending, gathered = _gather(comm, own)
            comm.wait(pending)
            expected = torch.empty_like(gathered)
            dist.all_gather_into_tensor(expected, own)
            assert torch.equal(gathered, expected), f"{size} of {dtype}"

            flat = torch.randint(0, 50, (comm.num_ranks * size,)).add_(comm.rank).to(dtype)
            before = flat.clone()
            pending, out = _reduce(comm, flat)
            comm.wait(pending)
            expected = torch.empty_like(out)
            dist.reduce_scatter_tensor(expected, flat)
            assert torch.equal(out, expected), f"{size} of {dtype}"
            assert torch.equal(flat, before), "a reduction only reads its input"


def test_a_tree_of_any_number_of_rows() -> None:
    one, two, three, four, five = rows = torch.randn(5, 100)
    expected = ((one + two) + (three + four)) + five
    assert torch.equal(tree_sum(rows), expected)
    assert torch.equal(rows[0], one)
    total = tree_sum(rows, in_place=True)
    assert torch.equal(total, expected)
    assert total.data_ptr() == rows.data_ptr()  # no further memory


@on_ranks(3, 4)
def test_sums_are_taken_in_a_tree_over_the_order_of_ranks() -> None:
    comm = _communicator()
    ranks = comm.num_ranks
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (33, 20_001, WINDOWS)):
        everyone = torch.randn(ranks, ranks, size).to(dtype)  # the same on every rank
        pending, out = _reduce(comm, everyone[comm.rank].reshape(-1))
        comm.wait(pending)
        first, second, third, *fourth = everyone[:, comm.rank]
        expected = (first + second) + (third + fourth[0] if fourth else third)
        assert torch.equal(out, expected), "bitwise equal"


@pytest.mark.parametrize("preset", ["fsdp", "ddp", "hsdp", "hfsdp"])
@on_ranks(4)
def test_every_backend_sums_in_one_tree(preset: str) -> None:
    """And sends as many bytes as when it sums in its own order."""
    strategy = PRESETS[preset]
    mesh = resolve_mesh(None, strategy, sharding_factor=2 if strategy.num_axes > 1 else None)
    torch_queue = ProcessGroupCollectives(mesh.world, CPU, "gloo", f"tree {preset}")
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (3, 20_001)):
        slots = mesh.shards.size if mesh.is_two_level else mesh.row.size
        everyone = torch.randn(mesh.num_ranks, slots * size).to(dtype)  # the same on every rank
        found = []
        for queue in (_communicator().reduce, torch_queue):
            flat = everyone[mesh.group_rank].clone()
            out = torch.empty(size, dtype=dtype)
            inner = flat.view(mesh.row.size, -1)[mesh.row.index] if mesh.is_two_level else out
            reduction = Reduction(flat, inner, None, out, mesh.reduction, 0.25, in_tree=True)
            work = queue.reduce(reduction, "reduce")
            _communicator().wait(work)
            found.append((out, mesh.axis_bytes([work])))
        first, second, third, fourth = everyone.view(mesh.num_ranks, slots, size)
        expected = ((first + second) + (third + fourth))[mesh.rank if slots > 1 else 0] * 0.25
        for out, num_bytes in found:
            assert torch.equal(out, expected)
            assert num_bytes == found[0][1]


@pytest.mark.parametrize(
    ("way", "preset", "world_size"),
    covered_first(
        (way, *row)
        for way, row in itertools.product(
            ("memory", "gloo"),
            [*itertools.product(("fsdp", "ddp"), (3, 1, 2, 4)), ("hsdp", 4), ("hfsdp", 4)],
        )
    ),
)
@on_ranks()
def test_sums_are_cast_to_the_dtype_of_their_output(preset: str, way: str) -> None:
    strategy, size = PRESETS[preset], dist.get_world_size()
    factor = size // 2 if strategy.num_axes > 1 else None
    mesh = resolve_mesh(None, strategy, sharding_factor=factor)
    with only(way):
        comm = Communicator(mesh.world, CPU)
    for (of, to), num_elements in itertools.product(CASTS, (33, 20_001, WINDOWS)):
        _check_cast(mesh, comm, of, to, num_elements)


@on_ranks(2, 4)
def test_collectives_of_a_queue_run_in_order() -> None:
    comm = _communicator()
    before, other = _state(comm.gather), _state(comm.reduce)
    launched = [
        _gather(comm, torch.full((number,), float(number)), f"gather {number}")
        for number in range(8)
    ]
    pendings = [pending for pending, _ in launched]
    comm.wait(pendings[-1])
    for number, (pending, flat) in enumerate(launched):
        assert pending.done, "earlier collectives have ended"
        assert torch.equal(flat, torch.full_like(flat, number))
    times = [moment for pending in pendings for moment in pending.span]
    assert times == sorted(times)
    collectives = [pending.collective for pending in pendings]
    assert collectives[0] is not None
    world, first = comm.world, collectives[0].number
    assert collectives == [
        CollectiveId(first + size, f"gather {size}", 4 * size, world.ranks, world.digest)
        for size in range(8)
    ]
    after = _state(comm.gather)
    assert after.issued == before.issued + 8
    tags = [collective.tag for collective in collectives if collective is not None]
    assert list(after.ended)[-8:] == tags
    assert all(after.has_begun(one) for one in collectives if one is not None)
    assert _state(comm.reduce) == other, "the other queue has its own numbers"
    by_rank: list[list[int]] = [[]] * comm.num_ranks
    dist.all_gather_object(by_rank, tags)
    assert all(others == tags for others in by_rank)


@on_ranks(3)
def test_launching_returns_before_the_slowest_rank_arrives() -> None:
    """The last rank arrives only after the others have returned from the launch."""
    comm = _communicator()
    is_last = comm.rank == comm.num_ranks - 1
    if is_last:
        dist.barrier()
        time.sleep(0.05)
    arrived = time.perf_counter()
    gathering, gathered = _gather(comm, torch.ones(3))
    reducing, reduced = _reduce(comm, torch.ones(3 * comm.num_ranks))
    if not is_last:
        assert not gathering.done
        assert not reducing.done
        arrived = time.perf_counter()
        dist.barrier()
    for pending, result, expected in ((gathering, gathered, 1.0), (reducing, reduced, 3.0)):
        comm.wait(pending)
        assert torch.equal(result, torch.full_like(result, expected))
        assert pending.span[1] > arrived


@on_ranks(2)
def test_gathers_do_not_queue_behind_reductions() -> None:
    comm = _communicator()
    if comm.rank == 0:
        reducing, out = _reduce(comm, torch.ones(6))
        _check_gather(comm)
        assert not reducing.done
    else:
        _check_gather(comm)
        dist.barrier()
        reducing, out = _reduce(comm, torch.ones(6))
    if comm.rank == 0:
        dist.barrier()
    comm.wait(reducing)
    assert torch.equal(out, torch.full((3,), 2.0))


@on_ranks(2)
def test_a_slot_is_filled_when_its_gather_runs() -> None:
    """A gather that waits behind another one has not written to its buffer."""
    comm = _communicator()
    if comm.rank == 0:
        first, _ = _gather(comm, torch.ones(3))
        second, flat = _gather(comm, torch.ones(3))
        assert not first.wait(0.1)
        assert torch.equal(flat, torch.full((6,), -1.0))
        dist.barrier()
    else:
        dist.barrier()
        _gather(comm, torch.ones(3))
        second, flat = _gather(comm, torch.ones(3))
    comm.wait(second)
    assert torch.equal(flat, torch.ones(6))


@pytest.mark.parametrize("difference", ["label", "size", "number"])
@on_ranks(2)
def test_different_collectives_never_mix(difference: str) -> None:
    comm = _communicator()
    _check_gather(comm)
    odd = comm.rank == 1
    if odd and difference == "number":
        assert isinstance(comm.gather, HostCollectives)
        comm.gather._numbers[comm.world.digest] += 1
    size = 5 if odd and difference == "size" else 3
    label = "gather b" if odd and difference == "label" else "gather a"
    with _hurried(comm):
        pending, flat = _gather(comm, torch.full((size,), 8.0), label)
        with pytest.raises(sw.RanksDiverged) as caught:
            comm.wait(pending)
        own = flat.view(2, -1)[comm.rank]
        assert torch.equal(own, torch.full((size,), 8.0))
        assert torch.equal(flat.view(2, -1)[1 - comm.rank], torch.full((size,), -1.0))
        comm.watch.recover()
        assert pending.done
        for _ in range(3):
            _check_gather(comm)
    issued = [0, 0]
    dist.all_gather_object(issued, _state(comm.gather).issued)
    assert issued[0] == issued[1], "the ranks are synchronized again"
    texts = [""] * 2
    dist.all_gather_object(texts, str(caught.value))
    assert texts[0] == texts[1], "the same on every rank"
    for number in range(2):
        assert re.search(rf"\n  {number} +5 +testing ", texts[0])


def _wait_for(event: threading.Event) -> None:
    event.wait(PATIENCE_SECONDS)


@on_ranks(2)
def test_a_wait_ends_with_its_result_if_a_rank_has_raised_after_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is late raises its own error, if all ranks raise at one place."""
    comm, known = _communicator(), threading.Event()
    if comm.rank == 1:
        comm.watch.abort(ValueError("it hurts"))
    else:
        with _hurried(comm):
            check, monitor = monitor_of(comm).check_reports, monitor_of(comm)
            late = ThreadStream("late").submit(partial(_wait_for, known))

            def check_reports(epoch: int) -> None:
                try:
                    check(epoch)
                except sw.PeerAborted:
                    known.set()
                    assert late.wait(PATIENCE_SECONDS)
                    raise

            monkeypatch.setattr(monitor, "check_reports", check_reports)
            comm.wait(late)
            assert known.is_set()
            monkeypatch.undo()
            comm.watch.abort(ValueError("it hurts here, too"))
    comm.watch.recover()
    _check_gather(comm)


@on_ranks(3)
def test_ranks_that_sum_in_pieces_through_gloo_recover() -> None:
    """Gloo's `abort` would not end the exchange that the other ranks are in."""
    with only("gloo"):
        comm = Communicator(_mesh("fsdp").world, CPU)
    dist.barrier()  # a rank that closes its connections could end those that others are opening
    piece = mock.patch.object(point_to_point, "_GLOO_PIECE_BYTES", 2 * INLINE_BYTES)
    with _hurried(comm), piece:
        if comm.rank == 1:
            comm.watch.abort(ValueError("it hurts"))
        else:
            pending, _ = _reduce(comm, torch.ones(3 * WINDOWS))
            with pytest.raises(sw.PeerAborted):
                comm.wait(pending)
        comm.watch.recover()
        pending, out = _reduce(comm, torch.ones(3 * WINDOWS))
        comm.wait(pending)
    assert torch.equal(out, torch.full((WINDOWS,), 3.0))


@on_ranks(2)
def test_a_rank_that_leaves_a_large_sum_through_gloo_recovers() -> None:
    """Gloo itself would wait for the rest of a message that is half sent."""
    with only("gloo"):
        comm = Communicator(_mesh("fsdp").world, CPU)
    dist.barrier()
    with _hurried(comm):
        pending, _ = _reduce(comm, torch.ones(2 << 24))
        if comm.rank == 1:
            time.sleep(0.02)  # the sum takes about twice as long
            comm.watch.abort(ValueError("it hurts"))
        else:
            with contextlib.suppress(sw.PeerAborted):
                comm.wait(pending)
                comm.wait(_gather(comm, torch.ones(1 << 24), "next")[0])
        comm.watch.recover()
        _check_gather(comm)


@on_ranks(2)
def test_a_slow_rank_is_waited_for() -> None:
    """A rank that computes publishes no report, so the others wait for many looks."""
    comm = _communicator()
    with _hurried(comm):
        if comm.rank == 1:
            time.sleep(8 * IMPATIENT)
        for _ in range(20):  # a queue forgets the gather that rank 0 waited for
            _check_gather(comm)
        if comm.rank == 0:
            time.sleep(8 * IMPATIENT)
        _check_gather(comm)


@on_ranks(2)
def test_a_group_has_one_communicator() -> None:
    comm = _communicator()
    assert _communicator() is comm
    alone = RankGroup((0,), 0, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    other = communicator(alone, CPU)
    assert other is not comm
    assert other is communicator(alone, CPU)


@on_ranks(2)
def test_a_communicator_is_freed_with_its_group() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = RankGroup((0,), 0, group)
    comm = communicator(alone, CPU)
    comm.wait(comm.gather.all_gather(torch.zeros(3), alone, "gather"))
    watched: list[weakref.ref[Any]] = [weakref.ref(comm), weakref.ref(comm.gather.stream)]
    dist.destroy_process_group(group)
    del group, alone, comm
    assert eventually(lambda: all(reference() is None for reference in watched))


def test_one_rank_needs_no_backend() -> None:
    alone = RankGroup((0,), 0)
    comm = Communicator(alone, CPU)
    flat, out, filled = torch.arange(5.0), torch.zeros(5), torch.zeros(5)
    assert not comm.watch.is_active
    comm.wait(comm.gather.all_gather(filled, alone, "gather", lambda: _fill(filled, 3)))
    stages = (Stage(Operation.REDUCE_SCATTER, alone),)
    comm.wait(comm.reduce.reduce(Reduction(flat, out, None, out, stages), "reduce"))
    assert torch.equal(filled, torch.full((5,), 3.0))
    assert torch.equal(out, flat)
    failing = comm.gather.all_gather(flat, alone, "gather", _raise)
    with pytest.raises(ZeroDivisionError):
        comm.wait(failing)
    comm.watch.recover()
    comm.wait(comm.gather.all_gather(flat, alone, "gather"))


# -- in a rank -----------------------------------------------------------------------------------


def _mesh(preset: str) -> DataParallelMesh:
    return resolve_mesh(None, PRESETS[preset])


def _communicator() -> Communicator:
    comm = communicator(_mesh("fsdp").world, CPU)
    comm.watch.recover()  # an earlier test may have ended in an error
    comm.place.step, comm.place.where = 5, "testing"
    return comm


def _fill(tensor: Tensor, value: float) -> None:
    tensor.fill_(value)


def _raise() -> None:
    raise ZeroDivisionError("it hurts")


def _gather(comm: Communicator, own: Tensor, label: str = "gather") -> tuple[Work, Tensor]:
    """Launch a gather of ``own`` [S]: the result [ranks * S] is -1 where nothing was received."""
    flat = torch.zeros(comm.num_ranks * own.numel(), dtype=own.dtype).sub_(1)
    slot = flat.view(comm.num_ranks, -1)[comm.rank] if own.numel() else flat
    return comm.gather.all_gather(flat, comm.world, label, lambda: _copy(slot, own)), flat


def _copy(to: Tensor, of: Tensor) -> None:
    to.copy_(of)


def _reduce(comm: Communicator, flat: Tensor, label: str = "reduce") -> tuple[Work, Tensor]:
    """Launch a sum of ``flat`` [ranks * S]: the result is this rank's slot [S]."""
    size = flat.numel() // comm.num_ranks
    out = torch.zeros(size, dtype=flat.dtype).sub_(1)
    stages = (Stage(Operation.REDUCE_SCATTER, comm.world),)
    return comm.reduce.reduce(Reduction(flat, out, None, out, stages), label), out


def _check_gather(comm: Communicator, size: int = 3) -> None:
    """Check that every rank receives all slots."""
    pending, flat = _gather(comm, torch.full((size,), float(comm.rank)))
    comm.wait(pending)
    expected = torch.arange(float(comm.num_ranks)).repeat_interleave(size)
    assert torch.equal(flat, expected)


@contextlib.contextmanager
def _hurried(comm: Communicator) -> Iterator[None]:
    usual, watch_of(comm).patience = watch_of(comm).patience, Patience(poll_seconds=IMPATIENT)
    try:
        yield
    finally:
        watch_of(comm).patience = usual


def _check_cast(
    mesh: DataParallelMesh, comm: Communicator, of: torch.dtype, to: torch.dtype, size: int
) -> None:
    own, row, column = mesh.group_rank, mesh.row, mesh.column
    slots = mesh.shards.size if mesh.is_two_level else row.size
    everyone = torch.randn(mesh.num_ranks, slots * size).to(of)  # the same on every rank
    flat = everyone[own].clone()
    inner = flat.view(row.size, -1)[row.index]
    carried = torch.randn(len(inner)).to(of) if column.size == 1 else None
    out = torch.empty(size, dtype=to)
    reduction = Reduction(flat, inner, carried, out, mesh.reduction, 0.3)
    comm.wait(comm.reduce.reduce(reduction, "reduce"))

    parts = everyone.view(mesh.num_ranks, row.size, -1)[:, row.index]
    if mesh.is_two_level:
        parts = parts.view(mesh.num_ranks, column.size, -1)[:, column.index]
    terms = [*parts, carried] if carried is not None else list(parts)
    what = f"{mesh.num_ranks} ranks, {of} to {to}, {size}"
    if carried is not None:
        total = tree_sum(parts) + carried
        assert torch.equal(out, total.to(to) * 0.3), f"bitwise equal, {what}"
    exact = torch.stack(terms).double().sum(0) * 0.3
    coarsest = max(torch.finfo(of).eps, torch.finfo(to).eps)
    torch.testing.assert_close(out.double(), exact, rtol=4 * coarsest, atol=8 * coarsest, msg=what)
    if not mesh.is_two_level and column.size > 1:
        replicas = [torch.empty_like(out) for _ in range(mesh.num_ranks)]
        dist.all_gather(replicas, out)
        for rank in column.ranks:
            assert torch.equal(out, replicas[rank]), f"replicas have the same bits, {what}"


def _state(queue: Collectives) -> QueueState:
    assert isinstance(queue, HostCollectives)
    return queue.state()
