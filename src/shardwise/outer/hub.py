"""The hub: where replicas meet, and where each round of a fragment is decided.

Every rank of every replica has a connection to it. It averages nothing and keeps no parameters: it
puts the differences that count into an order and sends them to all. So all replicas compute the
same, and the hub may end and start again at any time; replicas train on alone until it is back.

A round is decided when the differences of all members have come, except of members that had no
connection at its step and are past it, or ``deadline`` seconds after those of the first replica. It
counts replicas of which every rank has sent its shard. What was decided for a fragment is
identified by a digest of all decisions, so two replicas with the same digest have the same bits,
whatever happened in between. Who says hello with another digest than the hub's has to take the
state of a member.
"""

import asyncio
import itertools
import logging
import secrets
from typing import Any

from pydantic import ValidationError

from shardwise.outer.frames import ALIVE_SECONDS, SILENT_SECONDS, Frame, Kind, read_frame
from shardwise.outer.members import Connection, Hello, Replica, Role
from shardwise.outer.rounds import Difference, Round, rounds_text

__all__ = ["Hub"]

logger = logging.getLogger("shardwise.outer")

_MAX_BODY_BYTES = 1 << 36
# Signs of life so long after another process came with the same numbers: both of them are alive.
_TAKEN_SECONDS = 3 * ALIVE_SECONDS


