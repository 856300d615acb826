"""The reports and heartbeats of other ranks, which a rank reads while it waits.

A busy rank (a long forward, a slow disk, a data loader that takes minutes) publishes no report, and
other ranks should go on waiting for it. A rank that was stopped (SIGSTOP, a frozen container, a
lost network) publishes none either, and its connections stay open. So every two seconds a thread
of each rank publishes a counter, and where Python is, in the job's store, and reads the counter of
the next rank. It measures time with its own clock only.

A rank makes a constant number of calls, however many ranks there are: it publishes its own report,
and reads one key for the failure that ends the step and one for a rank that is silent. A counter
tells how many ranks are stuck. The rank that makes it complete judges the reports of all ranks, and
only a rank that raises reads the heartbeats of all.
"""

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from shardwise._private import default_store
from shardwise.errors import PeerLost, PeerSilent, StepError
from shardwise.transport.device import is_accelerator
from shardwise.transport.health.plain_data import decode, encode
from shardwise.transport.health.status import Report, table, verdict
from shardwise.transport.health.store import BoundedStore

__all__ = [
    "ENDED_NORMALLY",
    "POLL_SECONDS",
    "Heartbeat",
    "Monitor",
    "Patience",
    "Place",
    "connect_to_store",
    "describe_elsewhere",
    "usual_patience",
]

_T = TypeVar("_T")

_PATIENCE_VARIABLE = "SHARDWISE_PATIENCE_SECONDS"
POLL_SECONDS = 1.0
# Shorter than on CPUs: between devices, no connection breaks when a process ends.
_DEVICE_SILENT_SECONDS = 8.0
ENDED_NORMALLY = "no exception, it ran fewer steps"
_MAX_TEXT = 500
_MEET_SECONDS = 0.01, 0.5  # between two looks of `Monitor.meet`: at first, and at most

_EXPLAIN_SECONDS = 0.05  # between two looks for a failure
_KNOW = "ranks that know the failure of epoch "

_log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait before they check each other."""

    poll_seconds: float = POLL_SECONDS  # between two looks during a wait
    beat_seconds: float = 2.0
    silent_seconds: float = 10.0  # also for a rank whose C code holds the GIL
    log_seconds: float = 15.0  # until a waiting rank logs it; then twice as long each time


def usual_patience(device: torch.device) -> Patience:
    """Return the defaults for ``device``, scaled by the environment variable."""
    usual = Patience()
    silent = _DEVICE_SILENT_SECONDS if is_accelerator(device) else usual.silent_seconds
    log = float(os.environ.get(_PATIENCE_VARIABLE, usual.log_seconds))
    return Patience(silent_seconds=silent * log / usual.log_seconds, log_seconds=log)


def connect_to_store() -> Store:
    """Return the job's store, through a new connection.

    Other waits on the store do not block the heartbeat then.
    """
    store: Store = default_store().clone()  # type: ignore[attr-defined]
    return store


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The status that a rank publishes every two seconds."""

    count: int
    report: Report
    # The `History.marks` of each queue of a device; exchanges on the host compare tags instead.
    marks: tuple[Mapping[tuple[int, ...], tuple[int, int]], ...] = ()


@dataclass(slots=True)
class Place:
    """Where this rank is in its program."""

    step: int = 0
    where: str = "before the first step"
    failed: int = -1  # the last epoch whose failure this rank knows


@dataclass(frozen=True, slots=True)
class _Silence:
    """A rank whose counter has not changed for too long."""

    rank: int
    beat: str  # its last heartbeat
    report: Report  # the error that waiting ranks raise


