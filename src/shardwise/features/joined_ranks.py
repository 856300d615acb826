"""How ranks with unequal numbers of batches stay in step; `sw.join` builds on it.

Before each outermost forward all ranks exchange one row of numbers, which says what each of them
is about to do. A rank that has nothing to compute is a *shadow*: it repeats the recorded calls of a
forward and a backward without computing, so that the scheduler launches the collectives that the
other ranks launch, with zeros for gradients.

A rank that computes announces its forwards, and all that needs the other ranks while some of them
are shadows::

    all ranks compute       forward                  backward          clip         step
                            ^ exchange
    some are shadows        forward                  backward          clip         step
                            ^ exchange               ^ exchange        ^ exchange   ^ exchange

A rank whose next forward is the last of a step waits until those of all ranks are: until then it
is a shadow, too. So gradients are reduced once, with those of all micro-batches of all ranks.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.errors import StepError, ranges
from shardwise.features.agreement import (
    FORWARDS,
    MAY_WAIT,
    NAMES,
    SHARES,
    Action,
    Exchange,
    Row,
    are_equal,
    pack,
    unpack,
    with_square,
)
from shardwise.features.recorded_calls import CallRecorder, Op
from shardwise.runtime import hooks
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.engine import Runtime
from shardwise.schedule.passes import Call, Outcome
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import sharding_of

__all__ = ["JOINED", "Agreement", "JoinedRanks"]

JOINED = "_shardwise_joined"  # set on the parameters of a model inside `sw.join`
_REDUCES_FULLY = 3  # a mode
_REFUSAL = (
    "inside sw.join, ranks without batches do not know of this operation, which needs all ranks; "
    "clip with sw.clip_grad_norm_, do without a GradScaler, and gather, save or compute norms "
    "after the block"
)


@dataclass(frozen=True)
class Agreement:
    """What the ranks do next."""

    action: Action
    value: int  # which one
    num_computing: int  # ranks that have computed in this step, or are about to
    total: float  # of the amounts of all ranks
    shared: list[float]  # by the first of the ranks that do it


class JoinedRanks(CallRecorder):
    """One rank among those that run a model inside `sw.join`."""

    def __init__(
        self,
        runtime: Runtime,
        parameters: Sequence[Tensor],
        *,
        training: bool,
        iterating: str | None = None,  # a module whose buffers change in each forward
    ) -> None:
        super().__init__(Exchange(runtime), runtime.scheduler)
        self._parameters = parameters  # of the model
        self._training = training
        self._iterating = iterating
        self.num_exchanges = 0
        self.last_step = 0  # the last one in which this rank has computed
        # What a shadow does for an `Action` other than a forward and a backward.
        self.shadows: dict[Action, Callable[[Agreement], None]] = {}
        # The options of optimizers that step, and what takes over those of another rank.
        self.options: Callable[[], list[float]] = list
        self.take_options: Callable[[Sequence[float]], None] | None = None
        self._num_steps = 0
        self._stepped = set[int]()  # ids of parameters, since the last backward
        self._steps_next = False  # the last backward has stepped, with steps in backward
        # A gradient of this step, which may have begun before the block.
        self._has_computed = any(
            not one.accumulated.is_empty for one in runtime.scheduler.gradients
        )
        self._versions: list[int] = []  # of gradients, when an optimizer stepped last
        # The gradients that shadows have, too, and their versions, by the id of the parameter.
        self._complete: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._computed_last: bool | None = None  # the last forward; None: there was none

    def open(self) -> None:
        """Begin the block, which ends in `close`."""
        self.exchange.open()
        self.refuse_others()

    # -- ranks that compute ----------------------------------------------------------------------

    def announce(
        self, action: Action, value: int = 0, amount: float = 0.0, shared: Sequence[float] = ()
    ) -> Agreement:
        """Return when all ranks that compute do this; until then, follow the others as a shadow.

        Args:
            action: what this rank does next.
            value: which one; the same on all ranks that do it.
            amount: is summed over all ranks.
            shared: what shadows need to do it, too; only while there are some.

        Raises:
            StepError: the ranks do different things.
        """
        while True:
            agreed = self._agree(action, value, amount, shared)
            if agreed.action is action:
                return agreed
            self._follow(agreed)

    def leave(self) -> None:
        """Return when all ranks have left their loops."""
        self.announce(Action.LEAVE)
        if not self.all_compute:
            states = self.share(self._gradient_states(), 1 if self._computed_last else 0)
            self._drop_gradients_like(states)

    def check_unchanged(self, parameters: Iterable[Tensor]) -> None:
        """Raise a StepError if a gradient was changed where shadows do not follow."""
        for parameter in parameters:
            gradient, known = parameter.grad, self._complete.get(id(parameter))
            if known is None or (known[0]() is gradient and known[1] == _version(gradient)):
                continue
            sharding = sharding_of(parameter)
            raise StepError(
                f"the gradient of {sharding.name if sharding else 'a parameter'} was changed "
                "between backward and optimizer.step() inside sw.join, where ranks without batches "
                "do not follow; clip with sw.clip_grad_norm_, and make other changes in "
                "register_post_accumulate_grad_hook, which runs on all ranks"
            )

    def note_complete(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of ``parameters`` are the same on all ranks, shadows included."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not is_unreduced(gradient):
                self._complete[id(parameter)] = weakref.ref(gradient), _version(gradient)

    def forget_complete(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of ``parameters`` may change: an optimizer has stepped with them."""
        for parameter in parameters:
            self._complete.pop(id(parameter), None)

    def ended_backward(self) -> None:
        self._complete.clear()
        if not (self.all_compute or self.is_shadow):
            self.note_complete(self._parameters)

    def note_step(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer steps ``parameters``, on all ranks."""
        self._num_steps += 1
        self._stepped.update(map(id, parameters))
        self._versions = self._versions_now()
        if self._computed_last:
            self.last_step = self._num_steps
        self._has_computed = False
        self._passes.clear()

    @contextlib.contextmanager
    def clipping(
        self, parameters: Sequence[Tensor], max_norm: float, order: float, *, checks: bool
    ) -> Iterator[None]:
        """All ranks that compute clip the gradients of ``parameters``, which are of the model.

        ``checks``: the ranks look for gradients that are not finite.
        """
        if not (self.is_shadow or self.all_compute):
            self._announce_clip(parameters, max_norm, order, checks=checks)
        self.refuse_others(refuses=False)
        try:
            yield
        finally:
            self.refuse_others()
        if not (self.is_shadow or self.all_compute):
            self.note_complete(parameters)

    def _announce_clip(
        self, parameters: Sequence[Tensor], max_norm: float, order: float, *, checks: bool
    ) -> None:
        clipped = {id(parameter) for parameter in parameters}
        if not clipped <= {id(parameter) for parameter in self._parameters}:
            raise StepError(
                "sw.clip_grad_norm_ inside sw.join, with a parameter that is not of the model: "
                "ranks without batches have no gradient for it; clip it by a call of its own"
            )
        self.check_unchanged(parameters)
        flags = [checks, *(id(one) in clipped for one in self._parameters)]
        self.announce(Action.CLIP, shared=[max_norm, order, *flags])

    def before_forward(self, unit: int) -> None:
        if self.is_shadow:
            return
        grad, settings = torch.is_grad_enabled(), [one.settings for one in self.scheduler.units]
        is_last = not grad or all(one.reduces_fully for one in settings)
        action = Action.FORWARD if is_last else Action.ACCUMULATE
        agreed = self.announce(action, (unit * 2 + grad) * 4 + self._mode)
        if grad:
            self._computed_last = True
            self._set_num_computing(agreed.num_computing)
        self.begin_forward(unit, grad=grad)

    def reached(self, call: Call, *, is_first: bool) -> None:
        if is_first and not self.is_shadow:
            if not self._training:
                raise StepError(
                    "a backward inside sw.join(model, training=False); pass the optimizers "
                    "instead, as in sw.join(model, optimizer)"
                )
            age, mode = self._age_of(call.forward_pass), self._mode
            shared: list[float] = []
            if not self.all_compute:
                self.check_unchanged(one for one in self._parameters if one.grad is not None)
                self._check_kept()
                options = self.options() if self.scheduler.sequencer.steps_in_backward else []
                shared = [*self._gradient_states(), *options]
                shared = self.announce(Action.BACKWARD, age * 4 + mode, shared=shared).shared
            self._has_computed = True
            self.begin_backward(call.forward_pass, age)
            self._note_mode(mode, shared)
        super().reached(call, is_first=is_first)

    # -- agreements ------------------------------------------------------------------------------

    def refuse_others(self, *, refuses: bool = True) -> None:
        """Refuse operations that need all ranks, of which shadows would not know."""
        self.exchange.refuse_others(_REFUSAL if refuses and not self.is_shadow else "")

    def share(self, values: Sequence[float], priority: float) -> list[float]:
        """The ``values`` of the first rank with the highest ``priority``. All ranks call this."""
        self.refuse_others(refuses=False)
        _, *found = max(self.exchange.rows([priority, *values]), key=lambda row: row[0])
        self.refuse_others()
        return found

    def _agree(
        self, action: Action, value: int, amount: float, shared: Sequence[float]
    ) -> Agreement:
        """Exchange what each rank does next."""
        is_backward, n = action is Action.BACKWARD, self.exchange.num_ranks
        if self._steps_next and not is_backward:
            self._steps_next = False
            self.note_step(self._parameters)
        computes = self._has_computed or action in (*FORWARDS, Action.COUNT_TOKENS)
        row = Row(num_computing=float(computes), amount=amount)
        row.num[action], row.values[action], row.squares[action] = 1.0, float(value), value**2
        row.steps = with_square(self._num_steps)
        row.recordings = with_square(self.digest)
        if not self.all_compute:
            row.packed = pack(shared, self._max_shared)
        if not is_backward:
            self.scheduler.recover()
        self.scheduler.report("sw.join")
        self.exchange.refuse_others("")
        self.num_exchanges += 1
        total = self.exchange.sum(row)
        first = next(one for one in Action if total.num[one])
        num = int(total.num[first])
        self._check(action, value, first, total)
        if first in FORWARDS or num < n:
            self.all_compute = num == n
        if num < n and not are_equal(n, *total.recordings):
            self.share_recordings(has_them=action is first)
        found = self._shared(action, first, shared, total) if first in SHARES else []
        self.refuse_others()
        value = round(total.values[first] / num)
        return Agreement(first, value, int(total.num_computing), total.amount, found)

    def _shared(
        self, own: Action, first: Action, shared: Sequence[float], total: Row
    ) -> list[float]:
        """What the first of the ranks that do ``first`` shares."""
        found = unpack(total.packed, int(total.num[first]))
        if found is None:  # a rank that waits shares something else, or the ranks differ
            values = [*shared, *[0.0] * (self._max_shared - len(shared))]
            found = self.share(values, 1 if own is first else 0)
        return found

    def _check(self, own: Action, value: int, first: Action, total: Row) -> None:
        """Raise a StepError on all ranks if they do not run the same program."""
        waiting = {action for action in Action if total.num[action]} - {first}
        is_same = are_equal(total.num[first], total.values[first], total.squares[first])
        if is_same and are_equal(self.exchange.num_ranks, *total.steps) and waiting <= MAY_WAIT:
            return
        ranks_at: dict[str, list[int]] = {}
        for rank, row in enumerate(self.exchange.rows([own, value, self._num_steps])):
            action, which, steps = map(int, row)
            text = f"{self._name(Action(action), which)} after {steps} steps"
            ranks_at.setdefault(text, []).append(rank)
        texts = [
            f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}: {text}"
            for text, ranks in ranks_at.items()
        ]
        raise StepError(
            f"the ranks do different things inside sw.join: {'; '.join(texts)}. All ranks must run "
            "the same loop, each until its batches end. If steps have different numbers of "
            "micro-batches, call set_requires_gradient_sync(True) before the last one of a step "
            "and False before the others, or use sw.backward; and run as many forwards without "
            "gradients on all ranks"
        )

    def _name(self, action: Action, value: int) -> str:
        """What a rank does, in words."""
        if action not in FORWARDS:
            return NAMES[action]
        label = self.scheduler.units[value // 8].plan.label
        kind = "with" if value // 4 % 2 else "without"
        last = " of a micro-batch before the last one" if action is Action.ACCUMULATE else ""
        return f"{NAMES[action]} of {label}{last} {kind} gradients"

    def _gradient_states(self) -> list[float]:
        """For each parameter: -1 without a gradient, 1 if the gradient was set to zero, or 0."""
        own, has_stepped = self._versions_now(), bool(self._stepped)
        pairs = zip(own, self._versions or own, strict=True)
        return [-1.0 if now < 0 else float(has_stepped and now != old) for now, old in pairs]

    def _check_kept(self) -> None:
        """Raise a StepError if gradients of the last step may have been set to zero unnoticed.

        torch's foreach functions do not count their changes of DTensors.
        """
        if not self._stepped:
            return
        for one, now, before in zip(
            self.scheduler.parameters, self._versions_now(), self._versions, strict=True
        ):
            gradient = one.sharded.grad
            is_plain = isinstance(gradient, DTensor) and not isinstance(gradient, ShardedTensor)
            has_stepped = id(one.sharded) in self._stepped
            if has_stepped and is_plain and not is_unreduced(gradient) and now == before:
                raise StepError(
                    f"the gradient of {one.name} may have been set to zero after the last step, "
                    "which ranks without batches inside sw.join cannot see with "
                    "granularity='dim'; call zero_grad() with set_to_none=True"
                )

    def _drop_gradients_like(self, states: Sequence[float]) -> None:
        """Drop the gradients of a shadow that computing ranks have dropped or set to zero."""
        if self._computed_last is not False:
            return
        for parameter, state in zip(self.scheduler.parameters, states, strict=False):
            if state < 0:
                parameter.sharded.grad = None
            elif state > 0 and parameter.sharded.grad is not None:
                parameter.sharded.grad.zero_()

    @cached_property
    def _max_shared(self) -> int:
        """The number of values that ranks share at once."""
        flags = len(self.scheduler.parameters) + len(self.options())
        return max(flags, 3 + len(self._parameters))

    def _versions_now(self) -> list[int]:
        """The versions of all gradients; see `_version`."""
        return [_version(one.sharded.grad) for one in self.scheduler.parameters]

    # -- shadows ---------------------------------------------------------------------------------

    def clipped(self, agreed: Agreement) -> tuple[list[Tensor], float, float, bool]:
        """What the ranks that compute pass to `clipping`."""
        max_norm, order, checks, *flags = agreed.shared
        pairs = zip(self._parameters, flags, strict=False)
        return [parameter for parameter, flag in pairs if flag], max_norm, order, bool(checks)

    def _follow(self, agreed: Agreement) -> None:
        """Take part in what other ranks compute."""
        self.is_shadow = True
        self.refuse_others(refuses=False)
        try:
            if agreed.action in FORWARDS:
                self._follow_forward(agreed)
            elif agreed.action is Action.BACKWARD:
                self._follow_backward(agreed)
            elif agreed.action in self.shadows:
                self.shadows[agreed.action](agreed)
        finally:
            self.is_shadow = False

    def _follow_forward(self, agreed: Agreement) -> None:
        unit, grad = agreed.value // 8, bool(agreed.value // 4 % 2)
        if grad and self._iterating is not None:
            raise StepError(
                f"each forward changes buffers of {self._iterating} (such as those of "
                "spectral_norm), but a rank without batches inside sw.join runs none, so ranks "
                "would compute with different weights; give all ranks as many batches"
            )
        if grad:
            self._computed_last = False
            self._set_num_computing(agreed.num_computing)
        self.begin_forward(unit, grad=grad)
        calls: list[Call] = []
        with torch.set_grad_enabled(grad), self._in_mode(agreed.value % 4):
            try:
                for op, first, second in self.ops():
                    if op == Op.END:
                        break
                    self._repeat(op, first, second, calls)
            except BaseException as error:
                for call in reversed(calls):
                    if call.exited < 0:
                        self.scheduler.leave(call, Outcome.FAILED, error)
                raise

    def _follow_backward(self, agreed: Agreement) -> None:
        age, mode = divmod(agreed.value, 4)
        passes = list(reversed(self._passes))
        self._drop_gradients_like(agreed.shared)
        self.begin_backward(passes[age], age)
        self._note_mode(mode, agreed.shared)
        ops, recomputed = self.ops(), list[Call]()

        def run() -> None:
            self.scheduler.enter_backward(hooks.current_task())
            for op, first, second in ops:
                match op:
                    case Op.END:
                        return
                    case Op.BEGIN:
                        _run_in_backward(run)
                    case Op.REACH:
                        calls = passes[first - 1].calls if first else recomputed
                        self.scheduler.before_backward(calls[second])
                    case _:
                        with torch.enable_grad():
                            self._repeat(op, first, second, recomputed, in_backward=True)

        with self._in_mode(mode):
            _run_in_backward(run)

    def _repeat(
        self, op: int, first: int, second: int, calls: list[Call], *, in_backward: bool = False
    ) -> None:
        """Begin or end a call."""
        if op == Op.LEAVE:
            self.scheduler.leave(calls[first], Outcome(second))
            return
        call = self.scheduler.enter(first, recomputed=in_backward)
        assert call is not None, "not inside `gathered`"
        calls.append(call)

    # -- settings of the units -------------------------------------------------------------------

    @property
    def _mode(self) -> int:
        """Which reductions the end of a backward launches, as a number below 4.

        Raises:
            StepError: it differs between units.
        """
        settings = [unit.settings for unit in self.scheduler.units]
        modes = {one.reduce_grads + 2 * one.all_reduce_grads for one in settings}
        if len(modes) > 1:
            raise StepError(
                "inside sw.join, call set_requires_gradient_sync and set_requires_all_reduce on "
                "the whole model: a rank without batches reduces all units or none"
            )
        return modes.pop()

    def _note_mode(self, mode: int, shared: Sequence[float]) -> None:
        """A backward begins that reduces what a ``mode`` says; ``shared``: if there are shadows."""
        self._stepped.clear()
        self._steps_next = self.scheduler.sequencer.steps_in_backward and mode == _REDUCES_FULLY
        if self._steps_next and shared and self.take_options is not None:
            self.take_options(shared[len(self.scheduler.parameters) :])

    def _in_mode(self, mode: int) -> contextlib.AbstractContextManager[None]:
        return self.scheduler.reducing(in_row=bool(mode & 1), in_column=bool(mode & 2))

    def _set_num_computing(self, number: int) -> None:
        is_part = number < self.exchange.num_ranks
        for settings in (unit.settings for unit in self.scheduler.units):
            # The user's own divisor is not the number of ranks.
            settings.num_computing = number if is_part and not settings.gradient_divisor else None

    def abandon(self, error: BaseException) -> None:
        """End the block after ``error``, on this rank or another one."""
        self.scheduler.abandon(error)
        if self._computed_last is False and self._stepped:
            for parameter in self.scheduler.parameters:
                parameter.sharded.grad = None  # the ranks that compute may have done so since

    def close(self) -> None:
        """Undo what was set for the model."""
        self.exchange.close()
        self._set_num_computing(self.exchange.num_ranks)
        self.shadows, self.options, self.take_options = {}, list, None  # they refer to this object


def _version(gradient: Tensor | None) -> int:
    """-1 for None, and 0 for a gradient that is not reduced yet."""
    return -1 if gradient is None else 0 if is_unreduced(gradient) else gradient._version


def _run_in_backward(run: Callable[[], None]) -> None:
    """Call ``run`` inside a graph task of autograd, as the scheduler expects it."""
    with torch.enable_grad():
        end = torch.zeros((), device="cpu", requires_grad=True).clone()
        assert end.grad_fn is not None
        hooks.before_node(end.grad_fn, run)
        end.backward()  # type: ignore[no-untyped-call]
