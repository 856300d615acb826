"""Offsets in one memory allocation: neighbors never overlap, and little space is wasted."""

import pytest
from hypothesis import given, settings, strategies as st

from shardwise.schedule.memory import MemoryPlacement, MemoryPlan, place

# Buffers as (size, first tick, ticks alive).
LIVES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(1, 10)), max_size=25)


def neighbors_of(lives: list[tuple[int, int, int]]) -> list[list[int]]:
    """The buffers that are alive at the same time as each buffer."""
    return [
        [
            j
            for j, (_, other, other_ticks) in enumerate(lives)
            if j != i and other < start + ticks and start < other + other_ticks
        ]
        for i, (_, start, ticks) in enumerate(lives)
    ]


def most_at_once(lives: list[tuple[int, int, int]]) -> int:
    ticks = range(max((start + ticks for _, start, ticks in lives), default=0))
    return max((sum(s for s, at, n in lives if at <= tick < at + n) for tick in ticks), default=0)


@settings(deadline=None)
@given(LIVES)
def test_buffers_that_are_alive_together_do_not_overlap(lives: list[tuple[int, int, int]]) -> None:
    sizes, neighbors = [size for size, _, _ in lives], neighbors_of(lives)
    placement = place(sizes, neighbors, goal=most_at_once(lives))
    ends = [offset + size for offset, size in zip(placement.offsets, sizes, strict=True)]
    assert placement.extent == max(ends, default=0)
    for i, others in enumerate(neighbors):
        for j in others:
            if sizes[i] and sizes[j]:
                apart = ends[i] <= placement.offsets[j] or ends[j] <= placement.offsets[i]
                assert apart, (lives[i], lives[j])
    assert placement.extent >= most_at_once(lives)
    assert placement == place(sizes, neighbors, most_at_once(lives)), "the same every time"


def test_no_buffers_take_no_memory() -> None:
    assert place([], [], goal=0) == MemoryPlacement((), 0)


@pytest.mark.parametrize(
    "sizes", [(9, 3, 4, 2, 8, 6, 5), (7,) * 7, (1, 20, 1, 20, 3, 3, 3)], ids=str
)
@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_step_takes_no_more_than_is_alive_at_once(sizes: tuple[int, ...], prefetch: int) -> None:
    """Each buffer keeps its offset from forward to backward."""
    root, *units = (size * 64 for size in sizes)
    plan: MemoryPlan[int] = MemoryPlan()
    windows = [range(i, min(i + prefetch + 1, len(units))) for i in range(len(units))]
    plan.observe(-1, root, [])
    for window in windows:
        for position, unit in enumerate(window):
            plan.observe(unit, units[unit], [-1, *window[:position]])
    goal = root + max(sum(units[unit] for unit in window) for window in windows)
    plan.update(goal, limit=goal)
    assert plan.extent == goal
    assert plan.observe(0, units[0], [-1, 1]) is not None


def test_a_new_buffer_has_no_offset_until_the_next_update() -> None:
    plan: MemoryPlan[str] = MemoryPlan()
    assert plan.observe("a", 10, []) is None
    assert plan.observe("b", 20, []) is None
    plan.update(goal=20, limit=20)
    assert (plan.extent, plan.is_stale) == (20, False)
    assert plan.observe("a", 10, []) == plan.observe("b", 20, []) == 0
    assert plan.observe("a", 10, ["b"]) is None, "they share bytes"
    assert plan.observe("a", 10, ["b"]) is None, "and still do"
    assert plan.observe("b", 20, ["a"]) == 0, "a is elsewhere"
    assert plan.is_stale
    plan.update(goal=30, limit=30)
    offsets = {plan.observe("a", 10, ["b"]), plan.observe("b", 20, ["a"])}
    assert offsets in ({0, 10}, {0, 20})


def test_buffers_beyond_the_limit_have_no_offset() -> None:
    plan: MemoryPlan[str] = MemoryPlan()
    plan.observe("a", 10, [])
    plan.observe("b", 20, ["a"])
    plan.update(goal=30, limit=20)
    assert plan.observe("b", 20, ["a"]) == 0
    assert plan.observe("a", 10, ["b"]) is None
    assert plan.extent == 20
