"""The reports and heartbeats of other ranks, which a rank reads while it waits.

A busy rank (a long forward, a slow disk, a data loader that takes minutes) publishes no report, and
other ranks should go on waiting for it. A rank that was stopped (SIGSTOP, a frozen container, a
lost network) publishes none either, and its connections stay open. So every two seconds a thread
of each rank publishes a counter, and where Python is, in the job's store.

What a rank asks of the store does not grow with the number of ranks. It reads

- the first failure of the epoch, a key that one rank sets;
- the counter of the next rank, and a key that names a rank whose counter has stopped;
- how many ranks are stuck, when it gets stuck itself.

One rank reads the reports of all: the last one to get stuck, or the first one that lost another.
"""

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any, TypeVar

from shardwise._private import default_store
from shardwise.comm.communicator import POLL_SECONDS, Place
from shardwise.comm.groups import becomes_true
from shardwise.errors import PeerLost, PeerSilent, StepError
from shardwise.watch.status import LookCounter, Report, table, verdict
from shardwise.watch.store import BoundedStore, decode, encode

__all__ = [
    "ENDED_NORMALLY",
    "Monitor",
    "Patience",
    "connect_to_store",
    "describe_elsewhere",
    "usual_patience",
]

_T = TypeVar("_T")

_PATIENCE_VARIABLE = "SHARDWISE_PATIENCE_SECONDS"
ENDED_NORMALLY = "no uncaught exception, it ran fewer steps"
_MAX_TEXT = 500
# A rank whose connection was closed waits so long for the reason from the other side.
_REASON_SECONDS = 2.0

