"""Carries out the schedule: asks the sequencer what must follow, does it, and writes it down."""

import contextlib
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from shardwise.errors import StepError
from shardwise.plan.plan import Plan
from shardwise.runtime.attach import check_same_sums
from shardwise.runtime.gradients import GradientBuffer
from shardwise.runtime.ledger import Ledger, Record
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.stepping import Stepper
from shardwise.runtime.unit import Unit
from shardwise.runtime.unused import Agreement, Unused, check_all_used, launch_agreement
from shardwise.runtime.write_back import ADVICE, collect_changes
from shardwise.schedule.events import Event, EventKind
from shardwise.schedule.sequencer import Call, Outcome, Sequencer
from shardwise.transport.api import Work
from shardwise.transport.communicator import POLL_SECONDS, Communicator, communicator

__all__ = ["Scheduler"]


class Scheduler:
    """Runs the units of one root module in step with forward and backward."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        axis: DataParallelMesh,
        device: torch.device,
        unused: Unused,
    ) -> None:
        self.ledger = Ledger()
        self._sequencer = Sequencer(plan)
        self.units = tuple(units)
        self._with_copies = [
            unit for unit in units if unit.plan.device_copy_bytes
        ]  # of their shards
        self._by_label = {unit.plan.label: unit for unit in units}
        self._axis = axis
        self._device = device
        self.unused: Unused = unused
        self._depth = 0
        self._tasks: set[int] = set()  # autograd graph tasks under way
        self._condemned: list[Unit] = []  # an exception left communication of theirs behind
        self._agreement: Agreement | None = None  # under way
        self._orphans: list[Agreement] = []  # that were under way when a step failed
        self._is_held = False
        self._is_broken = False  # an event failed, so units are not where the sequencer has them
        self._landing: Unit | None = None
        self._hidden: dict[int, Call] = {}
        self._is_in_transaction = False
        self._stepper: Stepper | None = None

    @cached_property
    def _links(self) -> Communicator:
        """Made on first use, which all ranks reach together."""
        return communicator(self._axis.world, self._device)

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward is under way."""
        return self._depth == 0 and not self._tasks

    @property
    def is_held(self) -> bool:
        """Whether `hold` keeps everything gathered."""
        return self._is_held

    # -- forward ---------------------------------------------------------------------------------

    def enter(self, index: int, *, recomputed: bool) -> Call | None:
        """Make a unit ready to compute; None while `hold` keeps everything gathered."""
        if self._is_held:
            return None
        if self.is_idle:
            self.recover()
            for unit in self._with_copies:
                unit.expect_changes()
            self._notice_changes()
            self.ledger.begin_forward()
        if self._is_broken:
            raise StepError("this step has failed already; let its exception leave the model")
        self._note(f"forward of {self.units[index].plan.label}")
        if not recomputed:
            self._links.recent_units.append(self.ledger.step, self.units[index].plan.label)
        grad = torch.is_grad_enabled()
        call, events = self._sequencer.enter(index, grad=grad, recomputed=recomputed)
        self._depth += 1
        try:
            self._perform(events)
            self.units[index].expose()
        except BaseException as error:
            self.leave(call, Outcome.FAILED, error)
            raise
        return call

    def leave(self, call: Call, outcome: Outcome, error: BaseException | None = None) -> None:
        """A unit has computed, or raised ``error``."""
        self._depth -= 1
        events = self._sequencer.exit(call, outcome)
        if outcome is Outcome.HIDDEN:
            self._hidden[call.unit] = call
        if error is not None and self.is_idle:
            self._fail(error)
            return
        try:
            self._perform(events)
        except BaseException as failure:
            if self.is_idle:
                self._fail(failure)
            raise
        if self.is_idle:
            self.ledger.end_forward(awaits_backward=call.of.differentiable)
        if not self._sequencer.is_in_use(call.unit):
            self.units[call.unit].conceal()

    # -- backward --------------------------------------------------------------------------------

    def before_backward(self, call: Call, task: int) -> None:
        """Make a unit ready for its backward."""
        self._note(f"backward of {self.units[call.unit].plan.label}")
        self._perform(self._sequencer.before_backward(call, task))

    def join_backward(self, task: int) -> None:
        """Graph task ``task`` has come to something of this model, perhaps to recompute it."""
        if self.is_idle:
            self._notice_changes()
        self._tasks.add(task)
        self._sequencer.join_backward(task)

    def is_walking(self, task: int) -> bool:
        """Whether graph task ``task`` has come to something of this model."""
        return task in self._tasks

    def hidden_call(self, index: int) -> Call | None:
        """A call that backward cannot be seen to reach but by the gradients that it yields."""
        return None if self.units[index].expects_gradients else self._hidden.get(index)

    def finish_backward(self, task: int) -> None:
        """Autograd has run the last node of a graph task."""
        self._tasks.discard(task)
        self._note("end of backward")
        if self._tasks:
            self._perform(self._sequencer.finish_backward(task))
            return
        events = self._sequencer.finish_backward(task)
        if self._stepper is not None:
            self._perform(events)
            self._land()
            self._finish_steps(self._stepper)
        else:
            self._finish_reductions(events)
        self._hidden.clear()
        for unit in self.units:
            unit.end_backward()
        if self.is_idle:  # not inside a forward, as when that takes gradients itself
            self.ledger.begin_step()
        for index, unit in enumerate(self.units):
            if not self._sequencer.is_in_use(index):
                unit.conceal()

    def abandon_backward(self, task: int, error: BaseException) -> None:
        """A graph task died."""
        self._tasks.discard(task)
        if not self._tasks:
            self._fail(error)

    def _finish_reductions(self, events: Sequence[Event]) -> None:
        reduces = [i for i, event in enumerate(events) if event.kind is EventKind.REDUCE]
        after_reduces = max(reduces, default=-1) + 1
        self._perform(events[:after_reduces])
        # Here it has the same place on the link on every rank, wherever backward left off there.
        self._agreement = self._launch_agreement()
        self._perform(events[after_reduces:])
        self._land()
        self._settle(self._agreement)
        self._agreement = None

    # -- steps in backward -----------------------------------------------------------------------

    @property
    def steps_in_backward(self) -> bool:
        """Whether an optimizer steps units in backward."""
        return self._stepper is not None

    def check_between_steps(self) -> None:
        """Refuse to change when the optimizer steps.

        Raises:
            StepError: a forward, a backward or `hold` is under way.
        """
        if not self.is_idle or self._is_held:
            raise StepError("when the optimizer steps cannot change in the middle of a step")

    def step_with(self, stepper: Stepper | None) -> None:
        """Have units stepped in backward from now on; None ends that.

        Raises:
            StepError: a forward, a backward or `hold` is under way.
        """
        self.check_between_steps()
        self.recover()
        self._stepper = stepper
        self._sequencer.steps_in_backward = stepper is not None
        for gradients in self._gradients():
            gradients.shard.step_in_backward(stepper is not None)

    def _finish_steps(self, stepper: Stepper) -> None:
        sequencer = self._sequencer
        done = [
            unit
            for index, unit in enumerate(self.units)
            if sequencer.synchronizes[index] and sequencer.crosses[index]
        ]
        stepper.finish(done)

    # -- accumulation ----------------------------------------------------------------------------

    def set_synchronizes(self, indices: Iterable[int], *, value: bool) -> None:
        """Whether the units reduce their gradients at the end of their backward, or hold them."""
        for index in indices:
            self._sequencer.synchronizes[index] = value

    def set_crosses(self, indices: Iterable[int], *, value: bool) -> None:
        """Whether the units reduce their gradients over the outer axis as well."""
        for index in indices:
            self._sequencer.crosses[index] = value

    def set_reshards(self, indices: Iterable[int], *, value: bool) -> None:
        """Whether the units are freed after forward and gathered again for backward."""
        for index in indices:
            self._sequencer.reshards[index] = value

    # -- by hand ---------------------------------------------------------------------------------

    def gather_by_hand(self, indices: Sequence[int]) -> None:
        """Launch the gathers of units before they are entered; all ranks have to."""
        if self._is_held:
            return
        with self._guarded():
            if self.is_idle:
                self.recover()
            for index in indices:
                if self.is_idle:
                    self.units[index].expect_changes()
                self._perform(self._sequencer.gather(index))

    def await_by_hand(self, indices: Sequence[int]) -> None:
        """Have the parameters of units whole in their modules."""
        if self._is_held:
            return
        with self._guarded():
            for index in indices:
                self._perform(self._sequencer.wait(index))
                if self._sequencer.is_gathered(index):  # and not freed meanwhile
                    self.units[index].expose()

    def free_by_hand(self, indices: Sequence[int]) -> None:
        """Leave shards only, of units that are not in use."""
        if self._is_held:
            return
        with self._guarded():
            for index in indices:
                self._perform(self._sequencer.free(index))
                if not self._sequencer.is_in_use(index):
                    self.units[index].conceal()

    # -- outside steps ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Gather every unit and keep it until `release`.

        Raises:
            StepError: a forward or backward is under way.
        """
        if not self.is_idle or self._is_held:
            raise StepError("parameters cannot be gathered in the middle of a step")
        with self._guarded():
            self.recover()
            self._perform(self._sequencer.rest())
            self._note("gathered()")
            links = self._links
            for unit in self.units:
                unit.launch_hold(links.gather)
            for unit in self.units:
                unit.await_hold(links)
        self._is_held = True

    def release(self, *, write_back: bool, error: BaseException | None = None) -> None:
        """End `hold`; an ``error`` of this rank also ends it on ranks that write back.

        Raises:
            PlanError: a change cannot be written back, or differs between ranks.
            PeerAborted: another rank raised; no rank has written anything.
        """
        is_agreed = False
        try:
            if error is not None:
                self._links.abort(error)
            elif write_back:
                check_same_sums(self._collect_changes(), self._axis, ADVICE)
                is_agreed = True
        finally:
            for index, unit in enumerate(self.units):
                unit.end_hold(write_back=is_agreed)
                if is_agreed:
                    names = ", ".join(parameter.name for parameter in unit.parameters)
                    self._sequencer.note_changed(index, names)
            self._is_held = False

    def _collect_changes(self) -> dict[str, Tensor]:
        try:
            return collect_changes(self.units)
        except BaseException as error:
            self._links.abort(error)
            raise

    def recover(self) -> None:
        """After an exception: bring the ranks back into step and free what was left behind."""
        self._links.recover()
        for unit in self._condemned:
            unit.quiesce(POLL_SECONDS)
            unit.reset()
        self._condemned = []
        self._orphans = []

    # -- transactions ----------------------------------------------------------------------------

    def open_transaction(self) -> None:
        """Begin what `close_transaction` ends; ranks that an error has parted are in step again.

        Raises:
            StepError: one is open, or a forward, a backward or `hold` is under way.
        """
        if self._is_in_transaction:
            raise StepError(
                "a transaction of this model is open already; one transaction is one step, so put "
                "the whole step into a single `with sw.transaction(...)`"
            )
        if not self.is_idle or self._is_held:
            raise StepError("a transaction cannot begin in a forward, a backward or sw.gathered")
        self.recover()
        self._note("a transaction")
        self._is_in_transaction = True

    def close_transaction(self) -> None:
        self._is_in_transaction = False

    def abandon(self, error: BaseException) -> None:
        """End the step where it is: only shards are left, and the other ranks are told."""
        self._tasks.clear()
        self._fail(error)

    # -- steps of the above ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Have an exception outside forward and backward leave shards only; inside, they do."""
        try:
            yield
        except BaseException as error:
            if self.is_idle:
                self._fail(error)
            raise

    def _notice_changes(self) -> None:
        for index, unit in enumerate(self.units):
            changed = unit.changed_parameters()
            if changed:
                self._sequencer.note_changed(index, ", ".join(changed))

    def _perform(self, events: Sequence[Event]) -> None:
        if self._is_broken:
            return
        self._is_broken = True
        for event in events:
            record = Record(event, self.ledger.step, time.perf_counter())
            record.marks = self._do(event.kind, self._by_label[event.unit])
            record.ended = time.perf_counter()
            self.ledger.append(record)
        self._is_broken = False

    def _do(self, kind: EventKind, unit: Unit) -> tuple[Work, ...]:
        links = self._links
        match kind:
            case EventKind.GATHER:
                return unit.launch_gather(links.gather)
            case EventKind.WAIT:
                unit.await_gather(links)
            case EventKind.BACKWARD:
                unit.expects_gradients = True
                unit.expose()
            case EventKind.FREE:
                unit.free(links)
            case EventKind.KEEP:
                return unit.launch_keep(links.gather)
            case EventKind.DROP:
                unit.drop()
            case EventKind.REDUCE:
                return self._reduce(unit)
            case EventKind.COLLECT:
                self._collect(unit)
            case EventKind.STEP:
                self._step(unit)
        return ()

    def _reduce(self, unit: Unit) -> tuple[Work, ...]:
        links, crosses = self._links, self._sequencer.crosses[self.units.index(unit)]
        if self._stepper is not None:
            self._stepper.before_reduce(unit)
        marks = unit.launch_reduce(links.reduce, crosses=crosses)
        if self._stepper is not None and crosses:
            self._stepper.after_reduce(unit, links, self._device)
        return marks

    def _collect(self, unit: Unit) -> None:
        self._land()
        unit.collect(self._links)
        self._landing = unit
        if self._stepper is not None:
            self._stepper.collect(unit)

    def _step(self, unit: Unit) -> None:
        assert self._stepper is not None
        self._land()
        self._stepper.step(unit, self._links)

    def _land(self) -> None:
        """Hand over gradients that were collected before, where they are on the host."""
        landing, self._landing = self._landing, None
        if landing is not None:
            for gradients in landing.gradients:
                gradients.finish_offload()

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks, and leave shards only."""
        self._links.abort(error)
        self._sequencer.abandon()
        self._landing = None
        if self._agreement is not None:
            self._orphans.append(self._agreement)  # other ranks may still write its flags
            self._agreement = None
        if self._stepper is not None:
            self._orphans += self._stepper.abandon()
        self._is_broken = False
        # What all ranks launched ends in a moment; what only some did never will.
        patience = 0.0 if isinstance(error, StepError) else POLL_SECONDS
        until = time.monotonic() + patience
        for unit in self.units:
            if unit in self._condemned:
                continue
            if unit.quiesce(max(0.0, until - time.monotonic())):
                unit.reset()
            else:
                unit.conceal()
                self._condemned.append(unit)
        self._hidden.clear()
        self.ledger.abandon_step()

    def _launch_agreement(self) -> Agreement | None:
        own = [used for gradients in self._gradients() for used in gradients.used]
        links = self._links
        if self.unused == "zeros" or not self._hands_over:
            return None
        return launch_agreement(own, links, self._device, "agree on unused parameters")

    @property
    def _hands_over(self) -> bool:
        """Whether gradients of this backward reach parameters, not wait for a later one."""
        return any(map(operator.and_, self._sequencer.synchronizes, self._sequencer.crosses))

    def _settle(self, agreement: Agreement | None) -> None:
        """Leave the gradient of a parameter alone if no rank used it, or refuse that.

        Raises:
            StepError: a rank did not use some, and the user wants to know.
        """
        if agreement is None:
            for gradients in self._gradients():
                if self._hands_over:
                    gradients.shard.fill_with_zeros()
                gradients.forget()
            return
        used = agreement.settle(self._links)
        if self.unused == "error":
            parameters = [p for gradients in self._gradients() for p in gradients.parameters]
            check_all_used(parameters, used)
        rest = iter([any(by_rank) for by_rank in zip(*used, strict=True)])
        for gradients in self._gradients():
            gradients.settle([next(rest) for _ in gradients.used])

    def _gradients(self) -> Iterator[GradientBuffer]:
        for unit in self.units:
            yield from unit.gradients

    def _note(self, where: str) -> None:
        """For the report of a rank that waits in vain."""
        links = self._links
        links.step, links.where = self.ledger.step, where
