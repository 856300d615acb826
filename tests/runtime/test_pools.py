"""Pools stay within their bounds, and views outlive the memory of their buffer."""

import operator
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from shardwise.plan.layout import Layout, ParameterSpec, lay_out
from shardwise.plan.offload import CPUOffloadPolicy
from shardwise.runtime import buffers, memory
from shardwise.runtime.buffers import FlatBuffer
from shardwise.runtime.memory import Arena, Pool, is_shared
from shardwise.runtime.offload import HostOffloader
from tests.versions import needs_swap

CPU = torch.device("cpu")
LINE = 64  # bytes, of which all sizes are multiples
allocate = memory._allocate


def layout(*shapes: tuple[int, ...], dtype: str = "float32", itemsize: int = 4) -> Layout:
    specs = [
        ParameterSpec((f"p{number}",), shape, dtype, itemsize, trainable=True)
        for number, shape in enumerate(shapes)
    ]
    return lay_out(specs, world_size=2)


# -- Pool ----------------------------------------------------------------------------------------


def test_memory_of_the_host_is_there_whatever_the_default_device_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zeros = torch.zeros  # without an accelerator it refuses to pin
    monkeypatch.setattr(torch, "zeros", lambda size, pin_memory, **k: zeros(size, **k))  # noqa: ARG005
    with torch.device("meta"):
        assert Pool(CPU, is_pinned=True).allocate(LINE).device == CPU
        shard = HostOffloader(CPU, CPUOffloadPolicy()).allocate_shard(layout((3,)), "float32")
    assert shard.device == CPU


def test_the_best_fit_is_taken_and_hardly_more_than_was_asked_for() -> None:
    pool = Pool(CPU)
    _still_lent = pool.allocate(100)
    lent = {lines: pool.allocate(LINE * lines) for lines in (2000, 1010, 1005)}
    for storage in lent.values():
        pool.free(storage)
    assert pool.allocate(LINE * 1000).data_ptr() == lent[1005].data_ptr()
    assert pool.allocate(LINE * 1000).data_ptr() == lent[1010].data_ptr()
    assert pool.allocate(LINE * 1000 - 1).nbytes() == LINE * 1000, "2000 would be a waste"


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60)


def perform(pool: Pool, steps: list[tuple[bool, int]], name: str = "") -> None:
    """(True, n) allocates n lines; (False, n) frees the n-th of them; then all are freed."""
    allocated: list[torch.UntypedStorage] = []
    for number, (is_allocated, amount) in enumerate(steps):
        if is_allocated:
            allocated.append(pool.allocate(LINE * amount, f"{name} {number}"))
            assert amount <= allocated[-1].nbytes() / LINE <= 1.02 * amount
        elif allocated:
            pool.free(allocated.pop(amount % len(allocated)))
        allocated_bytes = sum(storage.nbytes() for storage in allocated)
        assert allocated_bytes <= min(pool.held_bytes, pool.peak_bytes)
        ranges = sorted((s.data_ptr(), s.nbytes()) for s in allocated if s.nbytes())
        ends = [start + size for start, size in ranges]
        starts = [start for start, _ in ranges[1:]]
        assert all(map(operator.le, ends, starts)), "nothing is given twice"
    for storage in allocated:
        pool.free(storage)


@settings(deadline=None)
@given(STEPS, STEPS)
@pytest.mark.parametrize("make", [Pool, Arena])
def test_a_pool_holds_no_more_than_was_allocated_at_once(
    make: type[Pool], one: list[tuple[bool, int]], other: list[tuple[bool, int]]
) -> None:
    """Once nothing is allocated, after any sequence of allocations."""
    pool = make(CPU)
    for name, steps in (("one", one), ("other", other), ("one", one)):
        perform(pool, steps, name)
        assert pool.held_bytes <= pool.peak_bytes * (1 + 1 / 64)


