"""Records the calls of units, so that a rank without batches can repeat those of another rank."""

import json
import zlib
from collections.abc import Iterator
from enum import IntEnum

from shardwise.errors import StepError
from shardwise.features.agreement import MODULUS, Exchange
from shardwise.runtime.observer import CallObserver
from shardwise.runtime.scheduler import Scheduler
from shardwise.schedule.passes import Call, Outcome, Pass

__all__ = ["CallRecorder", "Op"]

_BITS = 20  # of each number of an `Op` that is sent
_LOWEST = -(1 << 62)


class Op(IntEnum):
    """What happens in a forward or backward; a recording is a list of ``[op, first, second]``."""

    ENTER = 0  # a unit, by its index, begins a call
    LEAVE = 1  # a call ends, by the number of its ENTER, with an outcome
    REACH = 2  # backward reaches a call, by the age of its forward (0: recomputed) and its number
    BEGIN = 3  # a backward inside the backward
    END = 4  # of the forward or backward


_Ops = list[list[int]]


class CallRecorder(CallObserver):
    """Records the last forward and backward of each kind.

    Where nothing is recorded yet, as in a first step, ranks that compute tell the shadows each `Op`
    before they perform it.
    """

    def __init__(self, exchange: Exchange, scheduler: Scheduler) -> None:
        self.exchange = exchange
        self.scheduler = scheduler
        self.all_compute = True  # no rank is a shadow in the forward or backward that runs
        self._recordings: dict[str, _Ops] = {}  # by kind
        self._digest: int | None = None  # of the recordings; None: not computed yet
        self._passes: list[Pass] = []  # the forwards since the last step
        self._kind = ""  # of the forward or backward that is running
        self._is_told = False  # it is not recorded, so shadows are told
        self._is_in_backward = False  # it is a backward
        self._ops: _Ops = []
        self._recomputed: list[Call] = []  # in the backward that is running
        self._reached: set[Call] = set()  # by it

    @property
    def digest(self) -> int:
        """A number that is the same on ranks that have the same recordings."""
        if self._digest is None:
            self._digest = zlib.crc32(repr(sorted(self._recordings.items())).encode()) % MODULUS
        return self._digest

    def share_recordings(self, *, has_them: bool) -> None:
        """Give all ranks the recordings of the first rank that ``has_them``."""
        exchange = self.exchange
        is_candidate = has_them * (exchange.num_ranks - exchange.rank)
        is_sender = exchange.maxima([is_candidate]) == [exchange.num_ranks - exchange.rank]
        text = json.dumps(self._recordings).encode() if is_sender else b""
        [size] = exchange.maxima([len(text)])
        text = bytes(exchange.maxima(list(text or bytes(size))))
        self._recordings, self._digest = json.loads(text), None

    def begin_forward(self, unit: int, *, grad: bool) -> None:
        """All ranks begin an outermost forward, of ``unit``."""
        self._begin(f"forward of {unit}, {grad}")

    def begin_backward(self, first: Pass, age: int) -> None:
        """All ranks begin a backward, of the forward ``first``."""
        self._begin(f"backward of {first.calls[0].unit}, {age}")
        self._reached, self._recomputed, self._is_in_backward = set(), [], True

    def entered(self, call: Call) -> None:
        is_recomputed = call.forward_pass.recomputed
        if is_recomputed and not self._is_in_backward:  # so other ranks do not know of it
            raise StepError(
                "inside sw.join, checkpoint parts of the model, or pass use_reentrant=False: "
                "backward runs the whole model again before it reaches any unit"
            )
        self._note(Op.ENTER, call.unit)
        if is_recomputed:
            self._recomputed.append(call)

    def left(self, call: Call) -> None:
        this, outcome = call.forward_pass, call.outcome
        if outcome is Outcome.FAILED and not this.recomputed:  # torch ends recomputations so
            return
        calls = self._recomputed if this.recomputed else this.calls
        if call not in calls:  # `entered` raised
            return
        number = calls.index(call)
        self._note(Op.LEAVE, number, outcome.value)
        if this.recomputed or number:
            return
        self._end()
        if this.grad:
            self._passes.append(this)

    def reached(self, call: Call, *, is_first: bool) -> None:  # noqa: ARG002
        this = call.forward_pass
        age = 0 if this.recomputed else 1 + self._age_of(this)
        if call not in self._reached:
            number = (self._recomputed if this.recomputed else this.calls).index(call)
            self._note(Op.REACH, age, number)
            # The calls in between are visited with this one.
            self._reached.update(one for one in this.calls if one.exited >= call.exited)

    def began_inner_backward(self) -> None:
        self._note(Op.BEGIN)

    def ending_backward(self, *, is_inner: bool) -> None:
        if is_inner:
            self._note(Op.END)
        else:
            self._is_in_backward = False
            self._end()

    def _age_of(self, forward: Pass) -> int:
        """The number of forwards since this one.

        Raises:
            StepError: it is not of this step.
        """
        for age, one in enumerate(reversed(self._passes)):
            if one is forward:
                return age
        raise StepError(
            "inside sw.join, run each backward in the step of its forward, and both in the block"
        )

    def _begin(self, kind: str) -> None:
        self._kind, self._ops, self._is_in_backward = kind, [], False
        self._is_told = not self.all_compute and kind not in self._recordings

    def _end(self) -> None:
        self._note(Op.END)
        is_recorded = self._is_told or not self.is_shadow
        if is_recorded and self._recordings.get(self._kind) != self._ops:
            self._recordings[self._kind], self._digest = self._ops, None
        self._is_told = False

    def _note(self, op: Op, first: int = 0, second: int = 0) -> None:
        """Record an op, and tell it to the shadows if they must be told.

        Raises:
            StepError: shadows are about to perform another one.
        """
        self._ops.append([op, first, second])
        if self.is_shadow or self.all_compute:
            return
        if not self._is_told:
            number = len(self._ops) - 1
            if self._recordings[self._kind][number : number + 1] != self._ops[number:]:
                raise StepError(
                    "this forward or backward calls the units of the model in another order than "
                    "the last one did, which a rank without batches inside sw.join repeats; call "
                    "the same units in every step, or give all ranks as many batches"
                )
            return
        code = ((first << _BITS) + second) * len(Op) + op
        highest, negative = self.exchange.maxima([code, -code])
        if highest != -negative:
            raise StepError(
                "ranks call the units of the model in different orders, which a rank without "
                "batches inside sw.join cannot follow"
            )

    def ops(self) -> Iterator[list[int]]:
        """What a shadow repeats: as recorded, or as it is told."""
        if not self._is_told:
            yield from self._recordings[self._kind]
            return
        while True:
            code, _ = self.exchange.maxima([_LOWEST, _LOWEST])
            numbers, op = divmod(code, len(Op))
            yield [op, *divmod(numbers, 1 << _BITS)]
