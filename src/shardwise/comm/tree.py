"""The sum of a binary tree."""

from torch import Tensor

__all__ = ["tree_sum"]


def tree_sum(rows: Tensor, *, in_place: bool = False) -> Tensor:
    """Add neighboring ``rows`` [n, ...], then neighboring sums, and so on: (0 + 1) + (2 + 3).

    Equal to the sum of the sums of equal parts, in the same bits, if their number and n are powers
    of two. With ``in_place`` it overwrites ``rows``, and returns the first.
    """
    if not in_place:
        rows = rows.clone()
    while len(rows) > 1:
        rows[:-1:2] += rows[1::2]
        rows = rows[::2]
    return rows[0]
