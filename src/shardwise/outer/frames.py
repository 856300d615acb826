"""What travels between a replica's ranks and the hub: frames with a JSON header and a body."""

import asyncio
import json
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["ALIVE_SECONDS", "SILENT_SECONDS", "Frame", "Kind", "read_frame"]

ALIVE_SECONDS = 1.0  # between signs of life
SILENT_SECONDS = 15.0  # without any, a connection counts as lost

_PREFIX = struct.Struct("<IQ")  # bytes of the header, and of the body
_MAX_HEADER_BYTES = 1 << 20  # of a stranger's first bytes more would be allocated
_PIECE_BYTES = 1 << 16  # that are waited for at a time


class Kind(StrEnum):
    """What a frame says."""

    HELLO = "hello"  # to the hub: who this is, and what was applied so far
    WELCOME = "welcome"  # whether it takes part, or has to wait for a state
    REFUSED = "refused"  # it cannot take part; the body is the reason
    DELTA = "delta"  # to the hub: a difference
    DECISION = "decision"  # the differences of a round that count
    STATE = "state"  # of a replica, for those that wait for one
    READY = "ready"  # to the hub: a state was taken, and this is what was applied now
    ALIVE = "alive"


@dataclass(frozen=True, eq=False)
class Frame:
    """One message."""

    kind: Kind
    header: dict[str, Any] = field(default_factory=dict)
    body: Any = b""  # bytes, or something with a buffer of them

    def encode(self) -> list[Any]:
        """Its bytes, in parts."""
        header = json.dumps({"kind": self.kind, **self.header}).encode()
        return [_PREFIX.pack(len(header), len(self.body)), header, self.body]


async def read_frame(reader: asyncio.StreamReader, max_body: int, seconds: float) -> Frame:
    """The next frame, of which something has to come every so many ``seconds``.

    Raises:
        asyncio.IncompleteReadError: the connection ended.
        TimeoutError: the other side is silent.
        ValueError, KeyError, AttributeError: what came is no frame.
    """

    async def read(size: int) -> bytes:
        parts = []
        while size:
            part = min(size, _PIECE_BYTES)
            parts.append(await asyncio.wait_for(reader.readexactly(part), seconds))
            size -= part
        return b"".join(parts)

    header_size, body_size = _PREFIX.unpack(await read(_PREFIX.size))
    if header_size > _MAX_HEADER_BYTES or body_size > max_body:
        raise ValueError(f"expected a frame, got one of {header_size} and {body_size} bytes")
    header = json.loads(await read(header_size))
    return Frame(Kind(header.pop("kind")), header, await read(body_size))
