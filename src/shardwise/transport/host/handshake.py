"""How ranks of one host find each other: sockets without a file, opened to ranks of this job alone.

Every rank listens; the ranks after it connect. A process of another user is shut out by the
credentials that the system vouches for, and any other stranger because it does not know the
secret. With its greeting each side passes an open file, to find out whether that is possible.
"""

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import sys
from dataclasses import dataclass
from datetime import timedelta

from shardwise.transport.host.channel import Channel, Descriptor, new_socket, recv_message
from shardwise.transport.host.process_memory import has_bytes

__all__ = ["Connection", "Identity", "accept", "connect", "establish", "listen", "read_greeting"]

_SECRET_BYTES = 32
_IDENTITY = struct.Struct("<q32s32s")  # address of the secret, the secret, name of the socket
_GREETING = struct.Struct("<q32s")  # rank, secret of the rank that is greeted
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CONNECT_SECONDS = 60.0


class Identity:
    """What this rank shows to the others."""

    def __init__(self, rank: int, listener: socket.socket | None) -> None:
        self.rank = rank
        self._secret = ctypes.create_string_buffer(
            secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES
        )
        self.secret = self._secret.raw
        self._name = b"" if listener is None else listener.getsockname()
        self._file = _file_with(self.secret)

    def pack(self) -> bytes:
        return _IDENTITY.pack(ctypes.addressof(self._secret), self.secret, self._name)

    def greet(self, connection: socket.socket, secret: bytes) -> None:
        """Say which rank this is, and that it knows the ``secret`` of the other one."""
        greeting = [_GREETING.pack(self.rank, secret)]
        if self._file is None:
            connection.sendmsg(greeting)
        else:
            socket.send_fds(connection, greeting, [self._file.number])


Greeted = dict[int, tuple[socket.socket, Descriptor | None]]  # by rank, with the file passed


@dataclass(frozen=True, slots=True)
class Connection:
    """A rank of this host."""

    channel: Channel
    process: int  # as this process sees it
    can_read: bool  # its memory
    can_open: bool  # files that it passes


def listen(num_ranks: int) -> socket.socket | None:
    """A socket that processes of this host can connect to, if the system has such."""
    if sys.platform != "linux":
        return None
    listener = new_socket()
    listener.bind(b"\0" + secrets.token_hex(15).encode())
    listener.listen(num_ranks)
    return listener


def connect(own: Identity, identities: list[bytes]) -> dict[int, socket.socket]:
    """Connect to the ranks before this one, as far as they are on this host, and greet them."""
    connections = {}
    for rank, identity in enumerate(identities[: own.rank]):
        _, secret, name = _IDENTITY.unpack(identity)
        with contextlib.ExitStack() as cleanup:
            # Not if there is no socket of that name on this host, or no more may be opened.
            cleanup.enter_context(contextlib.suppress(OSError))
            connection = cleanup.enter_context(new_socket())
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(name.rstrip(b"\0"))
            if not _is_own_user(connection):
                continue
            own.greet(connection, secret)
            cleanup.pop_all()
            connections[rank] = connection
    return connections


def accept(
    own: Identity, listener: socket.socket, callers: set[int], identities: list[bytes]
) -> Greeted:
    """Greet the ranks that have returned from `connect`, and shut out strangers."""
    found: Greeted = {}
    listener.settimeout(_CONNECT_SECONDS)
    while callers - found.keys():
        connection, _ = listener.accept()
        # They have greeted before they said that they had connected, so nothing is waited for.
        connection.setblocking(False)
        rank, descriptor = -1, None
        with contextlib.suppress(OSError):
            rank, descriptor = read_greeting(connection, own.secret)
        if rank not in callers or rank in found:
            connection.close()
            continue
        own.greet(connection, _IDENTITY.unpack(identities[rank])[1])
        found[rank] = connection, descriptor
    return found


def read_greeting(connection: socket.socket, secret: bytes) -> tuple[int, Descriptor | None]:
    """The rank at the other end and the file that it passed; -1 for a stranger."""
    message = recv_message(connection)
    if not _is_own_user(connection) or len(message.content) != _GREETING.size:
        return -1, None
    rank, known = _GREETING.unpack(message.content)
    return (rank if secrets.compare_digest(known, secret) else -1), message.descriptor


def establish(
    connection: socket.socket, descriptor: Descriptor | None, identity: bytes, timeout: timedelta
) -> Connection:
    """Find out whether the memory of a rank can be read, and files that it passes be opened."""
    address, secret, _ = _IDENTITY.unpack(identity)
    process = _credentials(connection)[0]
    can_open = descriptor is not None and os.pread(descriptor.number, len(secret), 0) == secret
    can_read = has_bytes(process, address, secret)
    return Connection(Channel(connection, timeout), process, can_read, can_open)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user, by the word of the system."""
    option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(option)
    return process, user


def _is_own_user(connection: socket.socket) -> bool:
    return _credentials(connection)[1] == os.geteuid()


def _file_with(content: bytes) -> Descriptor | None:
    """A file in memory, if the system permits it."""
    try:
        file = Descriptor(os.memfd_create("shardwise-secret"))
        os.write(file.number, content)
    except (AttributeError, OSError):
        return None
    return file
