"""The signals after which a run saves a checkpoint and stops."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["STOP_SIGNALS", "StopSignal"]

# Job schedulers can send SIGUSR1 before the end of a job (`sbatch --signal=USR1@300`).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A terminal sends Ctrl-C to all of its processes, and a launcher forwards it to its ranks, so a
# second signal within this time belongs to the same request. A busy machine may delay a launcher.
SAME_SIGNAL_SECONDS = 5.0


class StopSignal:
    """Records the first of `STOP_SIGNALS` to arrive; a later one ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # number of the signal; 0 if none has arrived
        self._time = 0.0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the block; no effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
