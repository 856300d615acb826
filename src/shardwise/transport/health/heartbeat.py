"""Signs of life, which tell a rank that is stopped from one that is busy.

A busy rank (a long forward, a slow disk, data that take minutes) posts no report, and that is
right: who waits for it goes on waiting. One that was stopped (SIGSTOP, a frozen container, a lost
network) posts none either, and its connections stay open. So a thread of every rank counts on in
the job's store every two seconds, and who waits looks at the others' counters. Only the waiting
rank's own clock is asked.
"""

import contextlib
import threading
import time
import weakref

from torch.distributed.distributed_c10d import Store

from shardwise.errors import PeerLost

__all__ = ["STOPPED_SECONDS", "Pulse"]

BEAT_SECONDS = 2.0
# A call into C that holds Python's lock for so long would be taken for a rank that is stopped.
STOPPED_SECONDS = 30.0


class Pulse:
    """This rank's sign of life, and what it has seen of the others'."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = store
        self._keys = {other: f"shardwise/{name}/pulse/{other}" for other in range(size)}
        own = self._keys.pop(rank)
        self._rank = rank
        self._seen: dict[int, tuple[bytes, float]] = {}  # a counter, and since when it is that
        self._looked = 0.0
        store.set(own, "0")
        done = threading.Event()
        thread = threading.Thread(
            target=_beat, args=(store, own, done), name="shardwise-pulse", daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, done, thread)  # also before the interpreter ends

    def check(self, patience_seconds: float | None = None) -> None:
        """Look at the others; to be called every now and then while waiting.

        Raises:
            PeerLost: the counter of a rank has been the same for so long, in this rank's sight; or
                the process that holds the store does not answer.
        """
        patience = STOPPED_SECONDS if patience_seconds is None else patience_seconds
        now = time.monotonic()
        # What was seen in an earlier wait, or before this rank was stopped itself, is too old.
        if now - self._looked > 2 * BEAT_SECONDS:
            self._seen.clear()
        self._looked = now
        for other, key in self._keys.items():
            counter = self._read(key)
            if counter is None:  # it has not come so far yet
                continue
            last, since = self._seen.get(other, (b"", now))
            if counter != last:
                self._seen[other] = counter, now
            elif now - since > patience:
                raise PeerLost(
                    f"rank {self._rank} lost rank {other}: its process gave no sign of life for "
                    f"{now - since:.0f} s; it is stopped (SIGSTOP, a debugger), its machine is "
                    "frozen or off the network, or a call into C holds Python's lock"
                )

    def _read(self, key: str) -> bytes | None:
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise PeerLost(f"the process that holds the job's store is gone: {error}") from error


def _beat(store: Store, key: str, done: threading.Event) -> None:
    count = 0
    with contextlib.suppress(RuntimeError):  # the store is gone, and so is the job
        while not done.wait(BEAT_SECONDS):
            count += 1
            store.set(key, str(count))


def _end(done: threading.Event, thread: threading.Thread) -> None:
    done.set()
    # In a call of the store's when Python ends, it would be ended in a way that C++ aborts at.
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
