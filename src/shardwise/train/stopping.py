"""Being asked to stop: a signal is noted, and the ranks agree on the step after which they do."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["StopRequest", "exit_code"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal sends Ctrl-C to all of its processes, and a launcher that gets it sends it to its ranks
# again: what comes so soon after the first is not yet a user who is out of patience.
SAME_SECONDS = 1.0


class StopRequest:
    """The first SIGINT or SIGTERM is noted; another one ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0  # the one that came; 0 is none
        self._came = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it signals are noted; only the main thread may, and in others nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._came = number, time.monotonic()
        elif time.monotonic() - self._came > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def exit_code(number: int) -> int:
    """What a process ends with that a signal has ended, as shells tell it."""
    return 128 + number