class Hub:
    """Decides rounds; all of it runs on one event loop."""

    def __init__(self) -> None:
        self.replicas: dict[int, Replica] = {}
        self.received_bytes: dict[int, int] = {}  # of differences, by replica
        self.connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}
        self._rounds: list[Round] = []
        self._options: dict[str, Any] = {}
        self._welcome: asyncio.TimerHandle | None = None
        self._tickets = itertools.count(1)
        self._ticket: tuple[int, int] | None = None  # its number, and the replica that gives

    # -- connections ------------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        connection: Connection | None = None
        self.connections[asyncio.current_task()] = writer
        try:
            connection = await self._greet(await read_frame(reader, 0, SILENT_SECONDS), writer)
            while connection is not None:
                self._receive(connection, await read_frame(reader, _MAX_BODY_BYTES, SILENT_SECONDS))
        except Exception as error:  # noqa: BLE001 - a stranger may send anything
            if connection is None:
                who = writer.get_extra_info("peername")
                logger.warning("%s is no rank of a replica: %s", who, _reason(error))
            elif self._is_current(connection):
                self._lose(connection.hello.replica, error)
        finally:
            del self.connections[asyncio.current_task()]
            writer.close()

    async def beat(self) -> None:
        """Give signs of life, for ever."""
        while True:
            for replica in self.replicas.values():
                replica.send(Frame(Kind.ALIVE))
            await asyncio.sleep(ALIVE_SECONDS)

    def _is_current(self, connection: Connection) -> bool:
        replica = self.replicas.get(connection.hello.replica)
        return replica is not None and connection in replica.ranks.values()

    async def _greet(self, frame: Frame, writer: asyncio.StreamWriter) -> Connection | None:
        """Take in a rank that says hello; None if it cannot take part."""
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
            # Its ranks are there again before the hub knows that they were gone.
            if replica is not None:
                self._lose(hello.replica, ConnectionResetError("it has a new connection"))
            replica = self.replicas[hello.replica] = Replica(hello.replica)
        now = asyncio.get_running_loop().time()
        connection = replica.ranks[hello.rank] = Connection(writer, hello, heard=now)
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
        """Whether another process has these numbers; waits until it is gone or gives a sign."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            replica = self.replicas.get(hello.replica)
            other = replica.ranks.get(hello.rank) if replica is not None else None
            if other is None or other.hello.process == hello.process:
                return False
            if other.heard - began > _TAKEN_SECONDS:
                return True
            await asyncio.sleep(ALIVE_SECONDS / 8)

    def _lose(self, number: int, error: BaseException) -> None:
        replica = self.replicas[number]
        rounds = rounds_text([one.number for one in self._rounds])
        message = "replica %d is gone after step %d, %s: %s"
        logger.warning(message, number, replica.step, rounds, _reason(error))
        for connection in replica.ranks.values():
            connection.writer.transport.abort()
        self._remove(replica)

    def _refuse(self, replica: Replica, reason: str) -> None:
        logger.warning("%s", reason)
        replica.send(Frame(Kind.REFUSED, body=reason.encode()))
        self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        del self.replicas[replica.number]
        if self._ticket is not None and self._ticket[1] == replica.number:
            self._ticket = None
        for fragment, one in enumerate(self._rounds):
            one.differences.pop(replica.number, None)
            self._decide_if_complete(fragment)
        if not self._with_role(Role.MEMBER):  # nobody has a state to give any more
            for waiting in self._with_role(Role.JOINING):
                waiting.role = Role.ARRIVED
                self._arrive(waiting)

    def _with_role(self, role: Role) -> list[Replica]:
        found = [one for one in self.replicas.values() if one.role is role and one.is_whole]
        return sorted(found, key=lambda one: one.number)

    # -- membership -------------------------------------------------------------------------------

    def _arrive(self, replica: Replica) -> None:
        """All ranks of ``replica`` have said hello."""
        if self._with_role(Role.MEMBER):
            self._admit(replica)
        elif len(self._with_role(Role.ARRIVED)) >= replica.hello.num_replicas:
            self._begin()
        elif self._welcome is None:
            loop = asyncio.get_running_loop()
            self._welcome = loop.call_later(replica.hello.deadline, self._begin)

    def _begin(self) -> None:
        """Welcome those who are there; the others take the state of the most advanced one."""
        if self._welcome is not None:
            self._welcome.cancel()
            self._welcome = None
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
        digests = [one.digest for one in self._rounds]
        members = self._with_role(Role.MEMBER)
        replica.role = Role.MEMBER if replica.digests == digests else Role.JOINING
        alike = [one for one in members if one.digests == replica.digests == digests]
        for other, (rank, own) in itertools.product(alike, replica.ranks.items()):
            values = {own.hello.values, other.ranks[rank].hello.values} - {""}
            if len(values) > 1:
                way_out = "initialize all replicas with the same seed, or load the same checkpoint"
                self._refuse(replica, _differs(replica.number, rank, other.number, way_out))
                return
        replica.send(Frame(Kind.WELCOME, {"joins": replica.role is Role.JOINING}))
        logger.info("replica %d is there and %s", replica.number, replica.role.value)

    # -- rounds -----------------------------------------------------------------------------------

    def _receive(self, connection: Connection, frame: Frame) -> None:
        connection.heard = asyncio.get_running_loop().time()
        replica = self.replicas[connection.hello.replica]
        replica.step = max(replica.step, frame.header.get("step", 0))
        match frame.kind:
            case Kind.DELTA:
                connection.sent_step = frame.header["step"]
                self._take_difference(replica, connection.hello.rank, frame)
                for fragment in range(len(self._rounds)):
                    self._decide_if_complete(fragment)
            case Kind.STATE:
                self._pass_on(frame, connection.hello.rank)
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
            if header["round"] >= current.number:  # it cannot be: have it say hello again
                raise ValueError("it has applied what was not decided here")
            return  # late
        own = Difference(bytes(frame.body), header["step"], header["values"])
        other = current.add(number, rank, own)
        if other is not None:
            way_out = (
                "use the same outer optimizer and learning rates in all replicas; a replica that "
                f"starts again takes the state of replica {other}"
            )
            self._refuse(replica, _differs(number, rank, other, way_out))
            return
        if current.timer is None and current.has_all_of(replica):
            loop, fragment = asyncio.get_running_loop(), current.fragment
            current.timer = loop.call_later(replica.hello.deadline, self._expire, fragment)

    def _decide_if_complete(self, fragment: int) -> None:
        current, members = self._rounds[fragment], self._with_role(Role.MEMBER)
        waited_for = [one for one in members if not current.is_passed_by(one)]
        if waited_for and all(map(current.has_all_of, waited_for)):
            self._decide(fragment)

    def _expire(self, fragment: int) -> None:
        """Go on without those that are late."""
        self._decide(fragment)

    def _decide(self, fragment: int) -> None:
        """Send what has come of the round to all, and begin the next."""
        current, members = self._rounds[fragment], self._with_role(Role.MEMBER)
        complete = [one for one in members if current.has_all_of(one)]
        if not complete:
            current.timer = None
            return
        late = current.missing([one for one in members if one not in complete])
        for name in late:
            logger.warning("round %d of fragment %d: %s is late", current.number, fragment, name)
        following = self._rounds[fragment] = current.follow(secrets.token_hex(8))
        header = current.header(complete, late, following.digest)
        ticket = self._ask_for_state(complete[0])
        for replica in self.replicas.values():
            if replica.is_whole and replica.role is not Role.ARRIVED:
                is_giver = self._ticket is not None and self._ticket[1] == replica.number
                for rank, connection in replica.ranks.items():
                    asked = ticket if is_giver else 0
                    connection.send(current.decision(header, replica.number, rank, asked))

    def _ask_for_state(self, giver: Replica) -> int:
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


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _differs(number: int, rank: int, other: int, way_out: str) -> str:
    return (
        f"replica {number}, rank {rank}: other shared parameters than replica {other}, after the "
        f"same rounds; {way_out}"
    )
