"""Sums over the ranks of a group, in the order of the ranks.

The thread that computes prepares them: to create a view, the thread of a stream would have to wait
for the interpreter. The stream then calls the result with the tag of an exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.transport.api import RankGroup
from shardwise.transport.device import copy_scaled_
from shardwise.transport.host.point_to_point import PointToPoint

__all__ = ["Finish", "Run", "Summation"]

Run = Callable[[int], None]  # with a tag


@dataclass(frozen=True, slots=True)
class Finish:
    """The steps after a sum."""

    carried: Tensor | None  # is added to it
    out: Tensor | None  # where it goes then, cast and scaled; None: it stays
    scale: float

    def __call__(self, total: Tensor, piece: slice) -> None:
        """Finish the sum of a ``piece``."""
        if self.carried is not None:
            total.add_(self.carried[piece])
        if self.out is not None:
            copy_scaled_(self.out[piece], total, self.scale)


class Summation:
    """Prepares sums over the ranks of a `PointToPoint`."""

    def __init__(self, peers: PointToPoint) -> None:
        self._peers = peers
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")

    def prepare(
        self, group: RankGroup, parts: Sequence[Tensor], total: Tensor, finish: Finish
    ) -> Run:
        """Send ``parts[i]`` to rank i of ``group``; add up received and own parts in ``total``.

        They are added in the order of the ranks, so that replicas get the same bits. ``finish``
        follows. If it casts, the sum is nowhere but in its ``out``. Parts for other ranks may be in
        the memory of ``total`` if they are sent inline.
        """
        if not total.numel():
            return lambda _tag: None
        if group.size == 1:
            return lambda _tag: _copy(parts[0], total, finish)
        own, casts = parts[group.index], finish.out is not None and finish.out.dtype != total.dtype
        num_windows = group.size if casts else group.size - 1
        size = self._peers.window_elements(group, num_windows, own.itemsize)
        size = min(size, own.numel())
        windows = torch.split(self._windows(num_windows * size, own.dtype), size)
        received = {i: window for (i, _), window in zip(group.others, windows, strict=False)}

        def add(piece: slice) -> None:
            count = piece.stop - piece.start
            terms = {i: window[:count] for i, window in received.items()}
            # Half-precision numbers that are not in the processor's cache take three times as long
            # to add.
            last = windows[-1][:count]
            terms[group.index] = last.copy_(own[piece]) if casts else own[piece]
            # The first received is in the first sum, so its memory may be overwritten.
            spare = windows[0][:count]
            so_far = terms[0]
            for i in range(1, group.size):
                is_last = i == group.size - 1 and not casts
                so_far = torch.add(so_far, terms[i], out=total[piece] if is_last else spare)
            finish(so_far, piece)

        pairs = {rank: (parts[i], received[i]) for i, rank in group.others}
        return partial(self._peers.exchange, pairs, use=add)

    def _windows(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Scratch that all exchanges share, for a stream runs one at a time."""
        num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(mode=False):  # the stream's thread writes to it
            if self._window.numel() < num_bytes:
                self._window = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._window[:num_bytes].view(dtype)


def _copy(part: Tensor, total: Tensor, finish: Finish) -> None:
    """The sum of one part."""
    if total.data_ptr() != part.data_ptr():
        total.copy_(part)
    finish(total, slice(None))
