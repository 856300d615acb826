"""The replicas of which ranks are connected to the hub."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from shardwise.outer.frames import Frame

__all__ = ["Connection", "Hello", "Replica", "Role"]

_MAX_QUEUED_BYTES = 1 << 30  # to a rank that receives nothing


class Hello(BaseModel):
    """What a rank says first: who it is, and what it has applied so far."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    replica: int
    rank: int
    process: str  # differs between two processes with the same numbers
    num_ranks: int
    num_replicas: int
    deadline: float
    options: dict[str, Any]  # the same in all replicas
    rounds: list[int]  # of each fragment
    digests: list[str]
    values: str  # a checksum of the shared parameters; empty if it does not know


class Role(StrEnum):
    """What a replica of which all ranks are connected does."""

    ARRIVED = "arrived"  # and was not welcomed yet
    MEMBER = "member"
    JOINING = "joining"  # waits for a state


@dataclass(eq=False)
class Connection:
    """Of one rank of a replica."""

    writer: asyncio.StreamWriter
    hello: Hello
    heard: float = 0.0  # when something came from it, on the clock of the event loop
    sent_step: int = 0  # the local step of its last difference, of any fragment
    is_ready: bool = False

    def send(self, frame: Frame) -> None:
        if self.writer.transport.get_write_buffer_size() > _MAX_QUEUED_BYTES:
            self.writer.transport.abort()
        if not self.writer.is_closing():
            self.writer.writelines(frame.encode())


@dataclass(eq=False)
class Replica:
    """Those of its ranks that are connected."""

    number: int
    ranks: dict[int, Connection] = field(default_factory=dict)
    role: Role = Role.ARRIVED
    step: int = 0  # the last one that it was heard of at
    since_ticket: bool = False  # whether it waits for the state that was asked for

    @property
    def hello(self) -> Hello:
        """Of any of its ranks."""
        return next(iter(self.ranks.values())).hello

    @property
    def is_whole(self) -> bool:
        return bool(self.ranks) and len(self.ranks) == self.hello.num_ranks

    @property
    def digests(self) -> list[str]:
        """Of each fragment; none if its ranks do not agree."""
        found = [one.hello.digests for one in self.ranks.values()]
        return found[0] if all(one == found[0] for one in found) else []

    def send(self, frame: Frame) -> None:
        for connection in self.ranks.values():
            connection.send(frame)
