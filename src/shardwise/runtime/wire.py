"""Sends and receives between pairs of ranks on Gloo, which collectives are made of."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PeerLost
from shardwise.runtime.neighbours import Neighbours

__all__ = ["Wire"]

_HELLO = 0  # the tag of what is exchanged first
_Pairs = Mapping[int, tuple[Tensor, Tensor]]
_Errors = dict[int, Exception]


class Wire:
    """The ranks of ``group``; all of them make it together."""

    def __init__(self, group: dist.ProcessGroup, own: int, num_ranks: int) -> None:
        self._group = group
        self._own = own
        self._num_ranks = num_ranks
        self._neighbours: Neighbours | None = None
        self._neighbours = Neighbours(own, num_ranks, lambda tensor: self.swap(tensor, _HELLO))

    def swap(self, own: Tensor, tag: int) -> list[Tensor]:
        """Every rank's tensor, by rank.

        Raises:
            PeerLost: as `exchange`.
        """
        received = [own if rank == self._own else own.clone() for rank in range(self._num_ranks)]
        others = {rank: (own, into) for rank, into in enumerate(received) if rank != self._own}
        self.exchange(others, tag)
        return received

    def exchange(self, tensors: _Pairs, tag: int) -> None:
        """Send the first of each pair to its rank and receive the second, as large, from it.

        Raises:
            PeerLost: at the end, so that the peers that are left do not wait for this rank.
        """
        lost: _Errors = {}
        near = {rank: pair for rank, pair in tensors.items() if self._is_near(rank, pair[0])}
        far = {rank: pair for rank, pair in tensors.items() if rank not in near}
        works = self._start(far, tag, lost)
        if near:
            self._meet(near, tag, lost)
        for rank, of_rank in works.items():
            for work in of_rank:
                with _noting(lost, rank):
                    if work is not None:
                        work.wait()
        for rank, error in lost.items():
            raise PeerLost(f"rank {self._own} lost rank {rank}: {error}") from error

    def _is_near(self, rank: int, sent: Tensor) -> bool:
        return self._neighbours is not None and self._neighbours.have(rank, sent)

    def _meet(self, tensors: _Pairs, tag: int, lost: _Errors) -> None:
        """Exchange with neighbours."""
        assert self._neighbours is not None
        for rank, (sent, _) in tensors.items():
            with _noting(lost, rank):
                self._neighbours.send(rank, sent, tag)
        for rank, (_, received) in tensors.items():
            with _noting(lost, rank):
                self._neighbours.receive(rank, received, tag)
        for rank, (sent, _) in tensors.items():
            with _noting(lost, rank):
                self._neighbours.end(rank, sent, tag)

    def _start(self, tensors: _Pairs, tag: int, lost: _Errors) -> dict[int, list[dist.Work | None]]:
        """Begin to send and receive."""
        works: dict[int, list[dist.Work | None]] = {rank: [] for rank in tensors}
        for rank, (_, received) in tensors.items():
            with _noting(lost, rank):
                works[rank].append(self._group.recv([_real(received)], rank, tag))
        for rank, (sent, _) in tensors.items():
            with _noting(lost, rank):
                works[rank].append(self._group.send([_real(sent)], rank, tag))
        return works


@contextlib.contextmanager
def _noting(errors: _Errors, rank: int) -> Iterator[None]:
    """Keep the first error of the connection to ``rank``."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        errors.setdefault(rank, error)


def _real(tensor: Tensor) -> Tensor:
    """What the wire takes of complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
