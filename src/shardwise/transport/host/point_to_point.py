"""Sends and receives between pairs of ranks, of which collectives on the CPU are made.

Ranks of one host use sockets and each other's memory (`Peer`), the others Gloo.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from shardwise._private import group_timeout
from shardwise.errors import PeerLost
from shardwise.transport.api import RankGroup
from shardwise.transport.host.handshake import find_peers
from shardwise.transport.host.peers import INLINE_BYTES, Message, Offer

__all__ = ["PointToPoint", "Use"]

_PIECE_BYTES = 1 << 19  # three of them fit into the cache of a processor
# Of what is sent through Gloo. 64 MB between two ranks took 30 ms of CPU whole, 38 in pieces of 16
# MB and 44 in pieces of 4 MB.
_GLOO_PIECE_BYTES = 1 << 25
_Pairs = Mapping[int, tuple[Tensor, Tensor]]
_Errors = dict[int, Exception]
Use = Callable[[slice], None]


class PointToPoint:
    """The ranks of ``world``; all of them make it together, under a ``name`` of its own."""

    def __init__(self, world: RankGroup, name: str) -> None:
        assert world.parent is not None
        self._own = world.own_rank
        self.sent = (0, 0)  # exchanges so far, and the bytes that this rank sent in them
        self.timeout = group_timeout(world.parent)
        store = PrefixStore(name, world.parent.get_group_store())

        def share(key: str, content: bytes) -> list[bytes]:
            store.set(f"{key}/{world.own_rank}", content)  # type: ignore[arg-type] # bytes do
            return store.multi_get([f"{key}/{rank}" for rank in range(world.size)])

        self.host = find_peers(world.own_rank, world.size, share, self.timeout)
        self._gloo: Any = None
        if not self.host.all_read:
            self._gloo = ProcessGroupGloo(store, self._own, world.size, self.timeout)

    def window_elements(self, group: RankGroup, num_windows: int, itemsize: int) -> int:
        """How many elements of each rank of ``group`` are summed at a time."""
        peers = self.host.peers
        all_read = all(rank in peers and peers[rank].can_read for _, rank in group.others)
        num_bytes = _PIECE_BYTES // num_windows if all_read else _GLOO_PIECE_BYTES
        return max(num_bytes, 2 * INLINE_BYTES) // itemsize  # more than a message has

    def exchange(self, pairs: _Pairs, tag: int, use: Use | None = None) -> None:
        """Send the first of each pair to its rank and receive the second from it.

        Args:
            pairs: 1-D and contiguous. With a ``use`` all to be sent are [n], and those to receive
                into are [n] or windows of `window_elements`.
            tag: the same on both sides, and of no other exchange between them.
            use: called with slices of [n], until all of it was used; what was received of the slice
                is at the start of each window then.

        Raises:
            PeerLost: at the end, so that the other peers do not wait for this rank.
        """
        self.count(sum(sent.nbytes for sent, _ in pairs.values()))
        lost: _Errors = {}
        peers = self.host.peers
        near = {r: p for r, p in pairs.items() if r in peers and peers[r].handles(*p)}
        far = {rank: pair for rank, pair in pairs.items() if rank not in near}
        with self._offering(near, tag, lost, in_windows=use is not None) as offers:
            if use is None:
                self._receive(offers, 0, far, tag, lost)
            else:
                own, window = next(iter(pairs.values()))
                for start in range(0, len(own), len(window)):
                    piece = slice(start, min(start + len(window), len(own)))
                    parts = {r: (s[piece], into[: len(s[piece])]) for r, (s, into) in far.items()}
                    self._receive(offers, start * own.itemsize, parts, tag, lost)
                    if not lost:
                        use(piece)
        self._raise(lost)

    def swap_messages(
        self, group: RankGroup, content: bytes, tag: int, descriptor: int = -1
    ) -> dict[int, Message]:
        """Send a few bytes to ranks of this host, and return what they send; not an exchange.

        Args:
            group: the ranks.
            content: the bytes.
            tag: the same on all of these ranks.
            descriptor: of an open file that is passed with the message, unless it is negative.

        Raises:
            PeerLost: as `exchange`.
        """
        peers = {rank: self.host.peers[rank] for _, rank in group.others}
        lost: _Errors = {}
        messages = {}
        for rank, peer in peers.items():
            with _noting(lost, rank):
                peer.send(tag, content, descriptor)
        for rank, peer in peers.items():
            with _noting(lost, rank):
                messages[rank] = peer.recv(tag)
        self._raise(lost)
        return messages

    def count(self, num_bytes: int) -> None:
        """Note an exchange in which this rank sent so many."""
        self.sent = self.sent[0] + 1, self.sent[1] + num_bytes

    @contextlib.contextmanager
    def _offering(
        self, near: _Pairs, tag: int, lost: _Errors, *, in_windows: bool
    ) -> Iterator[list[tuple[int, Offer]]]:
        """Exchange small tensors with peers on this host, and yield their offers of large ones."""
        peers = self.host.peers
        offers: list[tuple[int, Offer]] = []
        for rank, (sent, _) in near.items():
            with _noting(lost, rank):
                peers[rank].send_tensor(sent, tag)
        for rank, (sent, into) in near.items():
            with _noting(lost, rank):
                num_bytes = sent.nbytes if in_windows else into.nbytes
                offer = peers[rank].recv_tensor(into, num_bytes, tag)
                if offer is not None:
                    offers.append((rank, offer))
        try:
            yield offers
        finally:  # let all peers go on, and wait until none of them reads this rank's tensors
            for rank, _ in offers:
                with _noting(lost, rank):
                    peers[rank].release(tag)
            for rank, (sent, _) in near.items():
                with _noting(lost, rank):
                    peers[rank].end(sent, tag)

    def _receive(
        self,
        offers: list[tuple[int, Offer]],
        start: int,
        far: _Pairs,
        tag: int,
        lost: _Errors,
    ) -> None:
        """Read what peers on this host offer from byte ``start`` on, and exchange ``far`` pairs."""
        works: list[tuple[int, dist.Work]] = []
        for rank, (sent, into) in far.items():
            with _noting(lost, rank):
                works += [(rank, self._gloo.recv([one], rank, tag)) for one in _pieces(into)]
                works += [(rank, self._gloo.send([one], rank, tag)) for one in _pieces(sent)]
        for rank, offer in offers:
            with _noting(lost, rank):
                offer.read(start)
        for rank, work in works:
            with _noting(lost, rank):
                work.wait()

    def _raise(self, lost: _Errors) -> None:
        for rank, error in lost.items():
            raise PeerLost(f"rank {self._own} lost rank {rank}: {error}") from error


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The bytes of ``tensor``: Gloo does not know all dtypes."""
    return torch.split(tensor.view(torch.uint8), _GLOO_PIECE_BYTES)


@contextlib.contextmanager
def _noting(errors: _Errors, rank: int) -> Iterator[None]:
    """Keep the first error of the connection to ``rank``."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        errors.setdefault(rank, error)
