"""Another rank of the same host: messages through a socket, and reads from memory to memory.

Gloo uses the network's code even there. Between two busy ranks a small exchange took 0.3 ms of
each one's processor and 1 ms of time; through a socket that the waiting thread reads itself it took
0.01 and 0.1 ms. 64 MB each way took 40 ms of each processor, for both copy all of it twice;
`process_vm_readv` copies it once, in 15 ms.

Whether memory can be read is tried in the handshake. A host that does not permit it
(`kernel.yama.ptrace_scope`, some containers) leaves large exchanges to Gloo; another system, all.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shardwise.transport.host.channel import MAX_BYTES, Channel
from shardwise.transport.host.process_memory import read_memory

__all__ = ["INLINE_BYTES", "Offer", "Peer"]

INLINE_BYTES = MAX_BYTES  # what is larger is read from memory
_OFFER = struct.Struct("<qq")  # address and bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank of this host. Both sides of an exchange must name the same sizes."""

    channel: Channel
    process: int  # as this process sees it
    can_read: bool  # each of the two reads the other's memory

    def handles(self, sent: Tensor, received: Tensor) -> bool:
        """Whether these are exchanged here; the other rank comes to the same conclusion."""
        return self.can_read or max(sent.nbytes, received.nbytes) <= INLINE_BYTES

    def send(self, tensor: Tensor, tag: int) -> None:
        """Send a small tensor, or the place of a large one, which must not change until `end`."""
        if tensor.nbytes <= INLINE_BYTES:
            content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        else:
            content = _OFFER.pack(tensor.data_ptr(), tensor.nbytes)
        self.channel.send(tag, content)

    def recv(self, into: Tensor, num_bytes: int, tag: int) -> "Offer | None":
        """Fill ``into`` with a small tensor, or return the offer of a large one.

        Raises:
            OSError: the rank is gone, or sends another number of bytes than ``num_bytes``.
        """
        content = self.channel.recv(tag).content
        if num_bytes <= INLINE_BYTES:
            _check_size(len(content), num_bytes)
            ctypes.memmove(into.data_ptr(), content, num_bytes)
            return None
        _check_size(len(content), _OFFER.size)
        address, offered = _OFFER.unpack(content)
        release = partial(self.channel.send, tag, b"")
        if offered != num_bytes:
            release()
        _check_size(offered, num_bytes)
        return Offer(self.process, address, num_bytes, into, release)

    def end(self, sent: Tensor, tag: int) -> None:
        """Return when the rank has ``sent``.

        Raises:
            OSError: the rank is gone.
        """
        if sent.nbytes > INLINE_BYTES:
            self.channel.recv(tag)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor in the memory of another process, which stays there until it is released."""

    process: int
    address: int
    num_bytes: int
    into: Tensor  # as large, or a window that pieces of it pass through
    release: Callable[[], None]

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