_log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait before they check each other."""

    poll_seconds: float = POLL_SECONDS  # between two looks during a wait
    beat_seconds: float = 2.0
    silent_seconds: float = 8.0  # also for a rank whose C code holds the GIL
    store_seconds: float = 10.0  # until a call of the job's store is given up
    log_seconds: float = 15.0  # until a waiting rank logs it; then twice as long each time


def usual_patience() -> Patience:
    """Return the defaults, scaled by the environment variable."""
    usual = Patience()
    log = float(os.environ.get(_PATIENCE_VARIABLE, usual.log_seconds))
    factor = log / usual.log_seconds
    silent, store = factor * usual.silent_seconds, factor * usual.store_seconds
    return Patience(silent_seconds=silent, store_seconds=store, log_seconds=log)


def connect_to_store(patience: Patience) -> BoundedStore:
    """Return the job's store, through a new connection.

    Other waits on the store do not block the heartbeat then.
    """
    store = default_store().clone()  # type: ignore[attr-defined]
    return BoundedStore(store, patience.store_seconds)


@dataclass(slots=True)
class _Known:
    """What this rank says when its process ends."""

    place: Place
    failure: Report | None = None  # the last one that this rank knows
    error: BaseException | None = None  # what ends the process, if it is known


@dataclass(frozen=True, slots=True)
class _Silence:
    """A rank whose counter has stopped."""

    rank: int
    seconds: float
    beat: str  # its last heartbeat


class Monitor:
    """The reports and heartbeats of the ranks of a group, in a store that all can read.

    Every method raises PeerLost if the process that holds the store does not answer in time.
    """

    def __init__(
        self,
        store: BoundedStore,
        name: str,
        rank: int,
        size: int,
        patience: Patience,
        on_beat: "weakref.WeakMethod[Callable[[int], None]] | None" = None,
        place: Place | None = None,
    ) -> None:
        """Start the heartbeat thread.

        It calls ``on_beat`` with a count, and ``on_beat`` calls `beat`; not after its object was
        freed. When the object of ``on_beat`` is freed, or before the interpreter exits, the last
        heartbeat is published: why this rank ended, and at which ``place``.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._patience = patience
        self._prefix = f"shardwise/{name}"
        self._beats = [self._key("heartbeat", other) for other in range(size)]
        self._reports = [self._key("report", other) for other in range(size)]
        self._known = known = _Known(place or Place())
        self._next = (rank + 1) % size  # the rank that this one watches
        self._counter = LookCounter()  # at its counter
        self._publishing = threading.RLock()
        self._stuck: tuple[Any, ...] | None = None  # what this rank is counted as stuck in
        self._is_judge = False  # it was the last one to get stuck
        self._blocked: dict[int, int] = {}  # looks of ranks in a torch collective
        store.set(self._beats[rank], "0")
        store.set(self._reports[rank], "")
        done: SimpleQueue[None] = SimpleQueue()  # has an item when the heartbeat ends
        thread = threading.Thread(
            target=_beat,
            args=(store, self._beats[rank], done, patience.beat_seconds, on_beat, known),
            name="shardwise-heartbeat",
            daemon=True,
        )
        thread.start()
        owner = None if on_beat is None else getattr(on_beat(), "__self__", None)
        # The garbage collector may run this on any thread, so it waits for nothing.
        weakref.finalize(owner or self, done.put, None)
        told = (self._key("told"), size) if rank == 0 else None  # its process may hold the store
        ended = weakref.ref(thread), done, 2 * patience.beat_seconds
        end = weakref.finalize(thread, _await_end, *ended, store, known, told)
        Finalize(thread, end, exitpriority=0)  # in a process that `multiprocessing` forked

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def beat(self, heartbeat: Report) -> None:
        """Publish ``heartbeat``, look for a failure, and check that the next rank beats, too.

        Silence is measured in heartbeats of this rank, which end when its own process is stopped or
        the store is slow.
        """
        self._set(self._beats[self._rank], heartbeat)
        self.failure(heartbeat.epoch)
        beat = self._store.peek(self._beats[self._next]).decode(errors="replace")
        seconds = self._counter.look(beat) * self._patience.beat_seconds
        # No counter: the rank has not started yet.
        if beat and self._next != self._rank and seconds >= self._patience.silent_seconds:
            self._set(self._key("silent"), _Silence(self._next, seconds, beat))

    def publish(self, report: Report) -> None:
        """Publish ``report`` if this rank gets stuck, or no longer is."""
        stuck = None
        if report.is_stuck:
            stuck = report.epoch, report.queues, report.blocked_with, report.is_host_busy
        with self._publishing:
            before = self._stuck
            # In a torch collective this rank does not look itself, so others count its looks.
            if stuck != before or report.blocked_with:
                self._set(self._reports[self._rank], report)
            if stuck == before:
                return
            self._is_judge = False
            key = self._key("stuck", report.epoch)
            if before is not None and before[0] == report.epoch:
                self._store.add(key, -1)
            # More than all, if a call that was given up has had an effect.
            if stuck is not None and self._store.add(key, 1) >= self._size:
                self._is_judge, self._blocked = True, {}
            self._stuck = stuck

    def announce(self, failure: Report) -> Report:
        """Publish ``failure``; return the first one that any rank announced in its epoch.

        Ranks may detect the same loss at the same time, and must all raise the same error.
        """
        epoch = failure.epoch
        if self._failed(epoch) is None:  # otherwise, the store may be gone
            key, content = self._key("failed", epoch), encode(failure)
            first = self._store.set_if(key, "", content)
            if self._note(first, epoch) is None:  # no rank of this job wrote it
                self._note(self._store.set_if(key, first, content), epoch)
        return self._failed(epoch) or failure

    def failure(self, epoch: int) -> Report | None:
        """Return the first failure that a rank has announced in ``epoch``."""
        known = self._failed(epoch)
        return known or self._note(self._store.peek(self._key("failed", epoch)), epoch)

    def _failed(self, epoch: int) -> Report | None:
        failure = self._known.failure
        return None if failure is None or failure.epoch != epoch else failure

    def _note(self, content: bytes, epoch: int) -> Report | None:
        failure = self._message(Report, content)
        if failure is None or not failure.failure or failure.epoch != epoch:
            return None
        self._known.failure = failure
        self._store.add(f"{self._key('told')}/{epoch}", 1)
        return failure

    def check_reports(self, epoch: int) -> None:
        """Raise the failure of ``epoch``, or the error of `judge`."""
        if (failure := self.failure(epoch)) is not None:
            raise failure.raised
        if (error := self.judge(epoch)) is not None:
            raise error

    def judge(self, epoch: int) -> StepError | None:
        """Return the error of `verdict`, if this rank is the last one that got stuck."""
        if not self._is_judge:
            return None
        reports = self.reports(epoch)
        error = verdict(reports, epoch)
        known = ((rank, report) for rank, report in enumerate(reports) if report is not None)
        blocked = {rank: report.looks for rank, report in known if report.blocked_with}
        # Ranks in torch collectives must not have moved since this rank became the judge.
        before = self._blocked = self._blocked or blocked
        self._is_judge = error is not None
        is_confirmed = all(before.get(rank, looks) < looks for rank, looks in blocked.items())
        return error if is_confirmed else None

    def reports(self, epoch: int) -> list[Report | None]:
        """Return the last reports of all ranks, None for those without one in ``epoch``."""
        reports = (self._message(Report, content) for content in self._store.read(self._reports))
        return [None if one is None or one.epoch != epoch else one for one in reports]

    def is_first(self, *what: object) -> bool:
        """Whether this is the first call with ``what`` on any rank."""
        return self._store.add(self._key(*what), 1) == 1

    def explain(self, error: PeerLost, epoch: int) -> PeerLost:
        """Add the positions of all ranks to ``error``, and that a rank has ended normally.

        The first rank that calls this does it for all, and announces the result; the others wait
        for it. A rank whose connection was closed lets the other side say why, if it can.
        """
        is_closed = isinstance(error.__cause__, ConnectionError)
        is_closed = is_closed and not isinstance(error.__cause__, ConnectionAbortedError)
        if (is_closed and self._awaits_failure(epoch, _REASON_SECONDS)) or (
            not self.is_first("explained", epoch)
            and self._awaits_failure(epoch, self._patience.silent_seconds)
        ):
            return error  # `announce` returns the failure
        if ended := _ended_normally(self._heartbeats()):
            return PeerLost(f"{ended}\n{self.table()}")
        silence = self._silence()
        remarks = {} if silence is None else {silence.rank: _no_sign_of_life(silence)}
        return type(error)(f"{error}\n{self.table(remarks)}")

    def _awaits_failure(self, epoch: int, seconds: float) -> bool:
        return becomes_true(lambda: self.failure(epoch) is not None, seconds)

    def check_heartbeats(self, where: str = "") -> None:
        """Check that no rank is silent. Call it regularly during a wait, for the error ``where``.

        Raises:
            PeerSilent: names a rank whose counter has not changed for ``silent_seconds``.
            PeerLost: that rank has ended normally.
        """
        if (silence := self._silence()) is not None:
            last = self._message(Report, silence.beat.encode())
            if last is not None and (ended := _ended_normally({silence.rank: last})):
                raise PeerLost(ended)
            raise PeerSilent(
                f"rank {self._rank} lost rank {silence.rank}: its process gave "
                f"{_no_sign_of_life(silence)}; it is stopped (SIGSTOP, a debugger), its machine is "
                f"frozen or off the network, or a call into C holds Python's lock{where}"
            )

    def _silence(self) -> _Silence | None:
        """Return the silence that a rank has reported, if it has not ended."""
        silence = self._message(_Silence, self._store.peek(self._key("silent")))
        if silence is None or not 0 <= silence.rank < self._size:
            return None
        beat = self._store.peek(self._beats[silence.rank]).decode(errors="replace")
        return silence if beat == silence.beat else None

    def heartbeat(self, rank: int) -> Report | None:
        """Return the last heartbeat of ``rank``."""
        return self._message(Report, self._store.peek(self._beats[rank]))

    def table(self, remarks: Mapping[int, str] = MappingProxyType({})) -> str:
        """Describe why ranks have ended, and where each was at its last heartbeat."""
        reports = self._heartbeats()
        ended = "".join(
            f"rank {rank} ended (it was last in step {report.step}, {report.where}): "
            f"{report.error}\n"
            for rank, report in reports.items()
            if report.error
        )
        return ended + table(reports, remarks)

    def _heartbeats(self) -> dict[int, Report]:
        found = (self._message(Report, one) for one in self._store.read(self._beats))
        return {rank: beat for rank, beat in enumerate(found) if beat is not None}

    def swap_histories(self, rank: int, own: _T) -> _T | None:
        """Publish ``own``, a dataclass; return what ``rank`` has published, or None."""
        self._set(self._key("history", self._rank), own)
        return self._message(type(own), self._store.peek(self._key("history", rank)))

    def meet(self, epoch: int) -> None:
        """Return when all ranks have called this in ``epoch``."""
        # Up a binary tree of ranks, then to all. A call whose answer was lost can be repeated.
        came = [self._came(epoch, rank) for rank in self._below(self._rank)]
        becomes_true(lambda: not came or self._store.has(*came))
        self._store.set(self._came(epoch, self._rank), "")
        becomes_true(lambda: self._store.has(self._came(epoch, 0)))

    def absent(self, epoch: int, at_most: int) -> list[int]:
        """Return some of the ranks that have not called `meet` in ``epoch``."""
        found: list[int] = []
        rest = self._missing(epoch, [0])
        while rest and len(found) < at_most:
            rank = rest.pop()
            below = self._missing(epoch, self._below(rank))
            rest += below
            if not below:
                found.append(rank)
        return found

    def _missing(self, epoch: int, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.has(self._came(epoch, rank))]

    def _below(self, rank: int) -> list[int]:
        return [one for one in (2 * rank + 1, 2 * rank + 2) if one < self._size]

    def _came(self, epoch: int, rank: int) -> str:
        """The key that says that ``rank`` and all ranks below it have called `meet`."""
        return self._key("came", epoch, rank) if rank else self._key("met", epoch)

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, encode(value))

    def _message(self, kind: type[_T], content: bytes) -> _T | None:
        """Return the message in ``content``, or None if no rank of this job can have written it."""
        try:
            message = decode(kind, content)
        except ValueError:
            return None
        is_foreign = isinstance(message, Report) and not message.fits(self._size)
        return None if is_foreign else message