class Monitor:
    """The reports and heartbeats of the ranks of a group, in a store that all can read.

    Every method raises PeerLost if the process that holds the store does not answer.
    """

    def __init__(
        self,
        store: Store,
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
        self._store = bounded = BoundedStore(store, patience.silent_seconds)
        self._rank = rank
        self._size = size
        self._patience = patience
        self._prefix = prefix = f"shardwise/{name}/"
        self._reports = [f"{prefix}{other}" for other in range(size)]
        self._beats = [f"{prefix}heartbeat/{other}" for other in range(size)]
        self._histories = [f"{prefix}history/{other}" for other in range(size)]
        self._silent = f"{prefix}silent"
        self._place = place or Place()
        self._failure: Report | None = None  # the last one that this rank knows
        self._failed_epoch = -1  # the last one in which this rank announced a failure
        self._publishing = threading.RLock()
        self._stuck: tuple[Any, ...] | None = (
            None  # what this rank waits for, if it is counted as stuck
        )
        self._looks = 0  # of the last report
        self._next_verdict = 0  # the look at which this rank judges the reports; 0: it does not
        self._blocked: dict[int, int] = {}  # looks of ranks in a torch collective
        self._seen: tuple[bytes, float] | None = None  # last counter of the next rank, when new
        self._looked = 0.0  # when it was last read
        self._met = -1  # last epoch of `meet`
        bounded.set(self._beats[rank], "0")
        done = threading.Event()
        thread = threading.Thread(
            target=_beat,
            args=(bounded, self._beats[rank], done, patience.beat_seconds, on_beat),
            name="shardwise-heartbeat",
            daemon=True,
        )
        thread.start()
        owner = None if on_beat is None else getattr(on_beat(), "__self__", None)
        # Also when the interpreter exits.
        weakref.finalize(owner or self, _end, done, thread, bounded, self._beats[rank], place)
        if rank == 0 and owner is not None:  # its process may hold the store
            known = f"{prefix}{_KNOW}", size - 1, 2 * patience.beat_seconds
            weakref.finalize(owner, _tell, weakref.ref(owner), bounded, self._place, *known)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Publish ``heartbeat``, and look for a failure and at the next rank."""
        self._set(self._beats[self._rank], heartbeat)
        self.failure(heartbeat.report.epoch)
        self.watch()

    def publish(self, report: Report) -> None:
        """Publish ``report``, except after `announce` in the same epoch."""
        with self._publishing:
            if report.epoch == self._failed_epoch:
                return
            self._set(self._reports[self._rank], report)
            self._looks = report.looks
            stuck = (report.epoch, report.queues, report.blocked_with) if report.is_stuck else None
            if stuck == self._stuck:
                return
            key, before = f"stuck in epoch {report.epoch}", self._stuck
            self._stuck, self._next_verdict = stuck, 0
            if before is not None and before[0] == report.epoch:
                self._count(key, -1)
            if stuck is not None and self._count(key, 1) == self._size:
                self._next_verdict = report.looks

    def announce(self, failure: Report) -> Report:
        """Publish ``failure``; return the first one that any rank announced in its epoch.

        Ranks may detect the same loss at the same time, and must all raise the same error.
        """
        self._failed_epoch = epoch = failure.epoch
        if self._failure is not None and self._failure.epoch == epoch:
            return self._failure  # the store may be gone
        key, content = f"{self._prefix}failed in epoch {epoch}", encode(failure)
        first = self._store.set_if(key, "", content)
        found = self._note(first, epoch)
        if found is None:  # no rank of this job wrote it
            found = self._note(self._store.set_if(key, first, content), epoch)
        return found or failure

    def failure(self, epoch: int) -> Report | None:
        """Return the first failure that a rank has announced in ``epoch``."""
        if self._failure is not None and self._failure.epoch == epoch:
            return self._failure
        return self._note(self._store.peek(f"{self._prefix}failed in epoch {epoch}"), epoch)

    def _note(self, content: bytes, epoch: int) -> Report | None:
        failure = self._decode(Report, content)
        if failure is None or not failure.failure or failure.epoch != epoch:
            return None
        self._failure = failure
        if self._place.failed != epoch:
            self._place.failed = epoch
            self._count(f"{_KNOW}{epoch}", 1)
        return failure

    def check_reports(self, epoch: int) -> None:
        """Raise the failure of ``epoch``, or the error of `verdict` if this rank is to judge."""
        if (failure := self.failure(epoch)) is not None:
            raise failure.raised
        if not 0 < self._next_verdict <= self._looks:
            return
        reports = self.reports(epoch)
        error = verdict(reports, epoch)
        if error is None:
            self._blocked = {}
            self._next_verdict = 2 * self._looks
        elif self._is_confirmed(reports):
            raise error

    def reports(self, epoch: int) -> list[Report | None]:
        """Return the reports of all ranks, None for those without one in ``epoch``."""
        contents = self._store.read(self._reports)
        reports = [None if one is None else self._decode(Report, one) for one in contents]
        return [None if one is None or one.epoch != epoch else one for one in reports]

    def _is_confirmed(self, reports: Sequence[Report | None]) -> bool:
        """Whether the ranks in torch collectives have not moved since this rank got stuck."""
        before = self._blocked
        known = ((rank, report) for rank, report in enumerate(reports) if report is not None)
        blocked = {rank: report.looks for rank, report in known if report.blocked_with}
        if not before:
            self._blocked = blocked
        return all(before.get(rank, looks) < looks for rank, looks in blocked.items())

    def is_first(self, what: str) -> bool:
        """Whether this is the first call with ``what`` on any rank."""
        return self._count(what, 1) == 1

    def explain(self, error: PeerLost, epoch: int) -> PeerLost:
        """Add the positions of all ranks to ``error``, and that a rank has ended normally.

        If several ranks call this, the first one does it for all, and the others wait for it. A
        rank whose connection was closed lets the other one say why, if it can.
        """
        is_closed = isinstance(error.__cause__, ConnectionError)
        if self._awaits_failure(epoch, POLL_SECONDS if is_closed else 0.0) or (
            not self.is_first(f"explained in epoch {epoch}")
            and self._awaits_failure(epoch, self._patience.silent_seconds)
        ):
            return error  # `announce` returns the failure
        return type(error)(f"{self.ended_normally() or error}\n{self.table()}")

    def _awaits_failure(self, epoch: int, seconds: float) -> bool:
        """Whether a rank has announced a failure, or does so in the next ``seconds``."""
        until = time.monotonic() + seconds
        while self.failure(epoch) is None:
            if time.monotonic() >= until:
                return False
            time.sleep(_EXPLAIN_SECONDS)
        return True

    def check_heartbeats(self, where: str = "") -> None:
        """Check that no rank is silent. Call it regularly during a wait.

        Args:
            where: position of this rank, for the error.

        Raises:
            PeerSilent: names a rank whose counter has not changed for ``silent_seconds``.
        """
        if (silence := self._known_silence()) is not None:
            error = silence.report.raised
            if isinstance(error, PeerSilent):
                first, line, table = str(error).partition("\n")
                error = PeerSilent(f"{first}{where}{line}{table}")
            raise error

    def _known_silence(self) -> _Silence | None:
        """Return the silence that a rank has reported, if that of the same heartbeat goes on."""
        content = self._store.peek(self._silent)
        if not content:
            return None
        silence = self._decode(_Silence, content)
        if silence is not None and 0 <= silence.rank < self._size:
            counter = self._store.peek(self._beats[silence.rank])
            if counter.decode(errors="replace") == silence.beat:
                return silence
        self._store.set_if(self._silent, content, "")
        return None

    def watch(self) -> None:
        """Check that the counter of the next rank changes. Call it with every heartbeat."""
        other, now = (self._rank + 1) % self._size, time.monotonic()
        # A counter from before this process was stopped is too old.
        if now - self._looked > self._patience.silent_seconds / 2:
            self._seen = None
        self._looked = now
        counter = self._store.peek(self._beats[other])
        if not counter or other == self._rank:  # the rank has not started yet
            return
        if self._seen is None or counter != self._seen[0]:
            self._seen = counter, now
        elif (seconds := now - self._seen[1]) > self._patience.silent_seconds and (
            self._known_silence() is None
        ):
            report = self._silence(other, f"{seconds:.0f} s")
            silence = _Silence(other, counter.decode(errors="replace"), report)
            self._store.set_if(self._silent, "", encode(silence))

    def _silence(self, other: int, seconds: str) -> Report:
        """Describe the silent rank ``other``."""
        kind, text = PeerLost, self.ended_normally()
        if not text:
            kind, text = (
                PeerSilent,
                (
                    f"rank {self._rank} lost rank {other}: its process gave no sign of life for "
                    f"{seconds}; it is stopped (SIGSTOP, a debugger), its machine is "
                    "frozen or off the network, or a call into C holds Python's lock"
                ),
            )
        text += "\n" + self.table({other: f"no sign of life for {seconds}"})
        return Report(0, 0, 0, "", (), failure=kind.__name__, error=text)

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of ``rank``."""
        return self._get(Heartbeat, self._beats[rank])

    def ended_normally(self) -> str:
        """Describe the ranks that ended without an exception, and what to do; "" if none did."""
        ended = [
            f"rank {rank} ended normally after step {beat.report.step}"
            for rank, beat in self._heartbeats().items()
            if beat.report.error == ENDED_NORMALLY
        ]
        if not ended:
            return ""
        return (
            f"{', '.join(ended)}: it had fewer batches than the others. Give every rank as many "
            "batches: end all loops at the same step, or let the sampler pad or drop the rest "
            "(drop_last=True)"
        )

    def table(self, remarks: Mapping[int, str] = MappingProxyType({})) -> str:
        """Describe why ranks have ended, and where each was at its last heartbeat."""
        beats = self._heartbeats()
        ended = "".join(
            f"rank {rank} ended (it was last in step {beat.report.step}, {beat.report.where}): "
            f"{beat.report.error}\n"
            for rank, beat in beats.items()
            if beat.report.error
        )
        return ended + table({rank: beat.report for rank, beat in beats.items()}, remarks)

    def _heartbeats(self) -> dict[int, Heartbeat]:
        found = (self._message(Heartbeat, one) for one in self._store.read(self._beats))
        return {rank: beat for rank, beat in enumerate(found) if beat is not None}

    def swap_histories(self, rank: int, own: _T) -> _T | None:
        """Publish ``own``, a dataclass; return what ``rank`` has published, or None."""
        self._set(self._histories[self._rank], own)
        return self._get(type(own), self._histories[rank])

    def meet(self, report: Report) -> list[Report]:
        """Wait until all ranks have called this in the same epoch; return their reports.

        Raises:
            StepError: another process has overwritten a report.
        """
        keys = [f"{key}/epoch {report.epoch}" for key in self._reports]
        self._set(keys[self._rank], report)
        counter, pause = f"met in epoch {report.epoch}", _MEET_SECONDS[0]
        num_met = self._count(counter, int(self._met != report.epoch))
        self._met = report.epoch
        while num_met < self._size:
            time.sleep(pause)
            pause = min(2 * pause, _MEET_SECONDS[1])
            num_met = self._count(counter, 0)
        found = [self._message(Report, content) for content in self._store.read(keys)]
        reports = [one for one in found if one is not None]
        if len(reports) < len(keys) or len({len(one.queues) for one in reports}) > 1:
            raise StepError("the job's store has a report that no rank of this job wrote")
        return reports

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, encode(value))

    def _count(self, what: str, number: int) -> int:
        return self._store.add(f"{self._prefix}{what}", number)

    def _get(self, kind: type[_T], key: str) -> _T | None:
        return self._message(kind, self._store.read([key])[0])

    def _message(self, kind: type[_T], content: bytes | None) -> _T | None:
        """Return the message in ``content``, or None if there is none, or only a count."""
        return None if content is None or content.isdigit() else self._decode(kind, content)

    def _decode(self, kind: type[_T], content: bytes) -> _T | None:
        """Return a message, or None if no rank of this job can have written it."""
        try:
            message = decode(kind, content)
        except ValueError:
            return None
        report = message.report if isinstance(message, Heartbeat) else message
        is_foreign = isinstance(report, Report) and not report.fits(len(self._reports))
        return None if is_foreign else message


