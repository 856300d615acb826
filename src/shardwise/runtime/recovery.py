"""After an exception: units back to shards, and memory kept for what other ranks still write."""

import time
from collections.abc import Sequence

from shardwise.errors import StepError
from shardwise.runtime.unit import Unit
from shardwise.transport.communicator import POLL_SECONDS

__all__ = ["Recovery"]


class Recovery:
    """Units and exchanges whose communication an exception has left in flight."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._in_flight: list[Unit] = []
        self._exchanges: list[object] = []

    def reset_units(self, error: BaseException, exchanges: Sequence[object]) -> None:
        """Go back to shards; what is in flight has to wait for `finish`."""
        self._exchanges += exchanges
        # What all ranks launched ends in a moment; what only some did never will.
        patience = 0.0 if isinstance(error, StepError) else POLL_SECONDS
        until = time.monotonic() + patience
        for unit in self._units:
            if unit in self._in_flight:
                continue
            if unit.quiesce(max(0.0, until - time.monotonic())):
                unit.reset()
            else:
                unit.use_sharded()
                self._in_flight.append(unit)

    def finish(self) -> None:
        """The ranks are back in step, so everything in flight ends."""
        for unit in self._in_flight:
            unit.quiesce(POLL_SECONDS)
            unit.reset()
        self._in_flight = []
        self._exchanges = []
