"""Sums over the ranks of a group, in the order of the ranks.

The thread that computes prepares them: to create a view, the thread of a stream would have to wait
for the GIL. The stream then calls the result with the tag of an exchange.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.transport.api import RankGroup
from shardwise.transport.device import copy_scaled_
from shardwise.transport.host.point_to_point import PointToPoint, check_memory

__all__ = ["Run", "Summation"]

Run = Callable[[int], None]  # called with a tag


class Summation:
    """Prepares sums over the ranks of a `PointToPoint`."""

    def __init__(self, peers: PointToPoint) -> None:
        self._peers = peers
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")

    def prepare(
        self,
        group: RankGroup,
        parts: Sequence[Tensor],
        total: Tensor,
        out: Tensor | None,
        scale: float,
        carried: Tensor | None,
    ) -> Run:
        """Prepare the sum over ``group`` of the parts for this rank, in the order of the ranks.

        The order gives replicas the same bits.

        Args:
            group: the ranks.
            parts: ``parts[i]`` is sent to rank i. It may be in the memory of ``total`` if it is
                sent inline.
            total: receives the sum, unless ``out`` has another dtype.
            out: receives ``scale`` times the sum; may be ``total``.
            scale: a factor for ``out``.
            carried: an addend of the sum.
        """

        def finish(total: Tensor, piece: slice) -> None:
            if carried is not None:
                total.add_(carried[piece])
            if out is not None:
                copy_scaled_(out[piece], total, scale)

        if not total.numel():
            return lambda _tag: None
        if group.size == 1:
            return lambda _tag: finish(_copied(parts[0], total), slice(None))
        check_memory([*parts, total])
        own, casts = parts[group.index], out is not None and out.dtype != total.dtype
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
            # The first sum includes the first window, whose memory may then be overwritten.
            spare = windows[0][:count]
            so_far = terms[0]
            for i in range(1, group.size):
                is_last = i == group.size - 1 and not casts
                so_far = torch.add(so_far, terms[i], out=total[piece] if is_last else spare)
            finish(so_far, piece)

        pairs = {rank: (parts[i], received[i]) for i, rank in group.others}
        return partial(self._peers.exchange, pairs, use=add)

    def _windows(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory, shared by all exchanges, since a stream runs one at a time."""
        num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(mode=False):  # the stream's thread writes to it
            if self._window.numel() < num_bytes:
                self._window = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._window[:num_bytes].view(dtype)


def _copied(part: Tensor, total: Tensor) -> Tensor:
    """Return ``total`` with the numbers of ``part``; they may be the same memory."""
    return total if total.data_ptr() == part.data_ptr() else total.copy_(part)
