"""Ranks of the same host: messages through sockets of their own, and reads from memory to memory.

Gloo goes through the network's code even there. Between two busy ranks a small exchange took 0.3 ms
of each one's processor, and 1 ms until it was there; through a socket that the waiting thread reads
itself it took 0.01 and 0.1 ms. 64 MB each way took 40 ms of each processor, for both copy all of it
twice; `process_vm_readv`, by which a process of Linux reads another one of the same user, copies it
once, in 15 ms.

Whether that is possible is tried when the ranks meet. A host that does not permit the reads
(`kernel.yama.ptrace_scope`, some containers) leaves large exchanges to Gloo; another system, all.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.transport.host.shared_memory import offer_secret, shares

__all__ = ["INLINE_BYTES", "HostPeers", "Offer"]

INLINE_BYTES = 1 << 15  # what is larger is read from memory; two of these fit into a socket
_CONNECT_SECONDS = 60.0
_PATIENCE_SECONDS = 1800  # as long as Gloo waits
_TAG = struct.Struct("<q")
_OFFER = struct.Struct("<qq")  # address and bytes
_HANDSHAKE = struct.Struct(
    "<qqq32s32s"
)  # process, address and file of the secret, it, name of socket
_HELLO = struct.Struct("<q32s")  # rank, secret of the one that is called
_READS, _OPENS = 1, 2  # what a rank can do to another one: its memory, its files
_Swap = Callable[[Tensor], list[Tensor]]  # sends a tensor to all ranks, and returns theirs by rank


class HostPeers:
    """The ranks of a group that live on this host; none before they `connect`."""

    def __init__(self) -> None:
        self._channels: dict[int, _Channel] = {}
        self._processes: dict[int, int] = {}  # whose memory can be read
        self._processes_of_all: tuple[int, ...] = ()
        self._opens: list[set[int]] = []  # by rank, which others' files it can open

    def connect(self, own: int, num_ranks: int, swap: _Swap) -> None:
        """Find them; all ranks of the group do this together."""
        secret = ctypes.create_string_buffer(secrets.token_bytes(32), 32)
        listener = _listen(num_ranks)
        name = b"" if listener is None else listener.getsockname()
        file = offer_secret(secret.raw)
        handshake = _HANDSHAKE.pack(os.getpid(), ctypes.addressof(secret), file, secret.raw, name)
        handshakes = [_HANDSHAKE.unpack(bytes(one.tolist())) for one in swap(_tensor(handshake))]
        channels = {} if listener is None else _connect(own, handshakes)
        called = swap(_tensor(rank in channels for rank in range(num_ranks)))
        if listener is not None:
            callers = {rank for rank in range(num_ranks) if called[rank][own]}
            channels |= _accept(listener, callers, secret.raw)
            listener.close()
        # A process of that number may be another one, seen from within a container.
        process, address, files, secrets_, _ = zip(*handshakes, strict=True)
        reads = {rank for rank in channels if _reads(process[rank], address[rank], secrets_[rank])}
        opens = {rank for rank in channels if shares(process[rank], files[rank], secrets_[rank])}
        ways = (_READS * (rank in reads) + _OPENS * (rank in opens) for rank in range(num_ranks))
        told = [of_rank.tolist() for of_rank in swap(_tensor(ways))]
        if file >= 0:
            os.close(file)
        # Only now: `swap` takes one way for all ranks, that through Gloo.
        self._channels = channels
        self._processes = {rank: process[rank] for rank in reads if told[rank][own] & _READS}
        self._processes_of_all = process
        self._opens = [{rank for rank, way in enumerate(row) if way & _OPENS} for row in told]

    def take(self, rank: int, sent: Tensor, received: Tensor) -> bool:
        """Whether these are exchanged with ``rank`` here; it comes to the same conclusion."""
        is_small = max(sent.nbytes, received.nbytes) <= INLINE_BYTES
        return sent.is_cpu and rank in (self._channels if is_small else self._processes)

    def can_read(self, rank: int) -> bool:
        """Whether large tensors of ``rank`` are read from its memory, and it reads those here."""
        return rank in self._processes

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Whether all of these can open each other's files; each of them has the same answer."""
        opens = self._opens
        return bool(opens) and all({*ranks} - {rank} <= opens[rank] for rank in ranks)

    def process_of(self, rank: int) -> int:
        """Of one on this host."""
        return self._processes_of_all[rank]

    def send(self, rank: int, tensor: Tensor, tag: int) -> None:
        """Send a small tensor, or say where a large one is, which has to stay until `end`."""
        if tensor.nbytes <= INLINE_BYTES:
            content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        else:
            content = _OFFER.pack(tensor.data_ptr(), tensor.nbytes)
        self._channels[rank].send(tag, content)

    def recv(self, rank: int, into: Tensor, tag: int) -> "Offer | None":
        """Fill ``into`` if it is small with what ``rank`` sends, or return the offer to read that.

        Raises:
            OSError: it is gone.
        """
        channel = self._channels[rank]
        content = channel.recv(tag)
        if into.nbytes <= INLINE_BYTES:
            _check(len(content), into.nbytes)
            ctypes.memmove(into.data_ptr(), content, into.nbytes)
            return None
        _check(len(content), _OFFER.size)
        address, num_bytes = _OFFER.unpack(content)
        accept = partial(channel.send, tag, b"")
        return Offer(self._processes[rank], address, num_bytes, into, accept)

    def send_message(self, rank: int, message: bytes, tag: int) -> None:
        self._channels[rank].send(tag, message)

    def recv_message(self, rank: int, tag: int) -> bytes:
        """What ``rank`` tells.

        Raises:
            OSError: it is gone.
        """
        return self._channels[rank].recv(tag)

    def end(self, rank: int, sent: Tensor, tag: int) -> None:
        """Return when ``rank`` has ``sent``.

        Raises:
            OSError: it is gone.
        """
        if sent.nbytes > INLINE_BYTES:
            self._channels[rank].recv(tag)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor in another process, which waits there until it was read."""

    process: int
    address: int
    num_bytes: int
    into: Tensor  # as large, or a window that pieces of it pass through
    accept: Callable[[], None]  # lets the other one go on

    def check(self, expected: int) -> None:
        """Raise a ConnectionError unless it has as many bytes."""
        _check(self.num_bytes, expected)

    def read(self, start: int, stop: int) -> None:
        """Get these bytes, to the same place of ``into``, or to the start of a window.

        Raises:
            OSError: the process is gone.
        """
        at = start if self.into.nbytes == self.num_bytes else 0
        size = stop - start
        assert stop <= self.num_bytes, "or it would read other memory"
        assert at + size <= self.into.nbytes, "or it would overwrite other memory"
        _read(self.process, self.address + start, self.into.data_ptr() + at, size)


class _Channel:
    """Messages from and to one rank, matched by their tags; used by several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        # By the system: a timeout of Python's takes one more call each time.
        limit = struct.pack("ll", _PATIENCE_SECONDS, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._connection = connection
        self._kept: dict[int, deque[bytes]] = {}  # came while another one was waited for
        self._changed = threading.Condition()
        self._is_read = False

    def send(self, tag: int, content: bytes) -> None:
        self._connection.sendall(_TAG.pack(tag) + content)

    def recv(self, tag: int) -> bytes:
        """The next message of that tag.

        Raises:
            ConnectionError: the rank is gone.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_read or tag in self._kept)
                if tag in self._kept:
                    return self._take(tag)
                self._is_read = True
            message = b""
            try:
                message = self._connection.recv(_TAG.size + INLINE_BYTES)
            except BlockingIOError as error:
                raise TimeoutError(f"it sent nothing for {_PATIENCE_SECONDS} s") from error
            finally:
                with self._changed:
                    self._is_read = False
                    if message:
                        found = _TAG.unpack_from(message)[0]
                        self._kept.setdefault(found, deque()).append(message[_TAG.size :])
                    self._changed.notify_all()
            if not message:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")

    def _take(self, tag: int) -> bytes:
        queue = self._kept[tag]
        content = queue.popleft()
        if not queue:
            del self._kept[tag]
        return content


# -- how they meet -------------------------------------------------------------------------------

_Handshake = tuple[int, int, int, bytes, bytes]


def _socket() -> socket.socket:
    """What is sent at once through it comes at once."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _tensor(numbers: Iterable[int]) -> Tensor:
    """Of bytes, whatever the default device is."""
    return torch.tensor(list(numbers), dtype=torch.uint8, device="cpu")


def _listen(num_ranks: int) -> socket.socket | None:
    if sys.platform != "linux":  # such sockets are files elsewhere, if there are any
        return None
    listener = _socket()
    listener.bind(b"\0" + secrets.token_hex(15).encode())
    listener.listen(num_ranks)
    return listener


def _connect(own: int, handshakes: list[_Handshake]) -> dict[int, _Channel]:
    """Connect to the ranks before ``own``, as far as they are here."""
    channels = {}
    for rank, (_, _, _, secret, padded) in enumerate(handshakes[:own]):
        name = padded.rstrip(b"\0")
        with contextlib.ExitStack() as cleanup:
            # Not if there is no socket of that name on this host, or no more may be opened.
            cleanup.enter_context(contextlib.suppress(OSError))
            connection = cleanup.enter_context(_socket())
            connection.connect(name)
            connection.sendall(_HELLO.pack(own, secret))
            cleanup.pop_all()
            channels[rank] = _Channel(connection)
    return channels


def _accept(listener: socket.socket, callers: set[int], secret: bytes) -> dict[int, _Channel]:
    """Let those ranks in that have connected, and no stranger."""
    channels: dict[int, _Channel] = {}
    listener.settimeout(_CONNECT_SECONDS)
    while callers - set(channels):
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_SECONDS)
        hello = connection.recv(_HELLO.size)
        if len(hello) == _HELLO.size and hello[-len(secret) :] == secret:
            connection.settimeout(None)
            channels[_HELLO.unpack(hello)[0]] = _Channel(connection)
        else:
            connection.close()
    return channels


def _reads(process: int, address: int, secret: bytes) -> bool:
    """Whether this process can read that one's memory, and finds its secret there."""
    found = ctypes.create_string_buffer(len(secret))
    try:
        _read(process, address, ctypes.addressof(found), len(secret))
    except OSError:
        return False
    return found.raw == secret


# -- from memory to memory -----------------------------------------------------------------------


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def _find_reader() -> Callable[..., int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):  # another system
        return None
    pieces = (ctypes.POINTER(_Piece), ctypes.c_ulong)
    found.argtypes = (ctypes.c_int, *pieces, *pieces, ctypes.c_ulong)
    found.restype = ctypes.c_ssize_t
    reader: Callable[..., int] = found
    return reader


_process_vm_readv = _find_reader()


def _read(process: int, address: int, into: int, num_bytes: int) -> None:
    """Copy from the memory of ``process`` to the address ``into``; other threads run meanwhile."""
    if _process_vm_readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done = 0
    while done < num_bytes:
        rest = num_bytes - done
        here, there = _Piece(into + done, rest), _Piece(address + done, rest)
        count = _process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += count


def _check(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise ConnectionError(f"it sends {num_bytes} bytes where {expected} are expected")
