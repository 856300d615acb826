"""The hub: where replicas meet, and where each round of a fragment is decided.

Every rank of every replica has a connection to it. It averages nothing and keeps no parameters: it
puts the differences that count into an order and sends them to all. So all replicas compute the
same, and the hub may end and start again at any time; replicas train on alone until it is back.

A round is decided when the differences of all members have come, or ``deadline`` seconds after
those of the first replica. It counts replicas of which every rank has sent its shard. What was
decided for a fragment is identified by a digest of all decisions, so two replicas with the same
digest have the same bits, whatever happened in between. Who says hello with another digest than
the hub's has to take the state of a member.
"""

import asyncio
import hashlib
import itertools
import logging
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardwise.outer.frames import ALIVE_SECONDS, SILENT_SECONDS, Frame, Kind, read_frame

__all__ = ["Hub", "HubThread", "serve"]

logger = logging.getLogger("shardwise.outer")

_MAX_BODY_BYTES = 1 << 36
# A connection that ended or is silent, and what a stranger may send.
_BROKEN = OSError, EOFError, TimeoutError, ValueError, LookupError, TypeError, AttributeError
_MAX_QUEUED_BYTES = 1 << 30  # to a rank that receives nothing


class Role(StrEnum):
    """What a replica of which all ranks are connected does."""

    ARRIVED = "arrived"  # and was not welcomed yet
    MEMBER = "member"
    JOINING = "joining"  # waits for a state


@dataclass(eq=False)
class _Connection:
    """Of one rank of a replica."""

    writer: asyncio.StreamWriter
    hello: dict[str, Any]
    is_ready: bool = False

    def send(self, frame: Frame) -> None:
        if self.writer.transport.get_write_buffer_size() > _MAX_QUEUED_BYTES:
            self.writer.transport.abort()
        if not self.writer.is_closing():
            self.writer.writelines(frame.encode())


@dataclass(eq=False)
class _Replica:
    """Those of its ranks that are connected."""

    number: int
    ranks: dict[int, _Connection] = field(default_factory=dict)
    role: Role = Role.ARRIVED
    step: int = 0  # the last one that it was heard of at
    since_ticket: bool = False  # whether it waits for the state that was asked for

    @property
    def is_whole(self) -> bool:
        first = next(iter(self.ranks.values()), None)
        return first is not None and len(self.ranks) == first.hello["num_ranks"]

    @property
    def digests(self) -> list[str]:
        """Of each fragment; none if its ranks do not agree."""
        found = [one.hello["digests"] for one in self.ranks.values()]
        return list(found[0]) if all(one == found[0] for one in found) else []

    @property
    def rounds(self) -> list[int]:
        return list(next(iter(self.ranks.values())).hello["rounds"])

    def send(self, frame: Frame) -> None:
        for connection in self.ranks.values():
            connection.send(frame)


@dataclass(eq=False)
class _Round:
    """The round of a fragment that is next."""

    number: int
    digest: str  # of all before it
    bodies: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by replica and rank
    steps: dict[int, int] = field(default_factory=dict)  # after which they were taken, by replica
    timer: asyncio.TimerHandle | None = None

    def follow(self, salt: str) -> "_Round":
        if self.timer is not None:
            self.timer.cancel()
        after = hashlib.sha256((self.digest + salt).encode()).hexdigest()[:24]
        return _Round(self.number + 1, after)


