"""Messages between the ranks of a replica and the hub: frames with a JSON header and a body."""

import asyncio
import json
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["HEARTBEAT_SECONDS", "SILENT_SECONDS", "Frame", "Kind", "read_frame"]

HEARTBEAT_SECONDS = 1.0  # interval between heartbeats
SILENT_SECONDS = 15.0  # a connection that receives nothing for this long is lost

_PREFIX = struct.Struct("<IQ")  # bytes of the header, bytes of the body
_MAX_HEADER_BYTES = 1 << 20  # limits what an unknown client can make us allocate
_CHUNK_BYTES = 1 << 16  # the timeout applies to each chunk of this size


class Kind(StrEnum):
    """The kind of a frame."""

    HELLO = "hello"  # to the hub: which rank this is, and the rounds that it has applied
    WELCOME = "welcome"  # whether the replica is a member or has to wait for a state
    REFUSED = "refused"  # the replica cannot take part; the body is the reason
    DELTA = "delta"  # to the hub: a difference
    DECISION = "decision"  # the differences that a round averages
    STATE = "state"  # part of a replica's state, for replicas that wait for one
    READY = "ready"  # to the hub: this rank has loaded a state
    HEARTBEAT = "heartbeat"


@dataclass(frozen=True, eq=False)
class Frame:
    """One message."""

    kind: Kind
    header: dict[str, Any] = field(default_factory=dict)
    body: Any = b""  # bytes, or an object with the buffer protocol

    def encode(self) -> list[Any]:
        """The parts of the frame to write in order."""
        header = json.dumps({"kind": self.kind, **self.header}).encode()
        return [_PREFIX.pack(len(header), len(self.body)), header, self.body]


async def read_frame(reader: asyncio.StreamReader, max_body: int) -> Frame:
    """Read the next frame.

    Raises:
        asyncio.IncompleteReadError: the connection ended.
        TimeoutError: nothing was received for `SILENT_SECONDS`.
        ValueError, KeyError, AttributeError: the bytes are not a frame.
    """

    async def read(size: int) -> bytes:
        chunks = []
        while size:
            chunk = min(size, _CHUNK_BYTES)
            chunks.append(await asyncio.wait_for(reader.readexactly(chunk), SILENT_SECONDS))
            size -= chunk
        return b"".join(chunks)

    header_size, body_size = _PREFIX.unpack(await read(_PREFIX.size))
    if header_size > _MAX_HEADER_BYTES or body_size > max_body:
        raise ValueError(f"expected a frame, got one of {header_size} and {body_size} bytes")
    header = json.loads(await read(header_size))
    return Frame(Kind(header.pop("kind")), header, await read(body_size))
