"""A rank's connection to the hub, served by a thread."""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.outer.exchange import Decision, Exchange, Progress
from shardwise.outer.frames import HEARTBEAT_SECONDS, Frame, Kind, read_frame
from shardwise.outer.rounds import rounds_text

__all__ = ["HubExchange"]

logger = logging.getLogger("shardwise.outer")

_RETRY_SECONDS = 0.25  # between attempts to connect
_STATE_CHUNK_BYTES = 1 << 17  # small, so that differences are not delayed by a state
_MAX_BODY_BYTES = 1 << 36


class HubExchange(Exchange):
    """Exchanges differences with the same rank of other replicas, through the hub at ``address``.

    The thread reconnects whenever the connection is lost.
    """

    is_elastic = True

    def __init__(self, address: str, replica: int, rank: int, hello: dict[str, Any]) -> None:
        super().__init__()
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal()):
            raise PlanError(f"hub={address!r}: expected host:port")
        self.address = address
        self._host, self._port = host, int(port)
        process = secrets.token_hex(8)
        self._hello = {"replica": replica, "rank": rank, "process": process, **hello}
        self._name = f"replica {replica}, rank {rank}"
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._giving: set[asyncio.Task[None]] = set()
        # Guards the attributes below, `is_member` and `_progress`.
        self._changed = threading.Condition()
        self.is_member = False
        self._checksum = ""  # of the shared parameters at the last `connect`; empty if outdated
        # By fragment and digest before the round; the first digest is the same for all fragments.
        self._decisions: dict[tuple[int, str], Decision] = {}
        self._sent: dict[int, tuple[str, Tensor]] = {}  # the last difference of each fragment
        self._chunks: list[bytes] = []  # of the state with the last ticket
        self._chunks_ticket = 0
        self._states: dict[int, bytes] = {}  # complete states, by ticket
        self._refusal = ""
        self._averaged: set[int] = set()  # replicas in the last round
        self._writer: asyncio.StreamWriter | None = None

    # -- called by the rank -----------------------------------------------------------------------

    def message_bytes(self, packed_bytes: int) -> int:
        return packed_bytes

    def connect(self, progress: Sequence[Progress], checksum: str) -> None:
        with self._changed:
            super().connect(progress, checksum)
            self._checksum = checksum
        if self._thread is None:
            self._task = self._loop.create_task(self._run())
            self._thread = threading.Thread(
                target=self._serve_loop, name="shardwise-outer", daemon=True
            )
            self._thread.start()

    def send(self, fragment: int, packed: Tensor, checksum: str) -> None:
        with self._changed:
            if not self.is_member:
                return
            progress = self._progress[fragment]
            header = {
                "fragment": fragment,
                "round": progress.round,
                "digest": progress.digest,
                "step": self.step,
                "checksum": checksum,
            }
            own = packed.cpu()
            body = own.numpy().tobytes()
            self._sent[fragment] = progress.digest, own
            self._submit(partial(self._write, Frame(Kind.DELTA, header, body)))
        self.sent_bytes += len(body)

    def decided(self, fragment: int, seconds: float) -> list[Decision]:
        with self._changed:
            own = self._progress[fragment]
            has_sent = fragment in self._sent and self._sent[fragment][0] == own.digest
            timeout = seconds if has_sent else 0.0
            self._wait(lambda: bool(self._chain(fragment)) or not self.is_member, timeout)
            found = self._chain(fragment)
            later = [x.progress.round for (n, _), x in self._decisions.items() if n == fragment]
            if not found and max(later, default=0) > own.round:
                logger.warning("%s misses round %d of fragment %d", self._name, own.round, fragment)
                self._submit(self._disconnect)  # after which it receives a state
            return found

    def applied(self, fragment: int, decision: Decision) -> None:
        with self._changed:
            self._checksum = ""
            self._decisions.pop((fragment, self._progress[fragment].digest), None)
            super().applied(fragment, decision)

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._wait(lambda: self.is_member or bool(self._states), seconds)

    @property
    def ticket(self) -> int:
        with self._changed:
            return max(self._states, default=0)

    def take_state(self, ticket: int) -> bytes:
        with self._changed:
            state = self._states[ticket]
            self._states.clear()
        return state

    def give_state(self, ticket: int, state: bytes) -> None:
        self._submit(partial(self._start_giving, ticket, state))

    def ready(self, progress: Sequence[Progress]) -> None:
        with self._changed:
            level = logging.WARNING if self._averaged else logging.INFO  # a member before
            message = "%s took the state of another replica, after step %d, %s"
            self._progress = list(progress)
            logger.log(level, message, self._name, self.step, self._rounds_text())
            self._checksum = ""
            self._decisions = {
                (fragment, digest): decision
                for (fragment, digest), decision in self._decisions.items()
                if decision.progress.round > progress[fragment].round
            }
            self.is_member = self._writer is not None
            self._submit(partial(self._write, Frame(Kind.READY, {"step": self.step})))

    def close(self) -> None:
        if self._thread is not None and self._task is not None:
            self._is_closing = True  # `asyncio.wait_for` may lose a cancellation (Python 3.11)
            self._submit(self._task.cancel)
            self._thread.join()
            self._thread = None

    def _rounds_text(self) -> str:
        return rounds_text([one.round for one in self._progress])

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait up to ``seconds`` for ``condition``.

        Raises:
            PlanError: the hub refused this rank.
        """
        until = time.monotonic() + seconds
        while not condition() and not self._refusal and time.monotonic() < until:
            self._changed.wait(min(1.0, until - time.monotonic()))
        if self._refusal:
            raise PlanError(f"the hub at {self.address} refused this rank: {self._refusal}")

    def _chain(self, fragment: int) -> list[Decision]:
        """The received decisions that follow the last applied one without a gap."""
        found, digest = [], self._progress[fragment].digest
        while (fragment, digest) in self._decisions:
            decision = self._decisions[fragment, digest]
            found.append(decision)
            digest = decision.progress.digest
        return found

    # -- on the thread ----------------------------------------------------------------------------

    def _serve_loop(self) -> None:
        assert self._task is not None
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _submit(self, action: Callable[[], object]) -> None:
        """Run ``action`` on the thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action)

    async def _run(self) -> None:
        while not (self._refusal or self._is_closing):
            try:
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, limit=1 << 22
                )
            except OSError as error:
                self.connection_error = f"no hub at {self.address}: {error}"
            else:
                await self._talk_until_lost(reader, writer)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _talk_until_lost(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self._talk(reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError, LookupError, TypeError) as error:
            reason = str(error) or type(error).__name__
            self.connection_error = f"{self._name} lost the hub at {self.address}: {reason}"
            message = "%s; after step %d, %s, it trains on alone until the hub is back"
            logger.warning(message, self.connection_error, self.step, self._rounds_text())
        finally:
            self._forget()
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=_STATE_CHUNK_BYTES)
        with self._changed:
            self._decisions.clear()
            hello = {
                **self._hello,
                "rounds": [one.round for one in self._progress],
                "digests": [one.digest for one in self._progress],
                "checksum": self._checksum,
            }
        writer.writelines(Frame(Kind.HELLO, hello).encode())
        self._writer = writer
        heartbeats = self._loop.create_task(self._send_heartbeats())
        try:
            while not (self._refusal or self._is_closing):
                self._receive(await read_frame(reader, _MAX_BODY_BYTES))
        finally:
            heartbeats.cancel()

    def _forget(self) -> None:
        """Drop everything that belongs to the lost connection."""
        with self._changed:
            self._writer = None
            self.is_member = False
            self._decisions.clear()
            self._sent.clear()
            self._chunks.clear()
            self._changed.notify_all()

    async def _send_heartbeats(self) -> None:
        while True:
            self._write(Frame(Kind.HEARTBEAT, {"step": self.step}))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _write(self, frame: Frame) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(frame.encode())

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _start_giving(self, ticket: int, state: bytes) -> None:
        task = self._loop.create_task(self._give(ticket, state))
        self._giving.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._giving.discard)

    async def _give(self, ticket: int, state: bytes) -> None:
        writer, starts = self._writer, range(0, len(state), _STATE_CHUNK_BYTES)
        header = {"ticket": ticket, "count": len(starts)}
        for start in starts:
            if writer is None or writer is not self._writer:  # the connection was lost
                return
            body = memoryview(state)[start : start + _STATE_CHUNK_BYTES]
            self._write(Frame(Kind.STATE, header, body))
            self.state_bytes += len(body)
            with contextlib.suppress(OSError):
                await writer.drain()

    def _receive(self, frame: Frame) -> None:
        with self._changed:
            match frame.kind:
                case Kind.WELCOME:
                    self.is_member = not frame.header["joins"]
                    if self.connection_error:
                        state = "goes on" if self.is_member else "waits for a state"
                        message = "%s reached the hub at %s and %s, %s"
                        rounds = self._rounds_text()
                        logger.warning(message, self._name, self.address, state, rounds)
                    self.connection_error = ""
                    self._states.clear()  # received on earlier connections
                case Kind.REFUSED:
                    self._refusal = frame.body.decode()
                case Kind.DECISION:
                    self._take_decision(frame)
                case Kind.STATE:
                    self._take_chunk(frame)
            if frame.kind is not Kind.HEARTBEAT:
                self._changed.notify_all()

    def _take_decision(self, frame: Frame) -> None:
        header, start, parts = frame.header, 0, []
        fragment, replicas = header["fragment"], header["replicas"]
        for size in header["sizes"]:
            part = bytearray(frame.body[start : start + size])  # writable, as torch requires
            parts.append(torch.frombuffer(part, dtype=torch.uint8))
            start += size
        includes_own = self._hello["replica"] in replicas
        if includes_own:
            digest, own = self._sent[fragment]
            if digest != header["before"]:
                raise ValueError("a decision includes a difference that this rank has not sent")
            parts.insert(replicas.index(self._hello["replica"]), own)
        self._log_absent(header)
        progress = Progress(header["round"] + 1, header["after"], header["step"])
        self.group_step = max(self.group_step, progress.step)
        decision = Decision(parts, progress, includes_own, header["ticket"])
        self._decisions[fragment, header["before"]] = decision

    def _log_absent(self, header: dict[str, Any]) -> None:
        """Log which replicas a decision does not include, on rank 0."""
        averaged, late = set(header["replicas"]), header["late"]
        absent = [f"{name}, which is late" for name in late]
        if not late:
            absent = [f"replica {n}, which is gone" for n in sorted(self._averaged - averaged)]
        self._averaged = averaged | self._averaged if late else averaged
        for name in absent if self._hello["rank"] == 0 else ():
            message = "round %d of fragment %d went on without %s"
            logger.warning(message, header["round"], header["fragment"], name)

    def _take_chunk(self, frame: Frame) -> None:
        ticket, count = frame.header["ticket"], frame.header["count"]
        if ticket != self._chunks_ticket:
            self._chunks_ticket = ticket
            self._chunks.clear()
        self._chunks.append(frame.body)
        if len(self._chunks) == count:
            self._states[ticket] = b"".join(self._chunks)
            self._chunks.clear()
