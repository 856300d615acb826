"""The ranks that save or load together, and what they tell each other."""

import contextlib
import errno
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.staging import Staging
from shardwise.errors import CheckpointDamaged, CheckpointError
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.reductions import across
from shardwise.transport.api import Work
from shardwise.transport.communicator import (
    POLL_SECONDS,
    Communicator,
    communicator,
    make_collectives,
)

__all__ = ["Peers", "peers_of"]

_CPU = torch.device("cpu")
# By process group, as for `runtime.communicator`; where there is none, by what is saved.
_known: "weakref.WeakKeyDictionary[object, Peers]" = weakref.WeakKeyDictionary()


def peers_of(axis: DataParallelMesh, owner: object | None) -> "Peers":
    """The ranks of ``axis``; the first call makes their link, on all of them."""
    key = owner if axis.group is None else axis.group
    if key is None:
        return Peers(axis)
    if key not in _known:
        _known[key] = Peers(axis)
    return _known[key]


class Pending(Protocol):
    """Something that goes on beside the caller."""

    def wait(self) -> None:
        """Return when it has ended, or raise why it did not."""
        ...


class Peers:
    """A link of its own, so that a save can go on beside the exchanges of a step."""

    def __init__(self, axis: DataParallelMesh) -> None:
        self.size = axis.num_ranks
        self.rank = axis.group_rank
        self.pending: Pending | None = None  # a save that is still being written
        self.staging = Staging()
        self._link = make_collectives(axis.world, _CPU, "checkpoint") if self.size > 1 else None
        self._guard: Communicator | None = None  # of the ranks' life, while they wait here

    def meet(self, axis: DataParallelMesh, device: torch.device, doing: str) -> None:
        """Return when all ranks are about to do the same.

        Raises:
            CheckpointError: they are about to do different things.
            StepError: a rank raised, is gone, or waits for something else.
        """
        if self.size == 1:
            return
        digest = torch.tensor(zlib.crc32(doing.encode()), device=device)
        self._guard = communicator(axis.world, device)
        by_rank = across([digest], axis, axis.world)[:, 0].tolist()
        others = [rank for rank, other in enumerate(by_rank) if other != by_rank[self.rank]]
        if others:
            raise CheckpointError(
                f"rank {self.rank} is about to {doing}, rank {others[0]} to do something else; "
                "every rank saves and loads the same tensors in the same place"
            )

    def settle(self) -> None:
        """Wait for a save that is still being written; its error is raised here."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def exchange(self, payload: bytes) -> list[bytes]:
        """The bytes of every rank, by rank."""
        if self._link is None:
            return [payload]
        sizes = self._gather(torch.tensor([len(payload)], device=_CPU))[:, 0].tolist()
        padded = bytearray(payload.ljust(max(*sizes, 1), b"\0"))
        rows = self._gather(torch.frombuffer(padded, dtype=torch.uint8)).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def swap(self, sent: Mapping[int, Tensor], num_bytes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send bytes to some ranks and receive ``num_bytes`` from some; all ranks call this.

        Args:
            sent: [n] of uint8, by rank; not this one.
            num_bytes: of what each of the others sends here; 0 may be left out.
        """
        with torch.inference_mode(mode=False):  # as in `_gather`
            received = {rank: _empty(size) for rank, size in num_bytes.items() if size}
            # Both of a pair know whether there is anything; one byte stands for nothing.
            pairs = {
                rank: (sent.get(rank, _empty(1)), received.get(rank, _empty(1)))
                for rank in sorted(sent.keys() | received.keys())
            }
        if self._link is not None:
            self._wait(self._link.exchange(pairs, "checkpoint"))
        return received

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """What the block raises on one rank is raised on all of them, at its end.

        Raises:
            CheckpointError: in the words of the rank that raised.
        """
        mine: Exception | None = None
        try:
            yield
        except OSError as error:
            mine = CheckpointError(_explain(error))
            mine.__cause__ = error
        except Exception as error:  # noqa: BLE001 - it is raised below, when the others know
            mine = error
        told = self.exchange(b"" if mine is None else f"{type(mine).__name__}\0{mine}".encode())
        if mine is not None:
            raise mine
        for rank, text in enumerate(told):
            if text:
                kind, _, words = text.decode().partition("\0")
                raise _same_kind(kind)(f"rank {rank} could not {doing}: {words}")

    def _gather(self, row: Tensor) -> Tensor:
        """[ranks, n] of every rank's ``row`` [n]."""
        assert self._link is not None
        with torch.inference_mode(mode=False):  # the link writes to it, on a thread of its own
            rows = row.new_zeros(self.size, row.numel())

        def fill() -> None:
            rows[self.rank].copy_(row)

        self._wait(self._link.all_gather(rows.view(-1), self._link.world, "checkpoint", fill))
        return rows

    def _wait(self, pending: Work) -> None:
        while not pending.wait(POLL_SECONDS):
            if self._guard is not None:
                self._guard.check_peers()
        if pending.error is not None:
            raise pending.error


def _empty(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=_CPU)


_WAYS_OUT = {
    "ENOSPC": "the disk is full; free some of it, or keep fewer checkpoints (retention=)",
    "EDQUOT": "the quota is used up; free some of it, or keep fewer checkpoints (retention=)",
    "EFBIG": "the file is larger than the system allows; use a smaller max_file_bytes",
    "EROFS": "the file system is read-only; choose another path",
    "EACCES": "no permission; choose another path, or change that of the directory",
    "EPERM": "no permission; choose another path, or change that of the directory",
}


def _explain(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    where = f"{error.filename}: " if error.filename else ""
    advice = f" ({_WAYS_OUT[name]})" if name in _WAYS_OUT else ""
    return f"{where}{error.strerror or error}{advice}"


def _same_kind(name: str) -> type[CheckpointError]:
    return CheckpointDamaged if name == CheckpointDamaged.__name__ else CheckpointError