def _ended_normally(reports: Mapping[int, Report]) -> str:
    """Describe the ranks that ended without an exception, and what to do; "" if none did."""
    ended = [
        f"rank {rank} ended after step {report.step} without an uncaught exception"
        for rank, report in reports.items()
        if report.error == ENDED_NORMALLY
    ]
    if not ended:
        return ""
    return (
        f"{', '.join(ended)}: unless its output shows an error that it caught, it had fewer "
        "batches than the others, or skipped a step. Give every rank as many batches: end all "
        "loops at the same step, or let the sampler pad or drop the rest (drop_last=True); with "
        "sw.join(model, optimizer) they need not be as many"
    )


def _no_sign_of_life(silence: _Silence) -> str:
    return f"no sign of life for {silence.seconds:.0f} s"


def describe_elsewhere(ranks: Sequence[int], beats: Mapping[int, Report | None]) -> str:
    """Describe the ``ranks`` that a rank waits for; ``beats`` are heartbeats of some of them."""
    if not ranks:
        return "; all ranks have begun it, so the network or a device is slow"
    text = ""
    for rank, beat in beats.items():
        text += f"; waits for rank {rank}, which "
        if beat is None:
            text += "has not begun"
            continue
        python = " < ".join(beat.python) or "unknown"
        text += f"is alive in step {beat.step}, {beat.where}, Python at {python}"
    return text if len(beats) == len(ranks) else f"{text}; and for {len(ranks) - len(beats)} more"


