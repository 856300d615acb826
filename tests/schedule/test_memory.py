"""Places in one piece of memory: none is given twice at a time, and little is left over."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedule.memory import Placement, Span, most_at_once, place

SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(1, 10)).map(
        lambda drawn: Span(drawn[0], drawn[1], drawn[1] + drawn[2])
    ),
    max_size=25,
)


@settings(deadline=None)
@given(SPANS)
def test_no_two_spans_share_a_byte_at_a_time(spans: list[Span]) -> None:
    placement = place(spans)
    ends = [offset + s.size for offset, s in zip(placement.offsets, spans, strict=True)]
    assert placement.extent == max(ends, default=0)
    for i, one in enumerate(spans):
        for j, other in enumerate(spans[:i]):
            if one.size and other.size and one.start < other.stop and other.start < one.stop:
                apart = ends[i] <= placement.offsets[j] or ends[j] <= placement.offsets[i]
                assert apart, (one, other)
    assert placement.extent >= most_at_once(spans)
    assert placement == place(spans), "the same every time"


def test_the_most_at_once() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([Span(3, 0, 2), Span(4, 1, 3), Span(5, 2, 4)]) == 9, "the first is over"


def test_nothing_is_placed_nowhere() -> None:
    assert place([]) == Placement((), 0)


@pytest.mark.parametrize(
    "sizes", [(9, 3, 4, 2, 8, 6, 5), (7,) * 7, (1, 20, 1, 20, 3, 3, 3)], ids=str
)
def test_a_step_takes_no_more_than_is_in_use_at_once(sizes: tuple[int, ...]) -> None:
    """Units gathered one ahead, forward and backward, and reductions two at a time."""
    root, *units = (size * 64 for size in sizes)
    spans = [Span(root, 0, 1000)]
    for tick, size in enumerate(units):
        spans.append(Span(size, 10 + 10 * tick, 31 + 10 * tick))
    for tick, size in enumerate(reversed(units)):
        began = 100 + 10 * tick
        spans += [Span(size, began, began + 21), Span(size, began + 12, began + 35)]
        spans.append(Span(size // 2, began + 20, began + 35))
    assert place(spans).extent == most_at_once(spans)
