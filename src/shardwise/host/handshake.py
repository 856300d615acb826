"""Connects the ranks of one host, through sockets without a file that only this job can use.

Every rank listens, and the ranks after it connect. A process of another user is rejected by the
credentials that the kernel reports, and any other process because it does not know the secret that
ranks share through the store of their group.
"""

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from shardwise.host.peers import Peer, has_bytes

__all__ = ["Host", "Identity", "accept", "connect", "find_peers", "listen"]

_SECRET_BYTES = 32
_GREETING = struct.Struct(f"<q{_SECRET_BYTES}s")  # own rank, secret of the receiver
_IDENTITY = struct.Struct(f"<Q{_SECRET_BYTES}s")  # address, secret
_MAX_NAME_BYTES = 107  # of a Unix socket
_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id
_TIMEOUT_SECONDS = 60.0


class Identity(NamedTuple):
    """What a rank publishes to the ranks of its group."""

    address: int  # of the secret in its memory
    secret: bytes
    name: bytes  # of its listening socket; empty if it has none

    def pack(self) -> bytes:
        return _IDENTITY.pack(self.address, self.secret) + self.name

    @staticmethod
    def unpack(content: bytes) -> "Identity":
        """Read an identity; other bytes than those of `pack` are a rank of another host."""
        if not _IDENTITY.size <= len(content) <= _IDENTITY.size + _MAX_NAME_BYTES:
            return Identity(0, bytes(_SECRET_BYTES), b"")
        address, secret = _IDENTITY.unpack_from(content)
        return Identity(address, secret, content[_IDENTITY.size :])


@dataclass(slots=True)
class Host:
    """The other ranks of this host, and which ranks of the group are connected."""

    peers: dict[int, Peer]
    all_read: bool  # each rank of the group can read the memory of every other rank
    connected: list[bytes]  # [a][b], b < a: whether ranks a and b are
    _sharing: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def can_share(self, ranks: tuple[int, ...]) -> bool:
        """Whether all ``ranks`` can pass files to each other; all of them get the same answer."""
        if ranks not in self._sharing:  # cached, since this takes quadratic time
            self._sharing[ranks] = all(self.connected[a][b] for a in ranks for b in ranks if a > b)
        return self._sharing[ranks]


def find_peers(
    own: int, num_ranks: int, share: Callable[[str, bytes], list[bytes]], timeout: timedelta
) -> Host:
    """Connect the ranks of this host. All ranks of the group call this together.

    ``share`` publishes bytes of this rank under a key, and returns the bytes of every rank.
    ``timeout`` is that of the job.
    """
    ranks = range(num_ranks)
    secret = secrets.token_bytes(_SECRET_BYTES)

    def flags(key: str, own_flags: bytes) -> list[bytes]:
        shared = share(key, own_flags)
        return [one if len(one) == num_ranks else bytes(num_ranks) for one in shared]

    in_memory = ctypes.create_string_buffer(secret, _SECRET_BYTES)
    with contextlib.ExitStack() as cleanup:
        listener = listen(num_ranks)
        name = b"" if listener is None else cleanup.enter_context(listener).getsockname()
        identity = Identity(ctypes.addressof(in_memory), secret, name).pack()
        identities = [Identity.unpack(one) for one in share("identity", identity)]
        sockets = connect(own, identities)
        connected = flags("connected", bytes(rank in sockets for rank in ranks))
        if listener is not None:
            callers = {rank for rank in ranks[own + 1 :] if connected[rank][own]}
            sockets |= accept(listener, secret, callers)
    peers = {
        rank: Peer(connection, timeout, _credentials(connection)[0])
        for rank, connection in sockets.items()
    }
    readable = {
        rank
        for rank, peer in peers.items()
        if has_bytes(peer.process, identities[rank].address, identities[rank].secret)
    }
    reads = flags("reads", bytes(rank in {*readable, own} for rank in ranks))
    for rank, peer in peers.items():
        peer.can_read = bool(reads[own][rank] and reads[rank][own])
    return Host(peers, all(map(all, reads)), connected)


def listen(num_ranks: int) -> socket.socket | None:
    """Open a socket that processes of this host can connect to; None if not on Linux."""
    if sys.platform != "linux":
        return None
    listener = _new_socket()
    listener.bind(b"\0" + secrets.token_hex(15).encode())
    listener.listen(num_ranks)
    return listener


def connect(own: int, identities: Sequence[Identity]) -> dict[int, socket.socket]:
    """Connect to the ranks before this one that are on this host, and greet them."""
    connections = {}
    for rank, identity in enumerate(identities[:own]):
        with contextlib.ExitStack() as cleanup:
            # OSError: the name is not on this host, or too many files are open.
            cleanup.enter_context(contextlib.suppress(OSError))
            connection = cleanup.enter_context(_new_socket())
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(identity.name)
            if _is_own_user(connection):
                connection.sendall(_GREETING.pack(own, identity.secret))
                cleanup.pop_all()
                connections[rank] = connection
    return connections


def accept(
    listener: socket.socket, secret: bytes, callers: Collection[int]
) -> dict[int, socket.socket]:
    """Accept the connections of ``callers``, which have returned from `connect`; reject others."""
    found: dict[int, socket.socket] = {}
    listener.settimeout(_TIMEOUT_SECONDS)
    while len(found) < len(callers):
        connection, _ = listener.accept()
        # Callers have already sent their greeting, so do not wait for a silent stranger.
        connection.setblocking(False)
        rank = -1
        with contextlib.suppress(OSError):
            rank = _read_greeting(connection, secret)
        if rank in callers and rank not in found:
            found[rank] = connection
        else:
            connection.close()
    return found


def _read_greeting(connection: socket.socket, secret: bytes) -> int:
    """Return the rank at the other end, or -1 for a stranger."""
    greeting = connection.recv(_GREETING.size + 1)
    if not _is_own_user(connection) or len(greeting) != _GREETING.size:
        return -1
    rank, known = _GREETING.unpack(greeting)
    return rank if secrets.compare_digest(known, secret) else -1


def _new_socket() -> socket.socket:
    """Return a socket that preserves message boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id at the other end, as the kernel reports them."""
    option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(option)
    return process, user


def _is_own_user(connection: socket.socket) -> bool:
    return _credentials(connection)[1] == os.geteuid()
