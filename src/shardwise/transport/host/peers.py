"""Another rank of the same host: messages through a socket, and reads from memory to memory.

Gloo uses the network's code even there. Between two busy ranks a small exchange took 0.3 ms of
each one's processor and 1 ms of time; through a socket that the waiting thread reads itself it took
0.01 and 0.1 ms. 64 MB each way took 40 ms of each processor, for both copy all of it twice;
`process_vm_readv` copies it once, in 15 ms.

Whether memory can be read is tried in the handshake. A host that does not permit it
(`kernel.yama.ptrace_scope`, some containers) leaves large exchanges to Gloo; another system, all.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

from shardwise.transport.host.process_memory import read_memory

__all__ = ["INLINE_BYTES", "Descriptor", "Message", "Offer", "Peer"]

INLINE_BYTES = 1 << 15  # of a message, two of which fit into a socket; more is read from memory
_TAG = struct.Struct("<q")
_OFFER = struct.Struct("<qq")  # address and bytes


class Descriptor:
    """An open file that another process has passed; closed when it is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class Message(NamedTuple):
    """What a process sent."""

    tag: int
    content: bytes
    file: Descriptor | None = None


class Peer:
    """Another rank of this host, at the other end of a socket; used by several threads at once.

    Messages are matched by their tags. Both sides of an exchange must name the same sizes. Methods
    that receive raise an OSError if the rank is gone, or sent nothing for the timeout of the job.
    """

    can_read = False  # each of the two reads the other's memory

    def __init__(self, connection: socket.socket, timeout: timedelta, process: int = 0) -> None:
        # By the system: a timeout of Python's takes one more call each time.
        connection.setblocking(True)
        self._seconds = int(timeout.total_seconds())
        limit = struct.pack("ll", self._seconds, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = connection
        self.process = process  # as this process sees it
        self._kept: list[Message] = []  # received while another tag was waited for
        self._changed = threading.Condition()
        self._is_read = False

    def handles(self, sent: Tensor, received: Tensor) -> bool:
        """Whether these are exchanged here; the other rank comes to the same conclusion."""
        return self.can_read or max(sent.nbytes, received.nbytes) <= INLINE_BYTES

    # -- messages --------------------------------------------------------------------------------

    def send(self, tag: int, content: bytes, descriptor: int = -1) -> None:
        """Send a message, and with it an open file unless ``descriptor`` is negative."""
        with contextlib.suppress(ConnectionError):  # raised when its answer is received
            if descriptor < 0:
                self.connection.sendall(_TAG.pack(tag) + content)
            else:
                socket.send_fds(self.connection, [_TAG.pack(tag) + content], [descriptor])

    def recv(self, tag: int) -> Message:
        """The next message of that tag."""
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
            raise TimeoutError(f"it sent nothing for {self._seconds} s") from error
        files = [Descriptor(number) for number in passed]
        if not content:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        tag = _TAG.unpack_from(content)[0]
        return Message(tag, content[_TAG.size :], files[0] if files else None)

    # -- tensors ---------------------------------------------------------------------------------

    def send_tensor(self, tensor: Tensor, tag: int) -> None:
        """Send a small tensor, or the place of a large one, which must not change until `end`."""
        if tensor.nbytes <= INLINE_BYTES:
            content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        else:
            content = _OFFER.pack(tensor.data_ptr(), tensor.nbytes)
        self.send(tag, content)

    def recv_tensor(self, into: Tensor, num_bytes: int, tag: int) -> "Offer | None":
        """Fill ``into`` with a small tensor, or return the offer of a large one.

        Raises:
            ConnectionError: it sends another number of bytes than ``num_bytes``.
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
        """Let the rank go on, if a tensor of so many bytes was offered."""
        if num_bytes > INLINE_BYTES:
            self.send(tag, b"")

    def end(self, sent: Tensor, tag: int) -> None:
        """Return when the rank has ``sent``."""
        if sent.nbytes > INLINE_BYTES:
            self.recv(tag)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor in the memory of another process, which stays there until it is released."""

    process: int
    address: int
    num_bytes: int
    into: Tensor  # as large, or a window that pieces of it pass through

    def read(self, start: int) -> None:
        """Copy bytes from ``start`` on to the beginning of ``into``, as many as there are and fit.

        Raises:
            OSError: the process is gone.
            ValueError: ``start`` is not in the tensor.
        """
        size = min(self.num_bytes - start, self.into.nbytes)
        if start < 0 or size < 0:
            raise ValueError(f"byte {start} of a tensor of {self.num_bytes} bytes")
        read_memory(self.process, self.address + start, self.into.data_ptr(), size)


def _check_size(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise ConnectionError(f"it sends {num_bytes} bytes where {expected} are expected")
