"""The collectives that ranks have issued are compared, and the first difference is named."""

from types import SimpleNamespace
from typing import Any

from shardwise.comm.api import CollectiveId
from shardwise.watch.history import Comparison, History

RANKS = (0, 1)


def histories(gathers: str, reductions: str) -> list[History]:
    """One history of gathers and one of reductions, a letter for each, all of which have ended."""
    both = [History(), History()]
    for history, labels in zip(both, (gathers, reductions), strict=True):
        for number, label in enumerate(labels):
            collective = CollectiveId(number, label, 8, RANKS)
            history.issued(collective)
            history.ended(collective)
    return both


def as_seen_by(other: list[History]) -> Any:
    """The monitor of rank 0: what rank 1, with the histories ``other``, publishes."""
    beat = SimpleNamespace(epoch=0, marks=[history.marks for history in other])
    return SimpleNamespace(
        heartbeat=lambda _rank: beat,
        swap_histories=lambda _rank, shown: type(shown)(
            0, tuple({r: tuple(e) for r, e in history.entries.items()} for history in other)
        ),
        table=str,
    )


def test_the_first_gather_that_differs_is_named_if_a_reduction_tells_first() -> None:
    """Rank 1 is ahead with its gathers, so its last hash cannot be compared yet."""
    own, other = histories("ab", "x"), histories("acd", "y")
    error = Comparison(0).look(as_seen_by(other), own, 0)
    assert "collective 2 is b on rank 0 and c on rank 1\n" in str(error)


def test_equal_histories_are_no_error() -> None:
    own, other = histories("ab", "x"), histories("abc", "x")
    assert Comparison(0).look(as_seen_by(other), own, 0) is None
