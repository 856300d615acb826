"""What a rank that waits looks at: the reports and the heartbeats of the others.

A busy rank (a long forward, a slow disk, data that take minutes) publishes no report, and the ranks
that wait for it are right to go on waiting. A rank that was stopped (SIGSTOP, a frozen container, a
lost network) publishes none either, and its connections stay open. So a thread of every rank counts
in the job's store every two seconds, and a rank that waits looks at the others' counters. It goes
by its own clock alone.
"""

import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from shardwise.errors import PeerLost, PeerSilent
from shardwise.transport.health.status import Report, verdict

__all__ = ["POLL_SECONDS", "Monitor", "Patience"]

POLL_SECONDS = 1.0
_MEET_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait before they look after each other."""

    poll_seconds: float = POLL_SECONDS  # between two looks at a wait
    beat_seconds: float = 2.0
    # A call into C that holds Python's lock for so long is taken for a rank that is stopped.
    silent_seconds: float = 30.0


class Monitor:
    """The reports and heartbeats of one group's ranks, in a store that all of them can read.

    Every method raises a PeerLost if the process that holds the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        patience: Patience,
        on_beat: "weakref.WeakMethod[Callable[[], None]] | None" = None,
    ) -> None:
        """Start the heartbeat, whose thread calls ``on_beat`` for as long as its object exists."""
        self._store = store
        self._rank = rank
        self._patience = patience
        self._reports = [f"shardwise/{name}/{other}" for other in range(size)]
        self._beats = [f"shardwise/{name}/heartbeat/{other}" for other in range(size)]
        self._seen: dict[int, tuple[bytes, float]] = {}  # a counter, and since when it is that
        self._looked = 0.0
        store.set(self._beats[rank], "0")
        done = threading.Event()
        thread = threading.Thread(
            target=_beat,
            args=(store, self._beats[rank], done, patience.beat_seconds, on_beat),
            name="shardwise-heartbeat",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, _end, done, thread)  # also before the interpreter ends

    def publish(self, report: Report) -> None:
        """Show ``report`` to the others."""
        self._set(self._reports[self._rank], report)

    def check_reports(self, epoch: int) -> None:
        """Raise the error of `verdict`, if there is one."""
        contents = self._read(self._reports)
        error = verdict([None if one is None else pickle.loads(one) for one in contents], epoch)
        if error is not None:
            raise error

    def check_heartbeats(self, where: str = "") -> None:
        """Look at the others; to be called every now and then while waiting.

        Args:
            where: this rank is; for the error.

        Raises:
            PeerSilent: names a rank whose counter has stayed the same for ``silent_seconds`` of
                looking.
        """
        now = time.monotonic()
        # What was seen in an earlier wait, or before this rank was stopped itself, is too old.
        if now - self._looked > 2 * self._patience.beat_seconds:
            self._seen.clear()
        self._looked = now
        for other, counter in enumerate(self._read(self._beats)):
            if counter is None or other == self._rank:  # None: it has not come so far yet
                continue
            last, since = self._seen.get(other, (b"", now))
            if counter != last:
                self._seen[other] = counter, now
            elif now - since > self._patience.silent_seconds:
                raise PeerSilent(
                    f"rank {self._rank} lost rank {other}: its process gave no sign of life for "
                    f"{now - since:.0f} s; it is stopped (SIGSTOP, a debugger), its machine is "
                    "frozen or off the network, or a call into C holds Python's lock"
                    f"{where}"
                )

    def meet(self, report: Report) -> list[Report]:
        """Wait for all ranks to call this in the same epoch; the report of each."""
        keys = [f"{key}/epoch {report.epoch}" for key in self._reports]
        self._set(keys[self._rank], report)
        with _store_errors():
            while not self._store.check(keys):
                time.sleep(_MEET_SECONDS)
            return [pickle.loads(self._store.get(key)) for key in keys]

    def _set(self, key: str, report: Report) -> None:
        with _store_errors():
            self._store.set(key, pickle.dumps(report))  # type: ignore[arg-type] # bytes do

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        with _store_errors():
            return [self._store.get(key) if self._store.check([key]) else None for key in keys]


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
    on_beat: "weakref.WeakMethod[Callable[[], None]] | None",
) -> None:
    count = 0
    with contextlib.suppress(RuntimeError):  # the store is gone, and so is the job
        while not done.wait(seconds):
            count += 1
            store.set(key, str(count))
            if on_beat is not None and (call := on_beat()) is not None:
                call()
                del call  # or this thread would keep the object until the next beat


def _end(done: threading.Event, thread: threading.Thread) -> None:
    done.set()
    # In a call of the store's when Python ends, it would be ended in a way that C++ aborts at.
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
