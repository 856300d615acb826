"""Covering arrays: a few rows of a product of options in which all combinations of two occur.

Most faults need one option or two to show, so a small set of rows in which every pair of options
meets finds nearly what the product finds (D. R. Kuhn et al., "Software Fault Interactions and
Implications for Software Testing", IEEE TSE 2004).
"""

import heapq
from collections.abc import Container, Hashable, Iterable, Sequence
from itertools import combinations, product

import pytest

Row = tuple[object, ...]
Combination = tuple[tuple[int, Hashable], ...]  # of positions in a row and what is there


def pairwise(*factors: Sequence[object]) -> list[Row]:
    """Rows of the product of ``factors`` in which every pair of values of two factors occurs."""
    return cover(list(product(*factors)), strength=2)


def cover(rows: Sequence[Row], strength: int) -> list[Row]:
    """A few of ``rows`` with every combination of ``strength`` values that ``rows`` have."""
    wanted = [_combinations(row, strength) for row in rows]
    missing = set().union(*wanted)
    chosen: list[Row] = []
    # The rows with the most first. What a row adds only decreases: an old figure is an upper bound.
    heap = [(-len(combinations_of_row), i) for i, combinations_of_row in enumerate(wanted)]
    heapq.heapify(heap)
    while missing:
        _, best = heapq.heappop(heap)
        adds = wanted[best] & missing
        if heap and (-len(adds), best) > heap[0]:
            heapq.heappush(heap, (-len(adds), best))
        else:
            missing -= adds
            chosen.append(rows[best])
    return chosen


def covered_first(
    rows: Iterable[Row], strength: int = 1, *, leave: Sequence[object] = ()
) -> list[object]:
    """All ``rows`` as parameters of a test; those that `cover` leaves out are thorough.

    So are rows with a value in ``leave``, which other tests show.
    """
    rows = list(rows)
    chosen = cover([row for row in rows if not any(value in leave for value in row)], strength)
    rest = [pytest.param(*row, marks=pytest.mark.thorough) for row in rows if row not in chosen]
    return [*(pytest.param(*row) for row in chosen), *rest]


def leaving(rest: Container[object], values: Iterable[object]) -> list[object]:
    """``values`` as parameters of a test; those in ``rest`` are thorough."""
    thorough = pytest.mark.thorough
    return [pytest.param(one, marks=thorough if one in rest else ()) for one in values]


def _combinations(row: Row, strength: int) -> set[Combination]:
    keyed = [(position, _key(value)) for position, value in enumerate(row)]
    return set(combinations(keyed, strength))


def _key(value: object) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
