"""The replicas whose ranks are connected to the hub."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from shardwise.outer.frames import Frame

__all__ = ["Connection", "Hello", "Replica", "Role"]

_MAX_QUEUED_BYTES = 1 << 30  # a connection that has not received this many bytes is dropped


class Hello(BaseModel):
    """The first message of a rank: its numbers, and the rounds that it has applied."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    replica: int
    rank: int
    process: str  # identifies the process: two may have the same replica and rank
    num_ranks: int
    num_replicas: int
    deadline: float
    options: dict[str, Any]  # must be the same in all replicas
    rounds: list[int]  # by fragment
    digests: list[str]  # by fragment
    checksum: str  # of the shared parameters; empty if unknown


class Role(StrEnum):
    """The role of a replica whose ranks are all connected."""

    ARRIVED = "arrived"  # not welcomed yet
    MEMBER = "member"
    JOINING = "joining"  # waits for a state


@dataclass(eq=False)
class Connection:
    """The connection of one rank."""

    writer: asyncio.StreamWriter
    hello: Hello
    received_at: float  # time of the last frame, on the clock of the event loop
    sent_step: int = 0  # the local step of its last difference, of any fragment
    is_ready: bool = False  # has loaded a state

    def send(self, frame: Frame) -> None:
        if self.writer.transport.get_write_buffer_size() > _MAX_QUEUED_BYTES:
            self.writer.transport.abort()
        if not self.writer.is_closing():
            self.writer.writelines(frame.encode())


@dataclass(eq=False)
class Replica:
    """The connected ranks of a replica."""

    number: int
    ranks: dict[int, Connection] = field(default_factory=dict)
    role: Role = Role.ARRIVED
    step: int = 0  # the last step that it has reported
    ticket: int = 0  # of the requested state that it waits for; 0: none
    giver: int = -1  # the replica that sends this state

    @property
    def hello(self) -> Hello:
        """The hello of one of its ranks."""
        return next(iter(self.ranks.values())).hello

    @property
    def is_whole(self) -> bool:
        """Whether all of its ranks are connected."""
        return bool(self.ranks) and len(self.ranks) == self.hello.num_ranks

    @property
    def digests(self) -> list[str]:
        """The digest of each fragment; empty if its ranks disagree."""
        found = [connection.hello.digests for connection in self.ranks.values()]
        return found[0] if all(digests == found[0] for digests in found) else []

    def send(self, frame: Frame) -> None:
        for connection in self.ranks.values():
            connection.send(frame)
