"""The reports and heartbeats of other ranks, which a rank reads while it waits.

A busy rank (a long forward, a slow disk, a data loader that takes minutes) publishes no report, and
other ranks should go on waiting for it. A rank that was stopped (SIGSTOP, a frozen container, a
lost network) publishes none either, and its connections stay open. So every two seconds a thread
of each rank publishes a counter, and where Python is, in the job's store. A waiting rank reads the
counters of the others. It measures time with its own clock only.
"""

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from shardwise._private import default_store
from shardwise.errors import PeerLost, PeerSilent, StepError
from shardwise.transport.device import is_accelerator
from shardwise.transport.health.plain_data import decode, encode
from shardwise.transport.health.status import Report, table, verdict

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
_MEET_SECONDS = 0.01  # between two looks of `Monitor.meet`


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


def connect_to_store(patience: Patience) -> Store:
    """Return the job's store, through a new connection.

    Other waits on the store do not block the heartbeat then, and if the process that holds the
    store was stopped, calls end earlier than with the job's own timeout.
    """
    store: Store = default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=patience.silent_seconds))
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
        self._store = store
        self._rank = rank
        self._patience = patience
        self._reports = [f"shardwise/{name}/{other}" for other in range(size)]
        self._beats = [f"shardwise/{name}/heartbeat/{other}" for other in range(size)]
        self._failed = f"shardwise/{name}/failed in epoch "
        self._histories = [f"shardwise/{name}/history/{other}" for other in range(size)]
        self._seen: dict[int, tuple[bytes, float]] = {}  # last heartbeat, and when it was new
        self._blocked: dict[int, int] = {}  # looks of ranks in a torch collective
        self._looked = 0.0  # when the heartbeats were last read
        self._failed_epoch = -1  # the last one in which this rank announced a failure
        store.set(self._beats[rank], "0")
        done = threading.Event()
        thread = threading.Thread(
            target=_beat,
            args=(store, self._beats[rank], done, patience.beat_seconds, on_beat),
            name="shardwise-heartbeat",
            daemon=True,
        )
        thread.start()
        owner = None if on_beat is None else getattr(on_beat(), "__self__", None)
        # Also when the interpreter exits.
        weakref.finalize(owner or self, _end, done, thread, store, self._beats[rank], place)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Publish ``heartbeat``."""
        self._set(self._beats[self._rank], heartbeat)

    def publish(self, report: Report) -> None:
        """Publish ``report``, except after `announce` in the same epoch."""
        if report.epoch != self._failed_epoch:
            self._set(self._reports[self._rank], report)

    def announce(self, failure: Report) -> Report:
        """Publish ``failure``; return the first one that any rank announced in its epoch.

        Ranks may detect the same loss at the same time, and must all raise the same error.
        """
        self.publish(failure)
        self._failed_epoch = failure.epoch
        own = str(self._rank)
        with _store_errors():
            first = self._rank_in(
                self._store.compare_set(f"{self._failed}{failure.epoch}", "", own)
            )
        found = self._get(Report, self._reports[first])
        return found if found is not None and found.failure else failure

    def check_reports(self, epoch: int) -> Mapping[int, Report]:
        """Return the reports of this epoch by rank, or raise the error of `verdict`."""
        contents = self._read(self._reports)
        reports = [None if one is None else self._decode(Report, one) for one in contents]
        current = {rank: r for rank, r in enumerate(reports) if r is not None and r.epoch == epoch}
        error = verdict(reports, epoch)
        is_known = any(report.failure for report in current.values())
        if error is not None and (is_known or self._is_confirmed(current)):
            raise error
        if error is None:
            self._blocked = {}
        return current

    def _is_confirmed(self, reports: Mapping[int, Report]) -> bool:
        """Whether the ranks in torch collectives have not moved since this rank got stuck."""
        before = self._blocked
        blocked = {rank: report.looks for rank, report in reports.items() if report.blocked_with}
        if not before:
            self._blocked = blocked
        return all(before.get(rank, looks) < looks for rank, looks in blocked.items())

    def check_heartbeats(self, where: str = "") -> None:
        """Check that the counters of other ranks change. Call it regularly during a wait.

        Args:
            where: position of this rank, for the error.

        Raises:
            PeerSilent: names a rank whose counter has not changed for ``silent_seconds``.
        """
        now = time.monotonic()
        # Heartbeats from an earlier wait, or from before this process was stopped, are too old.
        if now - self._looked > 2 * self._patience.beat_seconds:
            self._seen.clear()
        self._looked = now
        for other, counter in enumerate(self._read(self._beats)):
            if counter is None or other == self._rank:  # None: the rank has not started yet
                continue
            last, since = self._seen.get(other, (b"", now))
            if counter != last:
                self._seen[other] = counter, now
            elif now - since > self._patience.silent_seconds:
                if ended := self.ended_normally():
                    raise PeerLost(f"{ended}\n{self.table()}")
                raise PeerSilent(
                    f"rank {self._rank} lost rank {other}: its process gave no sign of life for "
                    f"{now - since:.0f} s; it is stopped (SIGSTOP, a debugger), its machine is "
                    "frozen or off the network, or a call into C holds Python's lock"
                    f"{where}\n" + self.table({other: f"no sign of life for {now - since:.0f} s"})
                )

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of ``rank``."""
        return self._get(Heartbeat, self._beats[rank])

    def ended_normally(self) -> str:
        """Describe the ranks that ended without an exception, and what to do; "" if none did."""
        beats = {rank: self.heartbeat(rank) for rank in range(len(self._beats))}
        ended = [
            f"rank {rank} ended normally after step {beat.report.step}"
            for rank, beat in beats.items()
            if beat is not None and beat.report.error == ENDED_NORMALLY
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
        ranks = range(len(self._beats))
        beats = {rank: beat for rank in ranks if (beat := self.heartbeat(rank)) is not None}
        ended = "".join(
            f"rank {rank} ended (it was last in step {beat.report.step}, {beat.report.where}): "
            f"{beat.report.error}\n"
            for rank, beat in beats.items()
            if beat.report.error
        )
        return ended + table({rank: beat.report for rank, beat in beats.items()}, remarks)

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
        with _store_errors():
            while not self._store.check(keys):
                time.sleep(_MEET_SECONDS)
        found = [self._get(Report, key) for key in keys]
        reports = [one for one in found if one is not None]
        if len(reports) < len(keys) or len({len(one.queues) for one in reports}) > 1:
            raise StepError("the job's store has a report that no rank of this job wrote")
        return reports

    def _set(self, key: str, value: Any) -> None:
        with _store_errors():
            self._store.set(key, encode(value))

    def _get(self, kind: type[_T], key: str) -> _T | None:
        """Return the value at ``key``, or None if there is none, or only a count."""
        [content] = self._read([key])
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

    def _rank_in(self, content: bytes) -> int:
        """The rank that ``content`` is, or this rank if it is none."""
        ranks = {str(rank).encode(): rank for rank in range(len(self._reports))}
        return ranks.get(content, self._rank)

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        with _store_errors():
            return [self._store.get(key) if self._store.check([key]) else None for key in keys]


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


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the process that holds the job's store is gone: {error}") from error


def _beat(
    store: Store,
    key: str,
    done: threading.Event,
    seconds: float,
    on_beat: "weakref.WeakMethod[Callable[[int], None]] | None",
) -> None:
    count = 0
    with contextlib.suppress(RuntimeError):  # the store is gone, and so is the job
        while not done.wait(seconds):
            count += 1
            if on_beat is not None and (call := on_beat()) is not None:
                call(count)
                del call  # otherwise this thread would keep the object until the next beat
            else:
                store.set(key, str(count))


def _end(
    done: threading.Event, thread: threading.Thread, store: Store, key: str, place: Place | None
) -> None:
    done.set()
    # If Python exits while the thread is in a call of the store, C++ aborts the process.
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
    if place is not None:
        error = getattr(sys, "last_value", None)  # an exception that nothing caught
        text = ENDED_NORMALLY if error is None else f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        last = Heartbeat(0, Report(0, 0, place.step, place.where, (), error=text))
        with contextlib.suppress(RuntimeError):  # the store is gone
            store.set(key, encode(last))
