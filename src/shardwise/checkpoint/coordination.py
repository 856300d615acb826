"""Exchanges between the ranks of a save or load: agreement, bytes and errors."""

import contextlib
import copy
import errno
import logging
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise import parts  # noqa: F401 - the engine uses them
from shardwise.checkpoint.slices import HostCopies
from shardwise.comm.api import Work
from shardwise.comm.communicator import (
    Collectives,
    Communicator,
    communicator,
    make_collectives,
)
from shardwise.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.reductions import across

__all__ = ["Coordinator", "coordinated", "coordinator_of"]

PATIENCE_SECONDS = 15.0

_CPU = torch.device("cpu")
# Coordinators by process group, as in `comm.communicator`, or by model in a single process; then by
# the name of their queue.
_coordinators: "weakref.WeakKeyDictionary[object, dict[str, Coordinator]]" = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def coordinated(
    mesh: DataParallelMesh,
    model: object | None,
    device: torch.device,
    call: str,
    action: str,
    queue: str = "checkpoint",
) -> Iterator["Coordinator"]:
    """Run the body on all ranks of ``mesh``, once they have agreed on the ``action``.

    If it raises on one rank alone, the others raise a PeerAborted that names the ``call``.

    Exchanges in a ``queue`` must have the same order on all ranks, so those that may run beside a
    save with ``wait=False`` need another one.

    Raises:
        CheckpointError: on every rank: their actions differ.
        StepError: another rank raised, or is lost.
    """
    if mesh.num_ranks == 1:
        yield coordinator_of(mesh, model, queue)
        return
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(_warning_of_absent_ranks(mesh, call))
        device = mesh.accelerator or device
        comm = communicator(mesh.world, device)
        comm.place.where = call
        name = f"{queue}/{comm.gather.name}"
        ranks = coordinator_of(mesh, model, name)
        try:
            ranks.agree(mesh, device, action)
            ranks = ranks.connected(mesh, comm, name)
            _coordinators[mesh.group][name] = ranks
            waiting.close()
            yield ranks
        except BaseException as error:
            if not ranks.has_raised_together:
                comm.watch.abort(error)
            raise


def coordinator_of(
    mesh: DataParallelMesh, model: object | None, queue: str = "checkpoint"
) -> "Coordinator":
    """The coordinator of the ranks of ``mesh``; see `coordinated`."""
    key = model if mesh.group is None else mesh.group
    if key is None:
        return Coordinator(mesh)
    by_queue = _coordinators.setdefault(key, {})
    return by_queue.setdefault(queue, Coordinator(mesh))


