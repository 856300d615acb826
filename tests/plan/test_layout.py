"""A layout is arithmetic: every element has one place, and padding is alignment alone."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.layout import Layout, ParameterSpec, Run, Slot, lay_out

ITEMSIZES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


def spec(name: str, *shape: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec((name,), shape, dtype, ITEMSIZES[dtype], trainable=True)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8))
    return [spec(f"p{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes)]


WORLD_SIZES = st.integers(1, 9) | st.integers(1, 1000)
ALIGNMENTS = st.sampled_from([1, 4, 16, 128])
LAYOUTS = st.builds(
    lambda parameters, world_size, alignment: lay_out(
        parameters, world_size, alignment_bytes=alignment
    ),
    parameter_lists(),
    WORLD_SIZES,
    ALIGNMENTS,
)


@given(LAYOUTS)
def test_runs_partition_every_parameter(layout: Layout) -> None:
    for slot in layout.slots:
        runs = layout.runs(slot)
        assert len(runs) == layout.world_size
        assert runs == tuple(layout.run(slot, rank) for rank in range(layout.world_size))
        edges = [0]
        for run in filter(len, runs):
            assert run.start == edges[-1]
            edges.append(run.stop)
        assert edges[-1] == slot.parameter.num_elements


@given(LAYOUTS)
def test_slots_keep_their_order_and_do_not_overlap(layout: Layout) -> None:
    for one, next_one in pairwise(layout.slots):
        assert one.stop <= next_one.offset
    assert layout.slots[0].offset == 0
    assert layout.slots[-1].stop <= layout.num_elements


@given(parameter_lists(), WORLD_SIZES, ALIGNMENTS)
def test_padding_is_alignment_alone(
    parameters: list[ParameterSpec], world_size: int, alignment_bytes: int
) -> None:
    layout = lay_out(parameters, world_size, alignment_bytes=alignment_bytes)
    alignment = max(1, alignment_bytes // layout.itemsize)
    gaps = [two.offset - one.stop for one, two in pairwise(layout.slots)]
    assert all(0 <= gap < alignment for gap in gaps)
    assert all(slot.offset % alignment == 0 for slot in layout.slots)
    assert layout.shard_elements % alignment == 0
    # After the last parameter: its own alignment, then each of the equal shards'.
    end = layout.slots[-1].stop
    assert 0 <= layout.num_elements - end < alignment + alignment * world_size
    assert layout.padding_elements == layout.num_elements - sum(p.num_elements for p in parameters)
    assert layout.padding_elements < alignment * (len(parameters) + world_size)


@given(LAYOUTS)
def test_offset_in_shard_is_where_the_run_lies(layout: Layout) -> None:
    for slot in layout.slots:
        for rank, run in enumerate(layout.runs(slot)):
            offset = layout.offset_in_shard(slot, rank)
            assert 0 <= offset <= layout.shard_elements
            if run:
                assert rank * layout.shard_elements + offset == slot.offset + run.start
                assert offset + len(run) <= layout.shard_elements


@given(LAYOUTS)
def test_scatter_and_reassemble(layout: Layout) -> None:
    """What the ranks cut out of whole parameters makes the buffer that the parameters view."""
    wholes = [
        [(i, element) for element in range(slot.parameter.num_elements)]
        for i, slot in enumerate(layout.slots)
    ]
    buffer: list[tuple[int, int] | None] = []
    for rank in range(layout.world_size):
        shard: list[tuple[int, int] | None] = [None] * layout.shard_elements
        for slot, whole in zip(layout.slots, wholes, strict=True):
            run, offset = layout.run(slot, rank), layout.offset_in_shard(slot, rank)
            assert shard[offset : offset + len(run)] == [None] * len(run), "written twice"
            shard[offset : offset + len(run)] = whole[run.start : run.stop]
        buffer += shard
    for slot, whole in zip(layout.slots, wholes, strict=True):
        assert buffer[slot.offset : slot.stop] == whole
    assert buffer.count(None) == layout.padding_elements


@given(LAYOUTS)
def test_bytes_follow_elements(layout: Layout) -> None:
    assert layout.num_bytes == layout.num_elements * ITEMSIZES[layout.dtype]
    assert layout.shard_bytes * layout.world_size == layout.num_bytes
    assert layout.parameter_elements + layout.padding_elements == layout.num_elements


def test_the_numbers_of_the_drawing() -> None:
    layout = lay_out([spec("W1", 5, 3), spec("W2", 2, 4), spec("b", 3)], 2, alignment_bytes=4)
    assert layout.shard_elements == 13
    assert layout.num_elements == 26
    assert layout.padding_elements == 0
    assert [slot.offset for slot in layout.slots] == [0, 15, 23]
    w1, w2, b = layout.slots
    assert layout.runs(w1) == (Run(0, 13), Run(13, 15))
    assert layout.runs(w2) == (Run(0, 0), Run(0, 8))
    assert layout.runs(b) == (Run(0, 0), Run(0, 3))


def test_default_alignment_is_16_bytes() -> None:
    layout = lay_out([spec("a", 3), spec("b", 5)], world_size=2)
    assert [slot.offset for slot in layout.slots] == [0, 4]
    assert layout.shard_elements == 8


def test_fewer_elements_than_ranks() -> None:
    layout = lay_out([spec("a", 5)], world_size=1000)
    (slot,) = layout.slots
    assert [len(run) for run in layout.runs(slot)] == [4, 1] + 998 * [0]
    assert layout.padding_elements == 3995


@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((0,), 0), ((3, 0, 2), 0)])
def test_scalar_and_zero_size(shape: tuple[int, ...], elements: int) -> None:
    layout = lay_out([spec("a", *shape)], world_size=3, alignment_bytes=4)
    assert [len(run) for run in layout.runs(layout.slots[0])] == (
        [1, 0, 0] if elements else [0] * 3
    )
    assert layout.num_elements == 3 * elements


def test_one_rank_owns_everything() -> None:
    layout = lay_out([spec("a", 3), spec("b", 2, 2)], world_size=1)
    assert [layout.runs(slot) for slot in layout.slots] == [(Run(0, 3),), (Run(0, 4),)]


def test_a_layout_proves_itself() -> None:
    one, two = spec("one", 4), spec("two", 4)
    with pytest.raises(AssertionError, match="two overlaps"):
        Layout((Slot(one, 0), Slot(two, 3)), world_size=1, shard_elements=8)
    with pytest.raises(AssertionError, match="ends inside"):
        Layout((Slot(one, 0), Slot(two, 4)), world_size=1, shard_elements=7)
    with pytest.raises(AssertionError, match="one dtype"):
        Layout((Slot(one, 0), Slot(spec("x", 1, dtype="float64"), 4)), 1, 8)


def test_tied_names_and_sizes() -> None:
    tied = ParameterSpec(("head.weight", "emb.weight"), (5, 3), "bfloat16", 2, trainable=True)
    assert (tied.name, tied.num_elements, tied.num_bytes) == ("head.weight", 15, 30)
