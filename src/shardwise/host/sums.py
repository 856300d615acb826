"""Sums over the ranks of a group, in a binary tree over the order of the ranks.

The thread that computes prepares them: to create a view, the thread of a stream would have to wait
for the GIL. The stream then calls the result with the tag of an exchange.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.host.peers import INLINE_BYTES
from shardwise.host.point_to_point import PointToPoint, check_memory

__all__ = ["Add", "Finish", "Run", "Summation", "parts_of"]

Run = Callable[[int], None]  # called with a tag
Finish = Callable[[Tensor, slice], None]
Add = Callable[..., Tensor]


class Summation:
    """Prepares sums over the ranks of a `PointToPoint`."""

    def __init__(self, peers: PointToPoint) -> None:
        self._peers = peers
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")

    def prepare(
        self,
        ranks: Sequence[int],
        parts: Sequence[Tensor],
        total: Tensor,
        finish: Finish,
        *,
        keeps_total: bool = False,
        add: Add = torch.add,
    ) -> Run:
        """Prepare the sum over ``ranks`` of the parts for this rank.

        Neighbors are added, then neighboring sums: (0 + 1) + (2 + 3). One order gives replicas the
        same bits.

        Args:
            ranks: the ranks.
            parts: ``parts[i]`` is sent to ``ranks[i]``. It may be in the memory of ``total`` if it
                is sent inline.
            total: receives the sum.
            finish: called with the sum of each slice, and the slice; it may change the sum.
            keeps_total: ``total`` is not written, because ``finish`` writes the sum elsewhere.
            add: the binary operator that "sums"; called with ``out=``.
        """
        if not total.numel():
            return lambda _tag: None
        if len(ranks) == 1:
            return lambda _tag: finish(_copied(parts[0], total), slice(None))
        check_memory([*parts, total])
        own_index = ranks.index(self._peers.own_rank)
        own, others = parts[own_index], [i for i in range(len(ranks)) if i != own_index]
        num_windows = len(others) + keeps_total
        other_ranks = [ranks[i] for i in others]
        size = self._peers.window_elements(other_ranks, num_windows, own.itemsize)
        size = min(size, own.numel())
        windows = torch.split(self._windows(num_windows * size, own.dtype), size)
        received = dict(zip(others, windows, strict=False))

        def use(piece: slice) -> None:
            count = piece.stop - piece.start
            mine = own[piece]
            if keeps_total:
                # Half-precision numbers that are not in the processor's cache take three times as
                # long to add.
                mine = windows[-1][:count].copy_(mine)
            terms = [mine if i == own_index else received[i][:count] for i in range(len(ranks))]
            while len(terms) > 1:
                pairs = zip(terms[::2], terms[1::2], strict=False)
                if len(terms) == 2 and not keeps_total:  # noqa: PLR2004
                    terms = [add(*terms, out=total[piece])]
                    break
                # Windows may be overwritten; this rank's part may not.
                sums = [add(a, b, out=b if a is mine else a) for a, b in pairs]
                terms = sums + terms[2 * len(sums) :]
            finish(terms[0], piece)

        pairs = {ranks[i]: (parts[i], received[i]) for i in others}
        return partial(self._peers.exchange, pairs, use=use)

    def _windows(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory, shared by all exchanges, since a stream runs one at a time."""
        num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(mode=False):  # the stream's thread writes to it
            if self._window.numel() < num_bytes:
                self._window = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._window[:num_bytes].view(dtype)


def parts_of(flat: Tensor, num_ranks: int) -> tuple[list[Tensor], Tensor]:
    """Cut ``flat`` [n] for an all-reduce: a row for each rank, which it sums, and the rest.

    Small tensors are only a rest: it is sent inline, and so copied before its sum is written.
    """
    size = 0 if flat.nbytes <= INLINE_BYTES else flat.numel() // num_ranks
    cut = size * num_ranks
    return list(torch.split(flat[:cut], size)) if cut else [], flat[cut:]


def _copied(part: Tensor, total: Tensor) -> Tensor:
    """Return ``total`` with the numbers of ``part``; they may be the same memory."""
    return total if total.data_ptr() == part.data_ptr() else total.copy_(part)