def describe_elsewhere(ranks: Sequence[int], beats: Mapping[int, Heartbeat | None]) -> str:
    """Describe the ``ranks`` that a rank waits for; ``beats`` are heartbeats of some of them."""
    if not ranks:
        return "; all ranks have begun it, so the network or a device is slow"
    text = ""
    for rank, beat in beats.items():
        text += f"; waits for rank {rank}, which "
        if beat is None:
            text += "has not begun"
            continue
        python = " < ".join(beat.report.python) or "unknown"
        text += f"is alive in step {beat.report.step}, {beat.report.where}, Python at {python}"
    return text if len(beats) == len(ranks) else f"{text}; and for {len(ranks) - len(beats)} more"


def _beat(
    store: BoundedStore,
    key: str,
    done: threading.Event,
    seconds: float,
    on_beat: "weakref.WeakMethod[Callable[[int], None]] | None",
) -> None:
    count, is_logged = 0, False
    while not done.wait(seconds):
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


def _end(
    done: threading.Event,
    thread: threading.Thread,
    store: BoundedStore,
    key: str,
    place: Place | None,
) -> None:
    done.set()
    # If Python exits while the thread is in a call of the store, C++ aborts the process.
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
    if place is not None:
        error = getattr(sys, "last_value", None)  # an exception that nothing caught
        text = ENDED_NORMALLY if error is None else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        last = Heartbeat(0, Report(0, 0, place.step, place.where, (), error=text))
        with contextlib.suppress(PeerLost):
            store.set(key, encode(last))


def _tell(
    owner: "weakref.ref[Any]",
    store: BoundedStore,
    place: Place,
    key: str,
    others: int,
    seconds: float,
) -> None:
    """Let the other ranks read a failure before the interpreter exits, and the store is gone.

    Of the others, one may be dead.
    """
    until = time.monotonic() + seconds
    if owner() is None or place.failed < 0:
        return
    with contextlib.suppress(PeerLost):
        while store.add(f"{key}{place.failed}", 0) < others and time.monotonic() < until:
            time.sleep(_MEET_SECONDS[0])
