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
from shardwise.transport.host.point_to_point import PointToPoint, window_elements

__all__ = ["Finish", "Summation"]

Run = Callable[[int], None]  # with a tag


@dataclass(frozen=True, slots=True)
class Finish:
    """What is done to a sum."""

    carried: Tensor | None  # is added to it
    out: Tensor | None  # where it goes then, cast and scaled; None: it stays
    scale: float

    def casts(self, total: Tensor) -> bool:
        return self.out is not None and self.out.dtype != total.dtype

    def __call__(self, total: Tensor, piece: slice) -> None:
        if self.carried is not None:
            total[piece].add_(self.carried[piece])
        if self.out is not None:
            copy_scaled_(self.out[piece], total[piece], self.scale)


class Summation:
    """Prepares sums over the ranks of a `PointToPoint`."""

    def __init__(self, peers: PointToPoint, *, reads_memory: bool) -> None:
        self._peers = peers
        self._reads_memory = reads_memory
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")

    def prepare(
        self,
        group: RankGroup,
        parts: Sequence[Tensor],
        total: Tensor,
        scratch: Tensor,
        finish: Finish,
    ) -> Run:
        """Send ``parts[i]`` to rank i of ``group``; add up received and own parts in ``total``.

        They are added in the order of the ranks, so that replicas get the same bits. ``finish``
        follows.
        """
        if not total.numel():
            return lambda _tag: None
        own_is_total = parts[group.index].data_ptr() == total.data_ptr()
        in_pieces = all(parts[i].data_ptr() != total.data_ptr() for i, _ in group.others)
        if self._reads_memory and in_pieces and finish.casts(total):
            return self._prepare_in_windows(group, parts, finish)
        num_slots = group.size - 1 if own_is_total else group.size - 2
        size = total.numel()
        if self._reads_memory and num_slots:
            if in_pieces:
                size = min(size, window_elements(group.size, total.itemsize))
            scratch = self._windows(num_slots * size, total.dtype)
        free = [*torch.split(scratch[: num_slots * size], size)]
        if not own_is_total:
            free = [total, *free]
        received = {i: free[n] for n, (i, _) in enumerate(group.others)}
        pairs = {rank: (parts[i], received[i]) for i, rank in group.others}
        received[group.index] = parts[group.index]

        def add(piece: slice) -> None:
            so_far = _piece_of(received[0], piece, total)
            for i in range(1, group.size):
                # The first received is in the first sum, so its memory may be overwritten.
                to = total if i == group.size - 1 else free[0]
                here = _piece_of(to, piece, total)
                so_far = torch.add(so_far, _piece_of(received[i], piece, total), out=here)
            finish(total, piece)

        exchange = self._peers.exchange
        if in_pieces:
            return partial(exchange, pairs, use=add)

        def sum_up(tag: int) -> None:
            exchange(pairs, tag)  # others read what `add` writes to
            add(slice(None))

        return sum_up

    def _prepare_in_windows(self, group: RankGroup, parts: Sequence[Tensor], finish: Finish) -> Run:
        """As `prepare`, where the sum is nowhere but in ``finish.out``.

        The own part passes through a window, too: adding half-precision numbers that are not in the
        processor's cache takes three times as long.
        """
        own, out = parts[group.index], finish.out
        assert out is not None
        size = min(own.numel(), window_elements(group.size, own.itemsize))
        windows = torch.split(self._windows(group.size * size, own.dtype), size)
        pairs = {rank: (parts[i], windows[i]) for i, rank in group.others}

        def add(piece: slice) -> None:
            terms = [_piece_of(window, piece, own) for window in windows]
            terms[group.index].copy_(own[piece])
            total = terms[0]
            for term in terms[1:]:
                total.add_(term)
            if finish.carried is not None:
                total.add_(finish.carried[piece])
            copy_scaled_(out[piece], total, finish.scale)

        return partial(self._peers.exchange, pairs, use=add)

    def _windows(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Scratch that all exchanges share, for a stream runs one at a time."""
        num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(mode=False):  # the stream's thread writes to it
            if self._window.numel() < num_bytes:
                self._window = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._window[:num_bytes].view(dtype)


def _piece_of(tensor: Tensor, piece: slice, of: Tensor) -> Tensor:
    """A piece of a tensor as long as ``of``, or of a window that pieces pass through."""
    if tensor.numel() < of.numel():
        piece = slice(piece.stop - piece.start)
    return tensor[piece]
