"""The hub connects replicas and decides each round of a fragment.

Every rank of every replica is connected to the hub. The hub keeps no parameters and computes no
averages: it orders the differences to average and sends them to all replicas, so all compute the
same result. The hub may end and restart at any time; replicas train alone while it is gone.

A round is decided when all members have sent their differences, or ``deadline`` seconds after the
first replica has. Members that were not connected at the step of the round, and are past it, are
not waited for. The round averages the replicas whose ranks have all sent their shards. A digest
identifies all decisions for a fragment so far: replicas with equal digests have the same bits,
whatever happened in between. A replica that connects with another digest than the hub's has to take
the state of a member.
"""

import asyncio
import itertools
import logging
import secrets
from typing import Any

from pydantic import ValidationError

from shardwise.outer.frames import HEARTBEAT_SECONDS, Frame, Kind, read_frame
from shardwise.outer.members import Connection, Hello, Replica, Role
from shardwise.outer.rounds import Round, rounds_text

__all__ = ["Hub"]

logger = logging.getLogger("shardwise.outer")

_MAX_BODY_BYTES = 1 << 36
# A process that still sends this long after another one connected with its numbers is alive.
_TAKEN_SECONDS = 3 * HEARTBEAT_SECONDS


class Hub:
    """Decides rounds. All methods run on one event loop."""

    def __init__(self) -> None:
        self.replicas: dict[int, Replica] = {}
        self.received_bytes: dict[int, int] = {}  # bytes of differences, by replica
        self.connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}
        self._rounds: list[Round] = []  # the next one of each fragment
        self._options: dict[str, Any] = {}
        self._start_timer: asyncio.TimerHandle | None = None
        self._tickets = itertools.count(1)

    # -- connections ------------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        connection: Connection | None = None
        self.connections[asyncio.current_task()] = writer
        try:
            connection = await self._greet(await read_frame(reader, 0), writer)
            while connection is not None:
                self._receive(connection, await read_frame(reader, _MAX_BODY_BYTES))
        except Exception as error:  # noqa: BLE001 - an unknown client may send anything
            if connection is None:
                peer = writer.get_extra_info("peername")
                logger.warning("%s is no rank of a replica: %s", peer, _reason(error))
            elif self._is_current(connection):
                self._lose(connection.hello.replica, error)
        finally:
            del self.connections[asyncio.current_task()]
            writer.close()

    async def send_heartbeats(self) -> None:
        """Send heartbeats to all ranks until cancelled."""
        while True:
            for replica in self.replicas.values():
                replica.send(Frame(Kind.HEARTBEAT))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _is_current(self, connection: Connection) -> bool:
        replica = self.replicas.get(connection.hello.replica)
        return replica is not None and connection in replica.ranks.values()

    async def _greet(self, frame: Frame, writer: asyncio.StreamWriter) -> Connection | None:
        """Add the rank that sent ``frame``; None if it cannot take part."""
        try:
            hello = Hello.model_validate(frame.header)
            objection = await self._objection(hello)
        except ValidationError as error:
            objection = f"no hello of this version of shardwise: {error}"
        if objection:
            writer.writelines(Frame(Kind.REFUSED, body=objection.encode()).encode())
            return None
        replica = self.replicas.get(hello.replica)
        if replica is None or hello.rank in replica.ranks:
            if replica is not None:  # it reconnects before the hub has noticed that it was gone
                self._lose(hello.replica, ConnectionResetError("it has a new connection"))
            replica = self.replicas[hello.replica] = Replica(hello.replica)
        now = asyncio.get_running_loop().time()
        connection = replica.ranks[hello.rank] = Connection(writer, hello, now)
        if replica.is_whole:
            self._arrive(replica)
        return connection

    async def _objection(self, hello: Hello) -> str:
        """Why a rank cannot take part; empty if it can."""
        if await self._is_taken(hello):
            return (
                f"another process is replica {hello.replica}, rank {hello.rank}; give each replica "
                "a number of its own"
            )
        if not self.replicas:
            self._options = dict(hello.options)
        for key, value in hello.options.items():
            if value != self._options.get(key):
                return (
                    f"replica {hello.replica} has {key}={value!r}, and the others have "
                    f"{self._options.get(key)!r}; start all replicas with the same model and "
                    "options"
                )
        return ""

    async def _is_taken(self, hello: Hello) -> bool:
        """Whether another live process has the same replica and rank.

        Waits until that process is gone or has sent something.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            replica = self.replicas.get(hello.replica)
            other = replica.ranks.get(hello.rank) if replica is not None else None
            if other is None or other.hello.process == hello.process:
                return False
            if other.received_at - began > _TAKEN_SECONDS:
                return True
            await asyncio.sleep(HEARTBEAT_SECONDS / 8)

    def _lose(self, number: int, error: BaseException) -> None:
        """Remove a replica because of an ``error`` of a connection."""
        replica = self.replicas[number]
        rounds = rounds_text([one.number for one in self._rounds])
        message = "replica %d is gone after step %d, %s: %s"
        logger.warning(message, number, replica.step, rounds, _reason(error))
        for connection in replica.ranks.values():
            connection.writer.transport.abort()
        self._remove(replica)

    def _refuse(self, replica: Replica, reason: str) -> None:
        """Remove a replica that cannot take part."""
        logger.warning("%s", reason)
        replica.send(Frame(Kind.REFUSED, body=reason.encode()))
        self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        del self.replicas[replica.number]
        for waiting in self.replicas.values():
            if waiting.giver == replica.number:
                waiting.ticket, waiting.giver = 0, -1
        for fragment, current in enumerate(self._rounds):
            current.remove(replica.number)
            self._decide_if_complete(fragment)
        if not self._with_role(Role.MEMBER):  # no replica is left that could send its state
            for waiting in self._with_role(Role.JOINING):
                waiting.role = Role.ARRIVED
                self._arrive(waiting)

    def _with_role(self, role: Role) -> list[Replica]:
        """The replicas in ``role`` whose ranks are all connected, by number."""
        found = [one for one in self.replicas.values() if one.role is role and one.is_whole]
        return sorted(found, key=lambda one: one.number)

    # -- membership -------------------------------------------------------------------------------

    def _arrive(self, replica: Replica) -> None:
        """Welcome ``replica``, now that all of its ranks are connected, or wait for others."""
        if self._with_role(Role.MEMBER):
            self._admit(replica)
        elif len(self._with_role(Role.ARRIVED)) >= replica.hello.num_replicas:
            self._begin()
        elif self._start_timer is None:
            loop = asyncio.get_running_loop()
            self._start_timer = loop.call_later(replica.hello.deadline, self._begin)

    def _begin(self) -> None:
        """Welcome the replicas that have arrived, with the rounds of the most advanced one."""
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None
        arrived = self._with_role(Role.ARRIVED)
        if not arrived:
            return
        first = max(
            arrived, key=lambda one: (bool(one.digests), sum(one.hello.rounds), -one.number)
        )
        done = zip(first.hello.rounds, first.digests, strict=True)
        self._rounds = [Round(index, number, digest) for index, (number, digest) in enumerate(done)]
        for replica in [first, *(one for one in arrived if one is not first)]:
            self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        """Welcome ``replica``, or refuse it if its shared parameters differ from a member's."""
        digests = [one.digest for one in self._rounds]
        same = [one for one in self._with_role(Role.MEMBER) if one.digests == digests]
        replica.role = Role.MEMBER if replica.digests == digests else Role.JOINING
        for other, (rank, own) in itertools.product(same, replica.ranks.items()):
            checksums = {own.hello.checksum, other.ranks[rank].hello.checksum} - {""}
            if replica.role is Role.MEMBER and len(checksums) > 1:
                advice = "initialize all replicas with the same seed, or load the same checkpoint"
                self._refuse(replica, _differs(replica.number, rank, other.number, advice))
                return
        replica.send(Frame(Kind.WELCOME, {"joins": replica.role is Role.JOINING}))
        logger.info("replica %d is connected as %s", replica.number, replica.role.value)

    # -- rounds -----------------------------------------------------------------------------------

    def _receive(self, connection: Connection, frame: Frame) -> None:
        connection.received_at = asyncio.get_running_loop().time()
        replica = self.replicas[connection.hello.replica]
        replica.step = max(replica.step, frame.header.get("step", 0))
        match frame.kind:
            case Kind.DELTA:
                connection.sent_step = frame.header["step"]
                self._take_difference(replica, connection.hello.rank, frame)
                for fragment in range(len(self._rounds)):
                    self._decide_if_complete(fragment)
            case Kind.STATE:
                self._forward_state(frame, connection.hello.rank)
            case Kind.READY:
                connection.is_ready = True
                if all(one.is_ready for one in replica.ranks.values()):
                    replica.role = Role.MEMBER
                    logger.info("replica %d takes part again", replica.number)

    def _take_difference(self, replica: Replica, rank: int, frame: Frame) -> None:
        if replica.role is not Role.MEMBER:
            return
        number, header = replica.number, frame.header
        current = self._rounds[header["fragment"]]
        self.received_bytes[number] = self.received_bytes.get(number, 0) + len(frame.body)
        if header["digest"] != current.digest:
            if header["round"] >= current.number:  # the error makes it reconnect
                raise ValueError("it has applied a round that this hub has not decided")
            return  # it is late
        other = current.add(number, rank, frame)
        if other is not None:
            advice = (
                "use the same outer optimizer and learning rates in all replicas; a replica that "
                f"starts again takes the state of replica {other}"
            )
            self._refuse(replica, _differs(number, rank, other, advice))
            return
        if current.timer is None and current.has_all_of(replica):
            loop, fragment = asyncio.get_running_loop(), current.fragment
            current.timer = loop.call_later(replica.hello.deadline, self._expire, fragment)

    def _decide_if_complete(self, fragment: int) -> None:
        current, members = self._rounds[fragment], self._with_role(Role.MEMBER)
        awaited = [one for one in members if not current.is_passed_by(one)]
        if awaited and all(map(current.has_all_of, awaited)):
            self._decide(fragment)

    def _expire(self, fragment: int) -> None:
        """Decide without the late replicas."""
        self._decide(fragment)

    def _decide(self, fragment: int) -> None:
        """Send the received differences of the round to all replicas, and begin the next round."""
        current, members = self._rounds[fragment], self._with_role(Role.MEMBER)
        complete = [one for one in members if current.has_all_of(one)]
        if not complete:
            current.timer = None
            return
        late = current.missing([one for one in members if one not in complete])
        for name in late:
            logger.warning("round %d of fragment %d: %s is late", current.number, fragment, name)
        following = self._rounds[fragment] = current.following(secrets.token_hex(8))
        header = current.header(complete, late, following.digest)
        ticket = self._request_state(complete[0])
        for replica in self.replicas.values():
            if replica.is_whole and replica.role is not Role.ARRIVED:
                requested = ticket if replica is complete[0] else 0
                for rank, connection in replica.ranks.items():
                    frame = current.decision(header, replica.number, rank, requested)
                    connection.send(frame)

    def _request_state(self, giver: Replica) -> int:
        """Request the state of ``giver`` for the replicas that wait for one; return the ticket.

        Replicas that already receive a state keep it. Returns 0 if no other replica waits.
        """
        waiting = [one for one in self._with_role(Role.JOINING) if not one.ticket]
        ticket = next(self._tickets) if waiting else 0
        for one in waiting:
            one.ticket, one.giver = ticket, giver.number
        return ticket

    def _forward_state(self, frame: Frame, rank: int) -> None:
        for replica in self._with_role(Role.JOINING):
            if replica.ticket == frame.header["ticket"]:
                replica.ranks[rank].send(frame)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _differs(number: int, rank: int, other: int, advice: str) -> str:
    return (
        f"replica {number}, rank {rank}: other shared parameters than replica {other}, after the "
        f"same rounds; {advice}"
    )
