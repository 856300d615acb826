"""Another rank of the same host: messages through a socket, and reads from its memory.

Gloo uses the network stack even within a host. Between two busy ranks a small exchange through Gloo
took 0.3 ms of CPU time per rank and 1 ms in total; through a socket that the waiting thread reads
itself it took 0.01 and 0.1 ms. 64 MB each way took 40 ms of CPU time per rank, since both copy the
data twice; `process_vm_readv` copies it once, in 15 ms.

The handshake tests whether memory can be read. Where the host does not permit it
(`kernel.yama.ptrace_scope`, some containers), large exchanges use Gloo; on other systems than
Linux, all exchanges do.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

__all__ = ["INLINE_BYTES", "Descriptor", "Message", "Offer", "Peer", "has_bytes", "read_memory"]

# Largest tensor that is sent as a message, two of which fit into a socket's buffer. Larger ones are
# read from memory.
INLINE_BYTES = 1 << 15
_TAG = struct.Struct("<q")
_OFFER = struct.Struct("<qq")  # address and number of bytes


class Descriptor:
    """An open file; closed when this object is freed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class Message(NamedTuple):
    """A message from another process."""

    tag: int
    content: bytes
    file: Descriptor | None = None


class Peer:
    """Another rank of this host, at the other end of a socket. Threads may share it.

    Messages are matched by tag. Both sides of an exchange must expect the same sizes. Methods that
    receive raise OSError if the rank is gone, or sent nothing within the timeout of the job.
    """

    can_read = False  # whether both can read each other's memory

    def __init__(self, connection: socket.socket, timeout: timedelta, process: int = 0) -> None:
        # A timeout of the system: Python's takes one more system call each time.
        connection.setblocking(True)
        self._patience = timeout
        limit = struct.pack("ll", int(timeout.total_seconds()), timeout.microseconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = connection
        # A group that is dropped without `destroy_process_group` closes its sockets, too.
        weakref.finalize(self, connection.close).atexit = False
        _peers.add(self)
        self.process = process  # process id
        self._kept: list[Message] = []  # received by threads that waited for other tags
        self._changed = threading.Condition()
        self._is_read = False  # some thread reads the socket
        self._failure = ""  # why this rank has ended the connection

    def handles(self, sent: Tensor, received: Tensor) -> bool:
        """Whether this pair is exchanged without Gloo; both ranks get the same answer."""
        return self.can_read or max(sent.nbytes, received.nbytes) <= INLINE_BYTES

    def close(self) -> None:
        """End the connection. Threads of both processes that wait for a message raise an error."""
        with contextlib.suppress(OSError):  # the other side has ended it
            self.connection.shutdown(socket.SHUT_RDWR)

    # -- messages --------------------------------------------------------------------------------

    def send(self, tag: int, content: bytes, descriptor: int = -1) -> None:
        """Send a message, with an open file unless ``descriptor`` is negative."""
        with contextlib.suppress(ConnectionError):  # `recv` raises it
            self._send(_TAG.pack(tag) + content, descriptor)

    def _send(self, message: bytes, descriptor: int = -1) -> None:
        try:
            if descriptor < 0:
                self.connection.sendall(message)
            else:
                socket.send_fds(self.connection, [message], [descriptor])
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            self._failure = f"a message could not be sent to it: {error}"
            self.connection.shutdown(socket.SHUT_RDWR)  # it must not wait for this message

    def recv(self, tag: int) -> Message:
        """Return the next message with ``tag``."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_read or self._find(tag))
                if (message := self._find(tag)) is not None:
                    self._kept.remove(message)
                    return message
                self._is_read = True
            received: list[Message] = []
            try:
                received.append(self._read())
            finally:
                with self._changed:
                    self._is_read = False
                    self._kept += received
                    self._changed.notify_all()

    def _find(self, tag: int) -> Message | None:
        return next((message for message in self._kept if message.tag == tag), None)

    def _read(self) -> Message:
        size, flags = _TAG.size + INLINE_BYTES, socket.MSG_CMSG_CLOEXEC
        try:
            content, passed, _, _ = socket.recv_fds(self.connection, size, 1, flags)
        except BlockingIOError as error:
            raise TimeoutError(
                f"it sent nothing for {self._patience.total_seconds():g} s"
            ) from error
        files = [Descriptor(number) for number in passed]
        if not content:
            if self._failure:
                raise ConnectionAbortedError(self._failure)
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        tag = _TAG.unpack_from(content)[0]
        return Message(tag, content[_TAG.size :], files[0] if files else None)

    # -- tensors ---------------------------------------------------------------------------------

    def send_tensor(self, tensor: Tensor, tag: int) -> None:
        """Send a small tensor, or offer a large one, which must not change until `end`."""
        if tensor.nbytes <= INLINE_BYTES:
            content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        else:
            content = _OFFER.pack(tensor.data_ptr(), tensor.nbytes)
        self.send(tag, content)

    def recv_tensor(self, into: Tensor, num_bytes: int, tag: int) -> "Offer | None":
        """Fill ``into`` with a small tensor, or return the offer of a large one.

        Raises:
            ConnectionError: the other rank sends another number of bytes than ``num_bytes``.
        """
        content = self.recv(tag).content
        if num_bytes <= INLINE_BYTES:
            _check_size(len(content), num_bytes)
            ctypes.memmove(into.data_ptr(), content, num_bytes)
            return None
        _check_size(len(content), _OFFER.size)
        address, offered = _OFFER.unpack(content)
        _check_size(offered, num_bytes)
        return Offer(self.process, address, num_bytes, into)

    def release(self, num_bytes: int, tag: int) -> None:
        """Let the other rank continue, if it offered a tensor of ``num_bytes``.

        Raises:
            ConnectionError: it has ended the connection, so what was read may be something else.
        """
        if num_bytes > INLINE_BYTES:
            self._send(_TAG.pack(tag))

    def end(self, sent: Tensor, tag: int) -> None:
        """Return when the other rank has read ``sent``."""
        if sent.nbytes > INLINE_BYTES:
            self.recv(tag)


_peers: "weakref.WeakSet[Peer]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the connections in a process that was forked, such as a worker of a DataLoader.

    They are those of its parent. While a child had them open, others did not see its parent end.
    """
    for peer in [*_peers]:
        peer.connection.close()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor in the memory of another process, valid until it is released."""

    process: int
    address: int
    num_bytes: int
    into: Tensor  # of the same size, or a window for pieces of it

    def read(self, start: int) -> None:
        """Fill ``into`` with the bytes from ``start`` on, as many as there are and fit.

        Raises:
            ConnectionError: the process has ended the connection and freed the memory.
            OSError: the process is gone.
            ValueError: ``start`` is outside of the tensor.
        """
        size = min(self.num_bytes - start, self.into.nbytes)
        if start < 0 or size < 0:
            raise ValueError(f"byte {start} of a tensor of {self.num_bytes} bytes")
        try:
            read_memory(self.process, self.address + start, self.into.data_ptr(), size)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            raise ConnectionResetError("it has freed what it sends") from error


def _check_size(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise ConnectionError(f"it sends {num_bytes} bytes where {expected} are expected")


# -- memory of other processes of the same user ---------------------------------------------------


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_process_vm_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _process_vm_readv is not None:
    _pieces = (ctypes.POINTER(_Piece), ctypes.c_ulong)
    _process_vm_readv.argtypes = (ctypes.c_int, *_pieces, *_pieces, ctypes.c_ulong)
    _process_vm_readv.restype = ctypes.c_ssize_t


def read_memory(process: int, address: int, into: int, num_bytes: int) -> None:
    """Copy from the memory of ``process`` to the address ``into``, without holding the GIL.

    Raises:
        OSError: the process is gone, or the system does not permit it.
    """
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


def has_bytes(process: int, address: int, expected: bytes) -> bool:
    """Whether this process can read the memory of ``process`` and finds ``expected`` there."""
    found = ctypes.create_string_buffer(len(expected))
    try:
        read_memory(process, address, ctypes.addressof(found), len(expected))
    except OSError:
        return False
    return found.raw == expected
