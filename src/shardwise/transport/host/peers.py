"""Ranks of the same host: messages through sockets of their own, and reads from memory to memory.

Gloo goes through the network's code even there. Between two busy ranks a small exchange took 0.3 ms
of each one's processor and 1 ms of time; through a socket that the waiting thread reads itself it
took 0.01 and 0.1 ms. 64 MB each way took 40 ms of each processor, for both copy all of it twice;
`process_vm_readv` copies it once, in 15 ms.

Whether that is possible is tried in the handshake. A host that does not permit the reads
(`kernel.yama.ptrace_scope`, some containers) leaves large exchanges to Gloo; another system, all.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from shardwise.transport.host import handshake
from shardwise.transport.host.channel import MAX_BYTES, Message
from shardwise.transport.host.process_memory import read_memory

__all__ = ["INLINE_BYTES", "HostPeers", "Offer"]

INLINE_BYTES = MAX_BYTES  # what is larger is read from memory
_OFFER = struct.Struct("<qq")  # address and bytes
_READS, _OPENS = 1, 2  # what a rank can do with another one: read its memory, open its files
_Swap = Callable[[Tensor], list[Tensor]]  # sends a tensor to all ranks, and returns theirs by rank


class HostPeers:
    """The ranks of a group that live on this host; none before they `connect`."""

    def __init__(self) -> None:
        self._peers: dict[int, handshake.Connection] = {}
        self._readable: set[int] = set()  # whose memory is read, and which read this one's
        self._opens: list[set[int]] = []  # by rank, which others' files it can open

    def connect(self, own: int, num_ranks: int, timeout: timedelta, swap: _Swap) -> None:
        """Find them; all ranks of the group do this together."""
        listener = handshake.listen(num_ranks)
        identity = handshake.Identity(own, listener)
        identities = [bytes(one.tolist()) for one in swap(_tensor(identity.pack()))]
        called = {} if listener is None else handshake.connect(identity, identities)
        flags = swap(_tensor(rank in called for rank in range(num_ranks)))
        greeted: handshake.Greeted = {}
        if listener is not None:
            with listener:
                callers = {rank for rank in range(num_ranks) if flags[rank][own]}
                greeted = handshake.accept(identity, listener, callers, identities)
        for rank, connection in called.items():
            _, descriptor = handshake.read_greeting(connection, identity.secret)
            greeted[rank] = connection, descriptor
        peers = {
            rank: handshake.establish(connection, descriptor, identities[rank], timeout)
            for rank, (connection, descriptor) in greeted.items()
        }
        ways = [0] * num_ranks
        for rank, peer in peers.items():
            ways[rank] = _READS * peer.can_read + _OPENS * peer.can_open
        by_rank = [row.tolist() for row in swap(_tensor(ways))]
        # Only now: `swap` takes the same way for all ranks, through Gloo.
        self._peers = peers
        self._readable = {
            rank for rank, peer in peers.items() if peer.can_read and by_rank[rank][own] & _READS
        }
        self._opens = [{rank for rank, way in enumerate(row) if way & _OPENS} for row in by_rank]

    def handles(self, rank: int, sent: Tensor, received: Tensor) -> bool:
        """Whether these are exchanged with ``rank`` here; it comes to the same conclusion."""
        is_small = max(sent.nbytes, received.nbytes) <= INLINE_BYTES
        return sent.is_cpu and rank in (self._peers if is_small else self._readable)

    def can_read(self, rank: int) -> bool:
        """Whether large tensors of ``rank`` are read from its memory, and it reads those here."""
        return rank in self._readable

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Whether all of these can open each other's files; each of them has the same answer."""
        opens = self._opens
        return bool(opens) and all({*ranks} - {rank} <= opens[rank] for rank in ranks)

    def send(self, rank: int, tensor: Tensor, tag: int) -> None:
        """Send a small tensor, or say where a large one is, which has to stay until `end`."""
        if tensor.nbytes <= INLINE_BYTES:
            content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        else:
            content = _OFFER.pack(tensor.data_ptr(), tensor.nbytes)
        self._peers[rank].channel.send(tag, content)

    def recv(self, rank: int, into: Tensor, tag: int) -> "Offer | None":
        """Fill ``into`` if it is small with what ``rank`` sends, or return the offer to read that.

        Raises:
            OSError: it is gone.
        """
        peer = self._peers[rank]
        content = peer.channel.recv(tag).content
        if into.nbytes <= INLINE_BYTES:
            _check_size(len(content), into.nbytes)
            ctypes.memmove(into.data_ptr(), content, into.nbytes)
            return None
        _check_size(len(content), _OFFER.size)
        address, num_bytes = _OFFER.unpack(content)
        return Offer(peer.process, address, num_bytes, into, partial(peer.channel.send, tag, b""))

    def send_message(self, rank: int, message: bytes, tag: int, descriptor: int = -1) -> None:
        self._peers[rank].channel.send(tag, message, descriptor)

    def recv_message(self, rank: int, tag: int) -> Message:
        """What ``rank`` sends.

        Raises:
            OSError: it is gone.
        """
        return self._peers[rank].channel.recv(tag)

    def end(self, rank: int, sent: Tensor, tag: int) -> None:
        """Return when ``rank`` has ``sent``.

        Raises:
            OSError: it is gone.
        """
        if sent.nbytes > INLINE_BYTES:
            self._peers[rank].channel.recv(tag)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor in another process, which stays there until it was read."""

    process: int
    address: int
    num_bytes: int
    into: Tensor  # as large, or a window that pieces of it pass through
    release: Callable[[], None]  # lets the other process go on

    def check(self, expected: int) -> None:
        """Raise a ConnectionError unless it has as many bytes."""
        _check_size(self.num_bytes, expected)

    def read(self, start: int, stop: int) -> None:
        """Copy these bytes to the same place of ``into``, or to the start of a window.

        Raises:
            OSError: the process is gone.
            ValueError: it would read or overwrite other memory.
        """
        at = start if self.into.nbytes == self.num_bytes else 0
        size = stop - start
        if not (0 <= start <= stop <= self.num_bytes and at + size <= self.into.nbytes):
            raise ValueError(
                f"bytes {start} to {stop} of {self.num_bytes} do not fit into {self.into.nbytes}"
            )
        read_memory(self.process, self.address + start, self.into.data_ptr() + at, size)


def _tensor(numbers: Iterable[int]) -> Tensor:
    """Of bytes, whatever the default device is."""
    return torch.tensor(list(numbers), dtype=torch.uint8, device="cpu")


def _check_size(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise ConnectionError(f"it sends {num_bytes} bytes where {expected} are expected")
