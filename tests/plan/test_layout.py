"""Layouts store every element once, and their only padding is alignment."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from shardwise.plan.granularity import Granularity, block
from shardwise.plan.layout import (
    Cast,
    Layout,
    ParameterExtent,
    ParameterSpec,
    Run,
    lay_out,
    lay_out_in_buffers,
)

ITEMSIZES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


def spec(
    name: str, *shape: int, dtype: str = "float32", granularity: Granularity = "element"
) -> ParameterSpec:
    return ParameterSpec((name,), shape, dtype, ITEMSIZES[dtype], True, granularity)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8))
    return [spec(f"p{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes)]


@st.composite
def coarse_parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    """Parameters of every granularity, mixed."""
    choices: list[Granularity] = ["element", "row", "tensor", block(2), block(5)]
    return [
        replace(parameter, granularity=draw(st.sampled_from(choices)))
        for parameter in draw(parameter_lists())
    ]


WORLD_SIZES = st.integers(1, 9) | st.integers(1, 1000)
ALIGNMENTS = st.sampled_from([1, 4, 16, 128])
LAYOUTS = st.builds(lay_out, parameter_lists(), WORLD_SIZES, alignment=ALIGNMENTS)
COARSE_LAYOUTS = st.builds(lay_out, coarse_parameter_lists(), WORLD_SIZES, alignment=ALIGNMENTS)


@given(LAYOUTS | COARSE_LAYOUTS)
def test_runs_partition_every_parameter(layout: Layout) -> None:
    for extent in layout.extents:
        runs = layout.runs(extent)
        assert len(runs) == layout.world_size
        assert runs == tuple(layout.run(extent, rank) for rank in range(layout.world_size))
        edges = [0]
        for run in filter(len, runs):
            assert run.start == edges[-1]
            edges.append(run.stop)
        assert edges[-1] == extent.parameter.num_elements


@given(parameter_lists(), WORLD_SIZES, ALIGNMENTS)
def test_padding_is_alignment_alone(
    parameters: list[ParameterSpec], world_size: int, alignment: int
) -> None:
    layout = lay_out(parameters, world_size, alignment=alignment)
    gaps = [two.offset - one.stop for one, two in pairwise(layout.extents)]
    assert all(0 <= gap < alignment for gap in gaps)
    assert all(extent.offset % alignment == 0 for extent in layout.extents)
    assert layout.shard_elements % alignment == 0
    assert layout.extents[0].offset == 0
    assert [extent.parameter for extent in layout.extents] == parameters
    # After the last parameter: its own alignment, then each of the equal shards'.
    end = layout.extents[-1].stop
    assert 0 <= layout.num_elements - end < alignment + alignment * world_size
    assert layout.padding_elements == layout.num_elements - sum(p.num_elements for p in parameters)
    assert layout.padding_elements < alignment * (len(parameters) + world_size)


@given(LAYOUTS | COARSE_LAYOUTS)
def test_scatter_and_reassemble(layout: Layout) -> None:
    """The shards that ranks cut from whole parameters make up the flat buffer."""
    wholes = [
        [(i, element) for element in range(extent.parameter.num_elements)]
        for i, extent in enumerate(layout.extents)
    ]
    buffer: list[tuple[int, int] | None] = []
    for rank in range(layout.world_size):
        shard: list[tuple[int, int] | None] = [None] * layout.shard_elements
        for extent, whole in zip(layout.extents, wholes, strict=True):
            run, offset = layout.run(extent, rank), layout.offset_in_shard(extent, rank)
            assert shard[offset : offset + len(run)] == [None] * len(run), "written twice"
            shard[offset : offset + len(run)] = whole[run.start : run.stop]
        buffer += shard
    for extent, whole in zip(layout.extents, wholes, strict=True):
        assert buffer[extent.offset : extent.stop] == whole
    assert buffer.count(None) == layout.padding_elements


@given(LAYOUTS | COARSE_LAYOUTS)
def test_bytes_follow_elements(layout: Layout) -> None:
    assert (
        layout.gathered_bytes
        == layout.reduced_bytes
        == layout.num_elements * ITEMSIZES[layout.dtype]
    )
    assert layout.shard_bytes * layout.world_size == layout.gathered_bytes
    assert layout.parameter_elements + layout.padding_elements == layout.num_elements


def test_the_numbers_of_the_drawing() -> None:
    layout = lay_out([spec("W1", 5, 3), spec("W2", 2, 4), spec("b", 3)], 2, alignment=1)
    assert layout.shard_elements == 13
    assert layout.num_elements == 26
    assert layout.padding_elements == 0
    assert [extent.offset for extent in layout.extents] == [0, 15, 23]
    w1, w2, b = layout.extents
    assert layout.runs(w1) == (Run(0, 13), Run(13, 15))
    assert layout.runs(w2) == (Run(0, 0), Run(0, 8))
    assert layout.runs(b) == (Run(0, 0), Run(0, 3))


@given(coarse_parameter_lists(), WORLD_SIZES, ALIGNMENTS)
def test_no_granule_is_cut(
    parameters: list[ParameterSpec], world_size: int, alignment: int
) -> None:
    layout = lay_out(parameters, world_size, alignment=alignment)
    assert sorted(p.name for p in parameters) == sorted(s.parameter.name for s in layout.extents)
    assert layout.shard_elements % alignment == 0
    for extent in layout.extents:
        assert extent.offset % alignment == 0
        granule, size = extent.parameter.granule_elements, extent.parameter.num_elements
        runs = [run for run in layout.runs(extent) if run]
        assert all(run.start % granule == 0 for run in runs)
        assert all(run.stop % granule == 0 or run.stop == size for run in runs)
        assert layout.boundaries_inside(extent) == max(0, len(runs) - 1)


def test_the_numbers_of_the_drawing_by_row() -> None:
    """They cannot be placed on two shards of 13: test_packing tries every way."""
    parameters = [
        spec("W1", 5, 3, granularity="row"),
        spec("W2", 2, 4, granularity="tensor"),
        spec("b", 3),
    ]
    layout = lay_out(parameters, 2, alignment=1)
    assert (layout.shard_elements, layout.num_elements, layout.padding_elements) == (14, 28, 2)
    assert [extent.offset for extent in layout.extents] == [2, 17, 25]
    w1, w2, b = layout.extents
    assert layout.runs(w1) == (Run(0, 12), Run(12, 15))
    assert layout.runs(w2) == (Run(0, 0), Run(0, 8))
    assert layout.runs(b) == (Run(0, 0), Run(0, 3))


def test_extents_are_sorted_by_offset() -> None:
    names = ["a", "b", "c"]
    parameters = [
        spec("a", 8, granularity="tensor"),
        spec("b", 24, granularity="tensor"),
        spec("c", 16, granularity="tensor"),
    ]
    layout = lay_out(parameters, 2)
    assert layout.padding_elements == 0, "8 and 16 elements beside 24"
    assert [extent.parameter.name for extent in layout.extents] != names
    assert [extent.offset for extent in layout.extents] == sorted(s.offset for s in layout.extents)


def test_granules_and_alignment_go_together() -> None:
    """Rows of 5 are cut at multiples of 8 elements, so eight of them stay together."""
    layout = lay_out([spec("a", 32, 5, granularity="row")], 2)
    assert [len(run) for run in layout.runs(layout.extents[0])] == [80, 80]
    layout = lay_out([spec("a", 24, 5, granularity="row")], 2)
    assert sorted(len(run) for run in layout.runs(layout.extents[0])) == [40, 80]


def test_two_buffers_where_one_would_cost_much() -> None:
    """Matrices of a Qwen2-7B on 512 ranks: rows of 3,584 and of 18,944 have 132,608 in common."""
    hidden, inner = 3584, 18944
    shapes = [(hidden, hidden), (512, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
    parameters = [spec(f"p{i}", *shape, granularity="row") for i, shape in enumerate(shapes)]
    one = lay_out(parameters, 512)
    several = lay_out_in_buffers(parameters, 512)
    assert one.shard_elements % (hidden * inner // 512) == 0
    assert [len(layout.extents) for layout in several] == [4, 1]
    assert several[1].padding_elements == 0, "7 rows of 18,944 on each of 512 ranks"
    assert sum(x.padding_elements for x in several) < 0.1 * one.padding_elements
    names = [extent.parameter.name for layout in several for extent in layout.extents]
    assert sorted(names) == sorted(parameter.name for parameter in parameters)


@pytest.mark.parametrize(
    ("one", "other", "ranks"),
    [((64, 28), (64, 44), 16), ((38912, 4096), (4096, 14336), 512)],
    ids=["7 % of a small buffer", "1 % of a large buffer"],
)
def test_one_buffer_where_two_would_save_little(
    one: tuple[int, int], other: tuple[int, int], ranks: int
) -> None:
    parameters = [spec("a", *one, granularity="row"), spec("b", *other, granularity="row")]
    (layout,) = lay_out_in_buffers(parameters, ranks)
    assert layout.padding_elements > 0
    assert all(lay_out([parameter], ranks).padding_elements == 0 for parameter in parameters)


@pytest.mark.parametrize(("dtype", "alignment"), [("uint8", 16), ("bfloat16", 8), ("float32", 8)])
def test_default_alignment_is_16_bytes_and_8_elements(dtype: str, alignment: int) -> None:
    layout = lay_out([spec("a", 3, dtype=dtype), spec("b", 5, dtype=dtype)], world_size=2)
    assert [extent.offset for extent in layout.extents] == [0, alignment]
    assert layout.shard_elements == alignment


def test_mixed_precision_does_not_move_cuts() -> None:
    plain = [spec("a", 3, 5), spec("b", 7)]
    cast = [replace(one, cast=Cast("bfloat16", 2, "float32", 4)) for one in plain]
    layout, other = lay_out(plain, 3), lay_out(cast, 3)
    for extent, same in zip(layout.extents, other.extents, strict=True):
        assert layout.runs(extent) == other.runs(same)


def test_a_layout_proves_itself() -> None:
    one, two = spec("one", 4), spec("two", 4)
    with pytest.raises(AssertionError, match="two overlaps"):
        Layout((ParameterExtent(one, 0), ParameterExtent(two, 3)), world_size=1, shard_elements=8)
    with pytest.raises(AssertionError, match="ends inside"):
        Layout((ParameterExtent(one, 0), ParameterExtent(two, 4)), world_size=1, shard_elements=7)
    by_row = spec("by_row", 3, 4, granularity="row")
    with pytest.raises(AssertionError, match="by_row is cut inside"):
        Layout((ParameterExtent(by_row, 2),), world_size=2, shard_elements=8)
    with pytest.raises(AssertionError, match="by_row is cut inside"):
        Layout((ParameterExtent(by_row, 1),), world_size=3, shard_elements=5)
    with pytest.raises(AssertionError, match="the parameters of a buffer are of one kind"):
        Layout((ParameterExtent(one, 0), ParameterExtent(spec("x", 1, dtype="float64"), 4)), 1, 8)


def test_tied_names_and_sizes() -> None:
    tied = ParameterSpec(("head.weight", "emb.weight"), (5, 3), "bfloat16", 2, trainable=True)
    assert (tied.name, tied.num_elements, tied.num_bytes) == ("head.weight", 15, 30)