@contextlib.contextmanager
def _warning_of_absent_ranks(mesh: DataParallelMesh, call: str) -> Iterator[None]:
    """Log a warning if the other ranks do not make the same ``call`` in `PATIENCE_SECONDS`."""
    text = f"rank {mesh.group_rank} waits in {call} for the other ranks: every rank must call it"
    timer = threading.Timer(PATIENCE_SECONDS, logging.getLogger("shardwise").warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Waitable(Protocol):
    """A save that may still be running."""

    def wait(self) -> None:
        """Return when the save has ended; raise its error."""


class Coordinator:
    """Collectives of one process group that run concurrently with those of a training step."""

    def __init__(self, mesh: DataParallelMesh) -> None:
        self.size = mesh.num_ranks
        self.rank = mesh.group_rank
        self.pending: Waitable | None = None  # the last save with wait=False
        self.host_copies = HostCopies()  # reused by all saves with wait=False
        self.has_raised_together = False  # all ranks know the error that leaves `coordinated`
        # After `connected`, if there are other ranks:
        self._collectives: Collectives | None = None
        self._epoch = 0  # of the watch, when the ranks made the queue
        self._comm: Communicator | None = None  # through which a rank learns of errors on others
        self._is_in_background = False

    def agree(self, mesh: DataParallelMesh, device: torch.device, action: str) -> None:
        """Return when all ranks have called this; a CheckpointError if their ``action`` differs."""
        self.has_raised_together = False
        if self.size == 1:
            return
        digest = torch.tensor(zlib.crc32(action.encode()), device=device)
        by_rank = across([digest], mesh, mesh.world)[:, 0].tolist()
        others = [rank for rank, other in enumerate(by_rank) if other != by_rank[self.rank]]
        if others:
            self.has_raised_together = True
            raise CheckpointError(
                f"rank {self.rank} is about to {action}, but rank {others[0]} is not; every rank "
                "must save or load the same tensors at the same path"
            )

    def connected(self, mesh: DataParallelMesh, comm: Communicator, name: str) -> "Coordinator":
        """This one, or one with a new queue if the ranks have recovered from an error since.

        Some ranks may have left the last queue in the middle of an exchange; a save with
        ``wait=False`` goes on in it. All ranks call this together.
        """
        if self._collectives is not None and self._epoch == comm.watch.epoch:
            return self
        renewed = copy.copy(self)
        renewed._comm, renewed._epoch = comm, comm.watch.epoch
        renewed._collectives = make_collectives(
            mesh.world, _CPU, name, renewed._epoch, comm.wait_until
        )
        return renewed

    def in_background(self) -> "Coordinator":
        """The same queue for a thread, whose waits do not end because a step has failed."""
        twin = copy.copy(self)
        twin._is_in_background = True
        return twin

    def finish_pending(self) -> None:
        """Wait for the last save with ``wait=False``, and raise its error unless all ranks have."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with self.raises_together("complete the last save"):
                pending.wait()

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The ``payload`` of every rank, in order of rank."""
        if self._collectives is None:
            return [payload]
        sizes = self._gather_rows(torch.tensor([len(payload)], device=_CPU))[:, 0].tolist()
        padded = bytearray(payload.ljust(max(*sizes, 1), b"\0"))
        rows = self._gather_rows(torch.frombuffer(padded, dtype=torch.uint8)).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def all_gather_rows(
        self, rows: Sequence[Sequence[int]], length: int
    ) -> list[NDArray[np.int64]]:
        """The ``rows`` of every rank, of ``length`` integers each: [rows, length] by rank."""
        encoded = self.all_gather(np.array(rows, dtype=np.int64).tobytes())
        return [np.frombuffer(one, dtype=np.int64).reshape(-1, length) for one in encoded]

    def all_to_all(self, sent: Sequence[Tensor], num_bytes: Sequence[int]) -> list[Tensor]:
        """Send one tensor [n] of uint8 to each rank; receive one, of ``num_bytes``, from each."""
        with torch.inference_mode(mode=False):  # as in `_gather_rows`
            received = [torch.empty(n, dtype=torch.uint8, device=_CPU) for n in num_bytes]
            received[self.rank] = sent[self.rank]
            pairs = {  # both ranks of a pair know whether either sends anything
                rank: (own, other)
                for rank, (own, other) in enumerate(zip(sent, received, strict=True))
                if rank != self.rank and (len(own) or len(other))
            }
        if self._collectives is not None:
            self._wait(self._collectives.exchange(pairs, "checkpoint"))
        return received

    @contextlib.contextmanager
    def raises_together(self, action: str) -> Iterator[None]:
        """If a rank raises in the block, raise at its end on all others, with its message."""
        own_error: Exception | None = None
        try:
            yield
        except OSError as error:
            own_error = CheckpointError(_describe(error))
            own_error.__cause__ = error
        except Exception as error:
            comm = None if self._is_in_background else self._comm
            if comm is not None and comm.watch.is_broken:
                raise  # as the other ranks do, where they wait
            own_error = error
        text = "" if own_error is None else f"{type(own_error).__name__}\0{own_error}"
        texts = self.all_gather(text.encode())
        self.has_raised_together = any(texts)
        if own_error is not None:
            raise own_error
        for rank, encoded in enumerate(texts):
            if encoded:
                kind, _, message = encoded.decode().partition("\0")
                raise _same_kind(kind)(f"rank {rank} could not {action}: {message}")

    def _gather_rows(self, row: Tensor) -> Tensor:
        """Gather the ``row`` [n] of every rank: [ranks, n]."""
        collectives = self._collectives
        assert collectives is not None
        with torch.inference_mode(mode=False):  # written by another thread
            rows = row.new_zeros(self.size, row.numel())

        def fill() -> None:
            rows[self.rank].copy_(row)

        self._wait(collectives.all_gather(rows.view(-1), collectives.world, "checkpoint", fill))
        return rows

    def _wait(self, work: Work) -> None:
        assert self._comm is not None
        if self._is_in_background:
            self._comm.wait_alone(work)
        else:
            work.collective = None  # the watch does not know this queue
            self._comm.wait(work)


_ADVICE = {
    "ENOSPC": "the disk is full; free some space, or keep fewer checkpoints (retention=)",
    "EDQUOT": "the quota is used up; free some space, or keep fewer checkpoints (retention=)",
    "EFBIG": "the file is larger than the system allows; use a smaller max_file_bytes",
    "EROFS": "the file system is read-only; choose another path",
    "ELOOP": "a symbolic link, through which nothing is written; remove it, or choose another path",
    "EACCES": "no permission; choose another path, or change the directory's permissions",
    "EPERM": "no permission; choose another path, or change the directory's permissions",
}


def _describe(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    where = f"{error.filename}: " if error.filename else ""
    advice = f" ({_ADVICE[name]})" if name in _ADVICE else ""
    return f"{where}{error.strerror or error}{advice}"


def _same_kind(name: str) -> type[CheckpointError]:
    kinds = {kind.__name__: kind for kind in (CheckpointDamaged, CheckpointNotFound)}
    return kinds.get(name, CheckpointError)
