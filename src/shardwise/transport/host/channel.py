"""Messages between two processes of a host, over a socket that both of them hold."""

import array
import contextlib
import errno
import os
import socket
import struct
import threading
from collections import deque
from datetime import timedelta
from typing import NamedTuple

__all__ = ["MAX_BYTES", "Channel", "Descriptor", "Message", "new_socket", "recv_message"]

MAX_BYTES = 1 << 15  # of a message; two of these fit into a socket
_TAG = struct.Struct("<q")


class Descriptor:
    """An open file that another process has passed; closed when it is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class Message(NamedTuple):
    """What a process sent."""

    content: bytes
    descriptor: Descriptor | None = None


def new_socket() -> socket.socket:
    """One that keeps messages apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """Messages from and to one rank, matched by their tags; used by several threads at once."""

    def __init__(self, connection: socket.socket, timeout: timedelta) -> None:
        # By the system: a timeout of Python's takes one more call each time.
        connection.setblocking(True)
        self._seconds = int(timeout.total_seconds())
        limit = struct.pack("ll", self._seconds, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = connection
        self._kept: dict[int, deque[Message]] = {}  # came while another tag was waited for
        self._changed = threading.Condition()
        self._is_read = False

    def send(self, tag: int, content: bytes, descriptor: int = -1) -> None:
        """Send a message, and with it an open file unless ``descriptor`` is negative."""
        if descriptor < 0:
            self.connection.sendall(_TAG.pack(tag) + content)
        else:
            socket.send_fds(self.connection, [_TAG.pack(tag) + content], [descriptor])

    def recv(self, tag: int) -> Message:
        """The next message of that tag.

        Raises:
            OSError: the rank is gone, or sent nothing for the timeout of the job.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_read or tag in self._kept)
                if tag in self._kept:
                    return self._take(tag)
                self._is_read = True
            message = Message(b"")
            try:
                message = recv_message(self.connection)
            except BlockingIOError as error:
                raise TimeoutError(f"it sent nothing for {self._seconds} s") from error
            finally:
                with self._changed:
                    self._is_read = False
                    if message.content:
                        found = _TAG.unpack_from(message.content)[0]
                        kept = message._replace(content=message.content[_TAG.size :])
                        self._kept.setdefault(found, deque()).append(kept)
                    self._changed.notify_all()
            if not message.content:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")

    def _take(self, tag: int) -> Message:
        queue = self._kept[tag]
        message = queue.popleft()
        if not queue:
            del self._kept[tag]
        return message


def recv_message(connection: socket.socket) -> Message:
    """The next message, with the file that was passed with it; empty at the end."""
    content, ancillary, _, _ = connection.recvmsg(
        _TAG.size + MAX_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    passed = [Descriptor(number) for number in numbers]
    return Message(content, passed[0] if passed else None)


_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)