def _beat(
    store: BoundedStore,
    key: str,
    done: "SimpleQueue[None]",
    seconds: float,
    on_beat: "weakref.WeakMethod[Callable[[int], None]] | None",
    known: _Known,
) -> None:
    count, is_logged = 0, False
    while not _has_item(done, seconds):
        count += 1
        try:
            if on_beat is not None and (call := on_beat()) is not None:
                call(count)
            else:
                store.set(key, str(count))
            is_logged = False
        except Exception as error:  # noqa: BLE001 - without heartbeats, others give this rank up
            if not is_logged:
                _log.warning("a heartbeat failed, the next one is tried: %s", error)
            is_logged = True
        call = None  # otherwise this thread would keep the object until the next beat
    step, where = known.place.step, known.place.where
    report = Report(0, 0, step, where, (), error=_reason(known.error))
    with contextlib.suppress(PeerLost):
        store.set(key, encode(report))


def _reason(error: BaseException | None) -> str:
    """Why this process ends, while ``error`` is raised, if that is known."""
    error = error or getattr(sys, "last_value", None)  # an exception that nothing caught
    if isinstance(error, SystemExit):
        error = (error.__context__ or error) if error.code else None
    return ENDED_NORMALLY if error is None else f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def _has_item(queue: "SimpleQueue[None]", seconds: float) -> bool:
    """Whether ``queue`` gets an item in the next ``seconds``."""
    with contextlib.suppress(Empty):
        queue.get(timeout=seconds)
        return True
    return False


def _await_end(
    thread: "weakref.ref[threading.Thread]",
    done: "SimpleQueue[None]",
    seconds: float,
    store: BoundedStore,
    known: _Known,
    told: tuple[str, int] | None,
) -> None:
    """Before the interpreter exits, publish why, and let other ranks read a failure."""
    beating, failure = thread(), known.failure
    if beating is None:
        return  # it has ended before
    known.error = sys.exception()  # in a process of `multiprocessing`
    done.put(None)
    # If Python exits while the thread is in a call of the store, C++ aborts the process.
    beating.join(seconds)
    if told is not None and failure is not None:
        key, num_ranks = told
        num_alive = num_ranks - isinstance(failure.raised, PeerLost)
        with contextlib.suppress(PeerLost):
            becomes_true(lambda: store.add(f"{key}/{failure.epoch}", 0) >= num_alive, seconds)
