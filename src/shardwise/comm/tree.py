"""The sum of a binary tree."""

import torch
from torch import Tensor

__all__ = ["tree_sum"]


def tree_sum(rows: Tensor) -> Tensor:
    """Add neighboring ``rows`` [n, ...], then neighboring sums, and so on: (0 + 1) + (2 + 3).

    Equal to the sum of the sums of equal parts, in the same bits, if their number and n are powers
    of two.
    """
    while len(rows) > 1:
        left, right = rows[:-1:2], rows[1::2]
        sums = left + right
        rows = sums if len(rows) % 2 == 0 else torch.cat([sums, rows[-1:]])
    return rows[0]