class Hub:
    """Decides rounds; all of it runs on one event loop."""

    def __init__(self) -> None:
        self.replicas: dict[int, _Replica] = {}
        self.received_bytes: dict[int, int] = {}  # of differences, by replica
        self.connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}
        self._rounds: list[_Round] = []
        self._options: dict[str, Any] = {}
        self._welcome: asyncio.TimerHandle | None = None
        self._tickets = itertools.count(1)
        self._ticket: tuple[int, int] | None = None  # its number, and the replica that gives

    # -- connections ------------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        connection: _Connection | None = None
        self.connections[asyncio.current_task()] = writer
        try:
            hello = await read_frame(reader, 0, SILENT_SECONDS)
            connection = self._greet(hello, writer)
            while connection is not None:
                self._receive(connection, await read_frame(reader, _MAX_BODY_BYTES, SILENT_SECONDS))
        except _BROKEN as error:
            if connection is not None and self._is_current(connection):
                self._lose(connection.hello["replica"], error)
        finally:
            del self.connections[asyncio.current_task()]
            writer.close()

    async def beat(self) -> None:
        """Give signs of life, for ever."""
        while True:
            for replica in self.replicas.values():
                replica.send(Frame(Kind.ALIVE))
            await asyncio.sleep(ALIVE_SECONDS)

    def _is_current(self, connection: _Connection) -> bool:
        replica = self.replicas.get(connection.hello["replica"])
        return replica is not None and connection in replica.ranks.values()

    def _greet(self, frame: Frame, writer: asyncio.StreamWriter) -> _Connection | None:
        hello = frame.header
        number, rank = int(hello["replica"]), int(hello["rank"])
        reason = self._objection(hello)
        if frame.kind is not Kind.HELLO or reason:
            writer.writelines(Frame(Kind.REFUSED, body=reason.encode()).encode())
            return None
        replica = self.replicas.get(number)
        if replica is None or rank in replica.ranks:
            # Its ranks are there again before the hub knows that they were gone.
            if replica is not None:
                self._lose(number, ConnectionResetError("it has a new connection"))
            replica = self.replicas[number] = _Replica(number)
        connection = replica.ranks[rank] = _Connection(writer, hello)
        if replica.is_whole:
            self._arrive(replica)
        return connection

    def _objection(self, hello: Mapping[str, Any]) -> str:
        """Why a rank cannot take part; empty if it can."""
        if not self.replicas:
            self._options = dict(hello["options"])
        for key, value in hello["options"].items():
            if value != self._options.get(key):
                return (
                    f"replica {hello['replica']} has {key}={value!r}, and the others have "
                    f"{self._options.get(key)!r}; start all replicas with the same options"
                )
        return ""

    def _lose(self, number: int, error: BaseException) -> None:
        replica = self.replicas.pop(number)
        reason = str(error) or type(error).__name__
        logger.warning("replica %d is gone after step %d: %s", number, replica.step, reason)
        for connection in replica.ranks.values():
            connection.writer.transport.abort()
        if self._ticket is not None and self._ticket[1] == number:
            self._ticket = None
        for fragment, one in enumerate(self._rounds):
            one.bodies.pop(number, None)
            self._decide_if_complete(fragment)
        if not self._with_role(Role.MEMBER):  # nobody has a state to give any more
            for waiting in self._with_role(Role.JOINING):
                waiting.role = Role.ARRIVED
                self._arrive(waiting)

    def _with_role(self, role: Role) -> list[_Replica]:
        found = [one for one in self.replicas.values() if one.role is role and one.is_whole]
        return sorted(found, key=lambda one: one.number)

    # -- membership -------------------------------------------------------------------------------

    def _arrive(self, replica: _Replica) -> None:
        """All ranks of ``replica`` have said hello."""
        if self._with_role(Role.MEMBER):
            self._admit(replica)
            return
        arrived = self._with_role(Role.ARRIVED)
        first = next(iter(replica.ranks.values())).hello
        if len(arrived) >= first["num_replicas"]:
            self._begin()
        elif self._welcome is None:
            loop = asyncio.get_running_loop()
            self._welcome = loop.call_later(first["deadline"], self._begin)

    def _begin(self) -> None:
        """Welcome those who are there; the others take the state of the most advanced one."""
        if self._welcome is not None:
            self._welcome.cancel()
            self._welcome = None
        arrived = self._with_role(Role.ARRIVED)
        if not arrived:
            return
        first = max(arrived, key=lambda one: (bool(one.digests), sum(one.rounds), -one.number))
        self._rounds = [
            _Round(number, digest)
            for number, digest in zip(first.rounds, first.digests, strict=True)
        ]
        for replica in [first, *(one for one in arrived if one is not first)]:
            self._admit(replica)

    def _admit(self, replica: _Replica) -> None:
        digests = [one.digest for one in self._rounds]
        members = self._with_role(Role.MEMBER)
        replica.role = Role.MEMBER if replica.digests == digests else Role.JOINING
        alike = [one for one in members if one.digests == replica.digests == digests]
        for other, (rank, own) in itertools.product(alike, replica.ranks.items()):
            values = {own.hello["values"], other.ranks[rank].hello["values"]} - {""}
            if len(values) > 1:
                self._refuse(replica, rank, other)
                return
        replica.send(Frame(Kind.WELCOME, {"joins": replica.role is Role.JOINING}))
        logger.info("replica %d is there and %s", replica.number, replica.role.value)

    def _refuse(self, replica: _Replica, rank: int, other: _Replica) -> None:
        reason = (
            f"replica {replica.number}, rank {rank}: other shared parameters than replica "
            f"{other.number}, after the same rounds; initialize all replicas with the same seed, "
            "or load the same checkpoint"
        )
        replica.send(Frame(Kind.REFUSED, body=reason.encode()))
        del self.replicas[replica.number]

    # -- rounds -----------------------------------------------------------------------------------

    def _receive(self, connection: _Connection, frame: Frame) -> None:
        number, rank = connection.hello["replica"], connection.hello["rank"]
        replica = self.replicas[number]
        replica.step = max(replica.step, frame.header.get("step", 0))
        match frame.kind:
            case Kind.DELTA:
                self._take_delta(replica, rank, frame)
            case Kind.STATE:
                self._pass_on(frame, rank)
            case Kind.READY:
                connection.is_ready = True
                if all(one.is_ready for one in replica.ranks.values()):
                    replica.role = Role.MEMBER
                    logger.info("replica %d takes part again", number)

    def _take_delta(self, replica: _Replica, rank: int, frame: Frame) -> None:
        if replica.role is not Role.MEMBER:
            return
        fragment, header = int(frame.header["fragment"]), frame.header
        current = self._rounds[fragment]
        self.received_bytes[replica.number] = self.received_bytes.get(replica.number, 0) + len(
            frame.body
        )
        if header["digest"] != current.digest:
            if header["round"] >= current.number:  # it cannot be: have it say hello again
                raise ValueError("it has applied what was not decided here")
            return  # late
        current.bodies.setdefault(replica.number, {})[rank] = bytes(frame.body)
        current.steps[replica.number] = header["step"]
        is_first = current.timer is None and len(current.bodies[replica.number]) == len(
            replica.ranks
        )
        if is_first:
            deadline = next(iter(replica.ranks.values())).hello["deadline"]
            loop = asyncio.get_running_loop()
            current.timer = loop.call_later(deadline, self._decide, fragment)
        self._decide_if_complete(fragment)

    def _complete(self, fragment: int) -> list[_Replica]:
        """The members of which all differences have come."""
        bodies = self._rounds[fragment].bodies
        return [
            one
            for one in self._with_role(Role.MEMBER)
            if len(bodies.get(one.number, ())) == len(one.ranks)
        ]

    def _decide_if_complete(self, fragment: int) -> None:
        members = self._with_role(Role.MEMBER)
        if members and len(self._complete(fragment)) == len(members):
            self._decide(fragment)

    def _decide(self, fragment: int) -> None:
        """Send what has come of the round to all, and begin the next."""
        current, complete = self._rounds[fragment], self._complete(fragment)
        if not complete:
            current.timer = None
            return
        late = [one for one in self._with_role(Role.MEMBER) if one not in complete]
        names = [
            f"replica {one.number} (rank {rank}, after step {one.step})"
            for one in late
            for rank in one.ranks
            if rank not in current.bodies.get(one.number, ())
        ]
        for name in names:
            logger.warning("round %d of fragment %d: %s is late", current.number, fragment, name)
        following = self._rounds[fragment] = current.follow(secrets.token_hex(8))
        header = {
            "fragment": fragment,
            "round": current.number,
            "before": current.digest,
            "after": following.digest,
            "step": max(current.steps[one.number] for one in complete),
            "replicas": [one.number for one in complete],
            "late": names,
        }
        ticket = self._ask_for_state(complete[0])
        for replica in self.replicas.values():
            if replica.is_whole and replica.role is not Role.ARRIVED:
                self._announce(replica, header, current, ticket)

    def _announce(
        self, replica: _Replica, header: dict[str, Any], done: _Round, ticket: int
    ) -> None:
        """Send a decision with the differences of the other replicas."""
        is_giver = self._ticket is not None and self._ticket[1] == replica.number
        others = [number for number in header["replicas"] if number != replica.number]
        for rank, connection in replica.ranks.items():
            parts = [done.bodies[number][rank] for number in others]
            mine = {**header, "sizes": [len(part) for part in parts]}
            if is_giver and ticket:
                mine["ticket"] = ticket
            connection.send(Frame(Kind.DECISION, mine, b"".join(parts)))

    def _ask_for_state(self, giver: _Replica) -> int:
        """The number of a new ticket, if replicas wait for a state; else 0."""
        joining = self._with_role(Role.JOINING)
        if not joining or (self._ticket is not None and all(one.since_ticket for one in joining)):
            return 0
        self._ticket = next(self._tickets), giver.number
        for one in joining:
            one.since_ticket = True
        return self._ticket[0]

    def _pass_on(self, frame: Frame, rank: int) -> None:
        for replica in self._with_role(Role.JOINING):
            if replica.since_ticket:
                replica.ranks[rank].send(frame)


# -- running it ----------------------------------------------------------------------------------


async def serve(host: str, port: int, started: "Future[tuple[Hub, int]] | None" = None) -> None:
    """Run a hub at ``host:port`` until cancelled; ``started`` gets it and its port."""
    hub = Hub()
    server = await asyncio.start_server(hub.accept, host, port, limit=1 << 22)
    beat = asyncio.create_task(hub.beat())
    try:
        if started is not None:
            started.set_result((hub, server.sockets[0].getsockname()[1]))
        await server.serve_forever()
    finally:
        beat.cancel()
        server.close()
        ending = [task for task in hub.connections if task is not None]
        for writer in hub.connections.values():
            writer.transport.abort()
        await asyncio.gather(*ending)


class HubThread:
    """A hub on a thread of this process; a context manager."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        started: Future[tuple[Hub, int]] = Future()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(serve(host, port, started))
        self._thread = threading.Thread(target=self._run, name="shardwise-hub", daemon=True)
        self._thread.start()
        self.hub, port = started.result(timeout=10)
        self.address = f"{host}:{port}"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def stop(self) -> None:
        """End it as if its process had been killed."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def __enter__(self) -> "HubThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
