"""Covering arrays hold every combination, in few rows."""

from itertools import combinations, product

from tests.covering import cover, covered_first, pairwise

FACTORS = ("abcde", range(4), (None, True, False), (1, 2, 3), (True, False))


def test_every_pair_of_values_occurs_in_few_rows() -> None:
    rows = pairwise(*FACTORS)
    for first, second in combinations(range(len(FACTORS)), 2):
        pairs = {(row[first], row[second]) for row in rows}
        assert pairs == set(product(FACTORS[first], FACTORS[second]))
    assert len(rows) <= 25, "the product has 360; two factors alone need 20"


def test_every_value_occurs_once_where_rows_allow_it() -> None:
    rows = list(product("abcd", range(4)))
    assert sorted(cover(rows, strength=1)) == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]


def test_what_a_covering_leaves_out_is_thorough() -> None:
    parameters = covered_first(product("ab", range(2)))
    marks = [bool(parameter.marks) for parameter in parameters]  # type: ignore[attr-defined]
    assert marks == [False, False, True, True]
