"""Sends and receives between pairs of ranks, of which collectives on the CPU are made.

Ranks of one host use sockets and shared memory (`HostPeers`), the others Gloo.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PeerLost
from shardwise.transport.host.channel import Message
from shardwise.transport.host.peers import INLINE_BYTES, HostPeers, Offer

__all__ = ["PointToPoint", "Use", "window_elements"]

_PIECE_BYTES = 1 << 19  # three of them fit into the cache of a processor
_CONNECT_TAG = 0  # of what is exchanged first
_Pairs = Mapping[int, tuple[Tensor, Tensor]]
_Errors = dict[int, Exception]
Use = Callable[[slice], None]


class PointToPoint:
    """The ranks of ``group``; all of them make it together."""

    def __init__(
        self, group: dist.ProcessGroup, own: int, num_ranks: int, timeout: timedelta
    ) -> None:
        self._group = group
        self._own = own
        self.timeout = timeout
        self._num_ranks = num_ranks
        self.num_exchanges = 0
        self.sent_bytes = 0
        self._peers = HostPeers()
        self._peers.connect(own, num_ranks, timeout, lambda tensor: self.swap(tensor, _CONNECT_TAG))

    def can_read(self, ranks: Iterable[int]) -> bool:
        """Whether this rank reads large tensors from the memory of all of these."""
        return all(map(self._peers.can_read, ranks))

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Whether all of these can open each other's files; each of them has the same answer."""
        return self._peers.can_share(ranks)

    def swap(self, own: Tensor, tag: int) -> list[Tensor]:
        """Every rank's tensor, by rank.

        Raises:
            PeerLost: as `exchange`.
        """
        received = [own if rank == self._own else own.clone() for rank in range(self._num_ranks)]
        others = {rank: (own, into) for rank, into in enumerate(received) if rank != self._own}
        self.exchange(others, tag)
        return received

    def exchange(self, tensors: _Pairs, tag: int, use: Use | None = None) -> None:
        """Send the first of each pair to its rank and receive the second from it.

        Args:
            tensors: contiguous. With a ``use`` all of them are [n]; if the memory of all ranks can
                be read, tensors to receive into may be windows of `window_elements`.
            tag: the same on both sides, and of no other exchange between them.
            use: called with slices of [n] as they are received, until all of [n] was used. Tensors
                that are read from memory come in pieces that fit into the processor's cache. In a
                window each piece starts at 0.

        Raises:
            PeerLost: at the end, so that the other peers do not wait for this rank.
        """
        self.count(sum(sent.nbytes for sent, _ in tensors.values()))
        lost: _Errors = {}
        near, far = self._sort(tensors)
        works = self._start(far, tag, lost)
        offers = self._send_and_recv(near, tag, lost)
        for rank, of_rank in works.items():
            for work in of_rank:
                with _noting(lost, rank):
                    if work is not None:
                        work.wait()
        try:
            if use is None:
                self._read(offers, lost)
            elif offers:
                self._read_pieces(offers, next(iter(near.values()))[0], lost, use)
            elif not lost:
                use(slice(None))
        finally:  # let all peers go on, and wait until none of them reads this rank's tensors
            for rank, offer in offers:
                with _noting(lost, rank):
                    offer.release()
            for rank, (sent, _) in near.items():
                with _noting(lost, rank):
                    self._peers.end(rank, sent, tag)
        self._raise(lost)

    def swap_bytes(self, own: bytes, tag: int) -> list[bytes]:
        """Every rank's bytes, by rank.

        Raises:
            PeerLost: as `exchange`.
        """
        sizes = self.swap(torch.tensor([len(own)], device="cpu"), tag)
        padded = bytearray(own.ljust(max(int(size) for size in sizes), b"\0"))
        received = self.swap(torch.frombuffer(padded, dtype=torch.uint8), tag)
        return [bytes(one[: int(size)].tolist()) for one, size in zip(received, sizes, strict=True)]

    def swap_messages(
        self, ranks: Iterable[int], message: bytes, tag: int, descriptor: int = -1
    ) -> dict[int, Message]:
        """Send a few bytes to ranks of this host, and return what they send; not an exchange.

        Args:
            ranks: of this host.
            message: the bytes.
            tag: the same on all of these ranks.
            descriptor: of an open file that is passed with the message, unless it is negative.

        Raises:
            PeerLost: as `exchange`.
        """
        ranks = tuple(ranks)
        lost: _Errors = {}
        for rank in ranks:
            with _noting(lost, rank):
                self._peers.send_message(rank, message, tag, descriptor)
        messages = {}
        for rank in ranks:
            with _noting(lost, rank):
                messages[rank] = self._peers.recv_message(rank, tag)
        self._raise(lost)
        return messages

    def count(self, num_bytes: int) -> None:
        """Note an exchange in which this rank sent so many."""
        self.num_exchanges += 1
        self.sent_bytes += num_bytes

    def _raise(self, lost: _Errors) -> None:
        for rank, error in lost.items():
            raise PeerLost(f"rank {self._own} lost rank {rank}: {error}") from error

    def _sort(self, tensors: _Pairs) -> tuple[_Pairs, _Pairs]:
        """Pairs that peers on this host exchange, and those that go through Gloo."""
        handles = self._peers.handles
        near = {rank: pair for rank, pair in tensors.items() if handles(rank, *pair)}
        return near, {rank: pair for rank, pair in tensors.items() if rank not in near}

    def _send_and_recv(self, tensors: _Pairs, tag: int, lost: _Errors) -> list[tuple[int, Offer]]:
        """Exchange small tensors with peers on this host, and offers of large ones."""
        offers: list[tuple[int, Offer]] = []
        for rank, (sent, _) in tensors.items():
            with _noting(lost, rank):
                self._peers.send(rank, sent, tag)
        for rank, (_, received) in tensors.items():
            with _noting(lost, rank):
                offer = self._peers.recv(rank, received, tag)
                if offer is not None:
                    offers.append((rank, offer))
        return offers

    def _start(self, tensors: _Pairs, tag: int, lost: _Errors) -> dict[int, list[dist.Work | None]]:
        """Begin to send and receive through Gloo."""
        works: dict[int, list[dist.Work | None]] = {rank: [] for rank in tensors}
        for rank, (_, received) in tensors.items():
            with _noting(lost, rank):
                works[rank].append(self._group.recv([_real(received)], rank, tag))
        for rank, (sent, _) in tensors.items():
            with _noting(lost, rank):
                works[rank].append(self._group.send([_real(sent)], rank, tag))
        return works

    def _read(self, offers: list[tuple[int, Offer]], lost: _Errors) -> None:
        for rank, offer in offers:
            with _noting(lost, rank):
                offer.check(offer.into.nbytes)
                offer.read(0, offer.num_bytes)

    def _read_pieces(
        self, offers: list[tuple[int, Offer]], like: Tensor, lost: _Errors, use: Use
    ) -> None:
        """Read tensors as large as ``like`` piece by piece, and use every piece."""
        for rank, offer in offers:
            with _noting(lost, rank):
                offer.check(like.nbytes)
        size = like.numel()
        step = min(_PIECE_BYTES // like.itemsize, *(offer.into.numel() for _, offer in offers))
        for start in range(0, 0 if lost else size, step):
            stop = min(start + step, size)
            for rank, offer in offers:
                with _noting(lost, rank):
                    offer.read(start * like.itemsize, stop * like.itemsize)
            use(slice(start, stop))


def window_elements(num_ranks: int, itemsize: int) -> int:
    """The elements of a window for one of ``num_ranks``: more than a message has."""
    return max(_PIECE_BYTES // num_ranks, 2 * INLINE_BYTES) // itemsize


@contextlib.contextmanager
def _noting(errors: _Errors, rank: int) -> Iterator[None]:
    """Keep the first error of the connection to ``rank``."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        errors.setdefault(rank, error)


def _real(tensor: Tensor) -> Tensor:
    """Gloo has no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
