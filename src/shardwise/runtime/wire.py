"""Sends and receives between pairs of ranks on Gloo, which collectives are made of."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PeerLost
from shardwise.runtime.neighbours import LEAST_BYTES, Neighbours

__all__ = ["Wire"]

_HELLO = 0  # the tag of what is exchanged first
_Pairs = Mapping[int, tuple[Tensor, Tensor]]
_Errors = dict[int, RuntimeError]


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
            self._read(near, tag, lost)
        self._end(works, lost)
        for rank, error in lost.items():
            raise PeerLost(f"rank {self._own} lost rank {rank}: {error}") from error

    def _is_near(self, rank: int, sent: Tensor) -> bool:
        is_large = sent.nbytes >= LEAST_BYTES
        return is_large and self._neighbours is not None and rank in self._neighbours

    def _read(self, tensors: _Pairs, tag: int, lost: _Errors) -> None:
        """Neighbours tell where their tensors are, read each other's, and say when they have."""
        assert self._neighbours is not None
        offers = {}
        for rank, (sent, _) in tensors.items():
            offer = self._neighbours.offer(sent)
            offers[rank] = offer, torch.zeros_like(offer)
        works = self._start(offers, tag, lost)
        for rank, (_, received) in tensors.items():
            self._end({rank: works[rank]}, lost)
            with _noting(lost, rank):
                self._neighbours.read(rank, offers[rank][1], received)
        self._end(self._start(offers, tag, lost), lost)

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

    def _end(self, works: Mapping[int, list[dist.Work | None]], lost: _Errors) -> None:
        for rank, of_rank in works.items():
            for work in of_rank:
                with _noting(lost, rank):
                    if work is not None:
                        work.wait()


@contextlib.contextmanager
def _noting(errors: _Errors, rank: int) -> Iterator[None]:
    """Keep the first error of the connection to ``rank``."""
    try:
        yield
    except RuntimeError as error:
        errors.setdefault(rank, error)


def _real(tensor: Tensor) -> Tensor:
    """What the wire takes of complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
