"""Exchanges bytes between ranks through the job's store, since some ranks may never join."""

import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise._private import default_store

__all__ = ["Exchange"]

_POLL_SECONDS = 0.0005  # at first: a check costs as much CPU time
_MOST_SECONDS = 0.004


_connections: "weakref.WeakKeyDictionary[dist.ProcessGroup, Store]" = weakref.WeakKeyDictionary()


def _connection() -> Store:
    """A connection to the job's store, on which no thread waits.

    A job has one, because new connections take seconds once there are many.
    """
    job = dist.group.WORLD
    assert job is not None
    if job not in _connections:
        _connections[job] = default_store().clone()  # type: ignore[attr-defined]
    return _connections[job]


class Exchange:
    """Exchanges between the ranks of one process group.

    Ranks that call different operations wait for each other, as they do in NCCL, until they are
    aborted.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._store = PrefixStore(f"strict/{name}", _connection())
        self._rank = rank
        self._size = size
        self._number = 0
        self._sent = ""
        self.is_aborted = False

    def gather(self, operation: str, own: Tensor) -> Sequence[Tensor] | None:
        """Return what each rank passes, by rank; None if the group was aborted."""
        self._number += 1
        call = f"{self._number} {operation} {own.nbytes}"
        flat = own.detach().reshape(-1).view(torch.uint8)
        self._store.set(f"{call} {self._rank}", torch._C.TensorBase.numpy(flat).tobytes())  # type: ignore[arg-type] # bytes do
        keys = [f"{call} {rank}" for rank in range(self._size)]
        pause = _POLL_SECONDS
        while not self._store.check(keys):
            if self.is_aborted:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _MOST_SECONDS)
        found = self._store.multi_get(keys)
        parts = [torch.frombuffer(bytearray(one), dtype=own.dtype) for one in found]
        if self._sent:  # all ranks are in this call, so all have read the last one
            self._store.delete_key(self._sent)
        self._sent = keys[self._rank]
        return [part.view(own.shape) for part in parts]
