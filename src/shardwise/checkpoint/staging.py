"""Where shards wait that are written beside the training: host memory, kept from save to save."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.checkpoint.shares import Share

__all__ = ["Staging"]

_Shares = Mapping[str, Mapping[str, Share]]  # by component and tensor


class Staging:
    """Copies of shares, in memory that is lent to one save at a time.

    Memory that the process has already takes half the time, or less, that new memory does.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, str], Tensor] = {}

    def lend(self, shares: _Shares) -> dict[str, dict[str, Share]]:
        """Copies of ``shares`` as they are now, whose memory is the caller's until `take_back`."""
        free, self._free = self._free, {}
        return {
            name: {
                key: Share(share.start, _copied(share.elements, free.pop((name, key), None)))
                for key, share in by_key.items()
            }
            for name, by_key in shares.items()
        }

    def take_back(self, shares: _Shares) -> None:
        """The memory of what was lent is free for the next save."""
        self._free = {
            (name, key): share.elements
            for name, by_key in shares.items()
            for key, share in by_key.items()
        }

    def release(self) -> None:
        """Keep no memory."""
        self._free = {}


def _copied(source: Tensor, memory: Tensor | None) -> Tensor:
    """A copy, in ``memory`` if it fits; page-locked if it comes from a GPU."""
    pinned = source.device.type != "cpu"
    fits = (
        memory is not None
        and memory.shape == source.shape
        and memory.dtype is source.dtype
        and memory.is_pinned() == pinned
    )
    if memory is None or not fits:
        memory = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
    return memory.copy_(source)
