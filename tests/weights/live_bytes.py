"""Counts the bytes of the tensors that a thread allocates, until their memory is freed."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.watching import without_frames

__all__ = ["live_bytes"]


@contextmanager
def live_bytes() -> Iterator["LiveBytes"]:
    """Count in the block, in which heartbeats do not keep tensors alive."""
    with without_frames(), LiveBytes() as live:
        yield live


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``now`` and at most (``peak``): bytes of storages that operators in the block returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = {key for one in tree_leaves((args, kwargs)) if (key := _key(one)) is not None}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            key = _key(one)
            if key is not None and key not in before and key not in self._known:
                storage = one.untyped_storage()
                self._known.add(key)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _key(value: Any) -> int | None:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return value.untyped_storage()._cdata if is_plain else None