@needs_swap
@settings(deadline=None)
@given(STEPS)
def test_a_step_that_repeats_allocates_nothing(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(CPU)
    for _ in range(2):
        perform(arena, steps)
    with mock.patch.object(memory, "_allocate", side_effect=allocate_nothing):
        for _ in range(2):
            perform(arena, steps)


def allocate_nothing(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    assert not num_bytes, "a step like the last one allocates"
    return allocate(0, device)


@needs_swap
def test_steps_that_take_turns_allocate_nothing() -> None:
    """As an evaluation between training steps does."""
    arena = Arena(CPU)
    train = [(True, 40_000), (True, 10_000), (True, 9_000), (False, 1), (True, 20_000)]
    evaluate = [(True, 30_000), (True, 19_000), (False, 0), (True, 15_000), (True, 20_000)]
    for _ in range(3):
        perform(arena, train, "train")
        perform(arena, evaluate, "evaluate")
    with mock.patch.object(memory, "_allocate", side_effect=allocate_nothing):
        perform(arena, train, "train")
        perform(arena, evaluate, "evaluate")


def test_a_disowned_block_belongs_to_whoever_holds_it() -> None:
    pool = Pool(CPU)
    kept, other = pool.allocate(LINE), pool.allocate(LINE * 50)
    pool.disown(kept)
    pool.free(other)
    assert (pool.allocated_bytes, pool.held_bytes) == (0, LINE * 50)
    assert pool.allocate(LINE).data_ptr() != kept.data_ptr()


def test_a_pool_that_keeps_nothing_has_no_more_idle_than_lent() -> None:
    pool = Pool(CPU, keep=False)
    for _ in range(3):
        one, other = pool.allocate(LINE * 40), pool.allocate(LINE * 50)
        pool.free(one)
        assert pool.allocate(LINE * 40).data_ptr() == one.data_ptr(), "until then it is used again"
        pool.free(one)
        assert pool.held_bytes == LINE * 90
        again = pool.allocate(LINE * 40)
        pool.free(other)
        assert pool.held_bytes == LINE * 40, "it would be more than what is lent"
        pool.free(again)
        assert (pool.held_bytes, pool.peak_bytes, pool._idle) == (0, LINE * 90, [])


# -- FlatBuffer ----------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param("swapped", marks=needs_swap), "resized"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways in which a Storage gets memory; torch 2.11 has only the second."""
    if request.param == "swapped":
        yield request.param
        return
    with (
        mock.patch.object(memory, "CAN_SWAP", False),
        mock.patch.object(buffers, "CAN_SWAP", False),
    ):
        assert not memory.CAN_SWAP
        yield request.param


def two_in_turn() -> tuple[FlatBuffer, FlatBuffer]:
    """Two buffers of one pool, so that each gets the memory that the other has freed."""
    pool = Pool(CPU)
    return FlatBuffer(layout((3, 4), (5,)), pool), FlatBuffer(layout((3, 4), (5,)), pool)


def fill(buffer: FlatBuffer, value: float) -> None:
    """Fill the buffer, as a gather does."""
    buffer.acquire()
    with torch.no_grad():
        buffer.flat.fill_(value)


@pytest.mark.usefixtures("way")
def test_a_released_buffer_has_no_memory() -> None:
    buffer, _ = two_in_turn()
    for _ in range(2):
        assert (buffer.is_acquired, bytes_of(buffer)) == (False, 0)
        buffer.acquire()
        assert (buffer.is_acquired, bytes_of(buffer)) == (True, 2 * LINE)
        buffer.release()
    assert (buffer.is_acquired, bytes_of(buffer)) == (False, 0)


def bytes_of(buffer: FlatBuffer) -> int:
    return buffer.flat.untyped_storage().nbytes()


def test_memory_of_an_arena_may_come_back_at_another_address(way: str) -> None:
    arena, resize, addresses = Arena(CPU), memory._resize, []
    between: list[torch.UntypedStorage] = []

    def resize_elsewhere(storage: torch.UntypedStorage, num_bytes: int) -> None:
        if num_bytes:  # takes the memory that has just been freed
            between.extend(allocate(num_bytes, CPU) for _ in range(3))
        resize(storage, num_bytes)

    with mock.patch.object(memory, "_resize", side_effect=resize_elsewhere):
        for _ in range(3):
            block, empty = arena.allocate(LINE * 4, "a"), arena.new_storage(0)
            addresses.append(block.data_ptr())
            memory.swap_memory(block, empty)
            assert (block.nbytes(), empty.nbytes()) == (0, LINE * 4)
            memory.swap_memory(empty, block)
            addresses.append(block.data_ptr())
            arena.free(block)
            assert arena.allocated_bytes == 0
            assert not arena._alive
    came_back = [one == other for one, other in zip(addresses[::2], addresses[1::2], strict=True)]
    assert came_back == [way == "swapped"] * 3


@pytest.mark.usefixtures("way")
def test_a_buffer_that_numpy_has_viewed_is_released() -> None:
    arena = Arena(CPU)
    buffer = FlatBuffer(layout((5, 4)), arena)
    for value in (1.0, 2.0, 3.0):
        fill(buffer, value)
        assert (buffer.views[0].numpy() == value).all()
        buffer.release()
        assert arena.allocated_bytes == 0


@pytest.mark.usefixtures("way")
def test_a_buffer_takes_what_another_holds() -> None:
    first, second = two_in_turn()
    fill(first, 4.0)
    second.take(first)
    assert all(bool((view == 4.0).all()) for view in second.views)
    if first.is_acquired:  # its memory could not be moved
        first.release()
    fill(first, 5.0)
    assert all(bool((view == 4.0).all()) for view in second.views)
    second.release()


@pytest.mark.usefixtures("way")
def test_views_show_the_memory_that_is_there_now() -> None:
    buffer, other = two_in_turn()
    first, second = buffer.views
    assert (first.shape, second.shape) == ((3, 4), (5,))
    for value in (1.0, 2.0, 3.0):
        fill(buffer, value)
        buffer.slot_of(1).add_(0.5)
        size = buffer.layout.shard_elements
        flat = torch.cat([torch.full((size,), value), torch.full((size,), value + 0.5)])
        assert torch.equal(buffer.flat, flat)
        for view, extent in zip(buffer.views, buffer.layout.extents, strict=True):
            assert torch.equal(view.flatten(), flat[extent.offset : extent.stop])
        second.zero_()
        stop = buffer.layout.extents[1].stop
        assert not buffer.flat[stop - 5 : stop].any(), "a view writes where it reads"
        buffer.release()
        fill(other, -1.0)
        other.release()


@pytest.mark.usefixtures("way")
def test_the_pool_counts_a_buffer_while_it_is_acquired() -> None:
    pool = Pool(CPU)
    buffers = [FlatBuffer(layout((8, 16)), pool) for _ in range(3)]
    num_bytes = buffers[0].layout.gathered_bytes
    assert pool.held_bytes == 0
    for _ in range(3):
        for buffer in buffers[:2]:
            buffer.acquire()
        assert (pool.held_bytes, pool.peak_bytes) == (2 * num_bytes, 2 * num_bytes)
        for buffer in buffers[:2]:
            buffer.release()
        assert pool.held_bytes == (2 * num_bytes if memory.CAN_SWAP else 0), "idle"
        buffers[2].acquire()
        assert pool.held_bytes == (2 * num_bytes if memory.CAN_SWAP else num_bytes)
        buffers[2].release()


@pytest.mark.usefixtures("way")
def test_what_autograd_saved_may_be_taken_away_and_come_back() -> None:
    buffer, other = two_in_turn()
    weight = nn.Parameter(buffer.views[0])
    x = torch.ones(2, 3, requires_grad=True)
    fill(buffer, 2.0)
    y = (x @ weight).square().sum()  # saves the weight for the gradient of x
    buffer.release()
    fill(other, -7.0)
    other.release()
    fill(buffer, 2.0)
    y.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 2 * 6.0 * 2.0 * 4))
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3, 4), 2 * 6.0 * 2))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("bfloat16", 2), ("float64", 8), ("int64", 8), ("uint8", 1)]
)
def test_other_dtypes_and_nothing_at_all(dtype: str, itemsize: int) -> None:
    for shapes in ([(3, 1), (), (0, 2)], [(0, 2)]):
        buffer = FlatBuffer(layout(*shapes, dtype=dtype, itemsize=itemsize), Pool(CPU))
        assert buffer.flat.dtype == getattr(torch, dtype)
        assert [view.shape for view in buffer.views] == shapes
        fill(buffer, 3)
        assert all(bool((view == 3).all()) for view in buffer.views)
        buffer.release()


# -- is_shared -----------------------------------------------------------------------------------


def test_is_shared_counts_the_tensors_on_a_storage() -> None:
    tensor = torch.zeros(6)
    assert not is_shared(tensor, own_references=1)
    view = tensor[2:4]
    assert is_shared(tensor, own_references=1)
    assert is_shared(view, own_references=1)
    assert not is_shared(tensor, own_references=2)
    detached = view.detach()
    del view
    assert is_shared(tensor, own_references=1), "a view of a view"
    del detached
    assert not is_shared(tensor, own_references=1)
    same = tensor
    assert not is_shared(same, own_references=1), "two names of one tensor"


def test_what_autograd_saved_shares() -> None:
    tensor = torch.zeros(6)
    x = torch.ones(6, requires_grad=True)
    y = x * tensor.detach()
    assert is_shared(tensor, own_references=1)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert not is_shared(tensor, own_references=1)
