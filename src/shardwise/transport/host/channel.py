"""Messages between two processes of a host, over a socket that both of them hold."""

import contextlib
import errno
import os
import socket
import struct
import threading
from datetime import timedelta
from typing import NamedTuple

__all__ = ["MAX_BYTES", "Channel", "Descriptor", "Message"]

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

    tag: int
    content: bytes
    file: Descriptor | None = None


class Channel:
    """Messages from and to one rank, matched by their tags; used by several threads at once."""

    def __init__(self, connection: socket.socket, timeout: timedelta) -> None:
        # By the system: a timeout of Python's takes one more call each time.
        connection.setblocking(True)
        self._seconds = int(timeout.total_seconds())
        limit = struct.pack("ll", self._seconds, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = connection
        self._kept: list[Message] = []  # received while another tag was waited for
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
                self._changed.wait_for(lambda: not self._is_read or self._position(tag) >= 0)
                if (position := self._position(tag)) >= 0:
                    return self._kept.pop(position)
                self._is_read = True
            received: list[Message] = []
            try:
                received.append(self._read())
            finally:
                with self._changed:
                    self._is_read = False
                    self._kept += received
                    self._changed.notify_all()

    def _position(self, tag: int) -> int:
        return next((i for i, message in enumerate(self._kept) if message.tag == tag), -1)

    def _read(self) -> Message:
        flags = socket.MSG_CMSG_CLOEXEC
        try:
            content, passed, _, _ = socket.recv_fds(
                self.connection, _TAG.size + MAX_BYTES, 1, flags
            )
        except BlockingIOError as error:
            raise TimeoutError(f"it sent nothing for {self._seconds} s") from error
        files = [Descriptor(number) for number in passed]
        if not content:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        tag = _TAG.unpack_from(content)[0]
        return Message(tag, content[_TAG.size :], files[0] if files else None)
