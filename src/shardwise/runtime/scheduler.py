"""Performs the schedule: gets events from the sequencer, performs them, and records them.

After an exception, `fail` ends the step on this rank and tells the others; `abandon` also ends the
backwards that run, and `abandon_backward` cleans up after one that autograd has dropped. `abort`
only tells the others. `recover`, at the next step, resynchronizes the ranks.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum, StrEnum, auto
from functools import cached_property, partial

import torch

from shardwise import _private
from shardwise.comm.api import Work
from shardwise.comm.communicator import POLL_SECONDS, Communicator, communicator, note_place
from shardwise.comm.device import NO_TIME, device_of, join_streams, note_stream, wait_for_device
from shardwise.errors import PlanError, StepError
from shardwise.plan.plan import Plan
from shardwise.runtime import hooks
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.ledger import Ledger, Record
from shardwise.runtime.observer import Backward, CallObserver, MemoryNotes, StepLeaves, StepObserver
from shardwise.runtime.parameters import reclaim_locals
from shardwise.runtime.unit import Unit
from shardwise.runtime.versions import ShardVersions
from shardwise.schedule.events import Event, EventKind
from shardwise.schedule.sequencer import Call, Outcome, Sequencer
from shardwise.tensor.mesh import DataParallelMesh

__all__ = ["Scheduler", "Sleep"]

_DROP_SECONDS = 10.0  # how long to wait for autograd's thread to drop a graph task that raised
_DROP_POLL_SECONDS = 0.0005


class Sleep(StrEnum):
    """Where the values of a model's shards are; `features.sleep` changes it."""

    AWAKE = "awake"  # on their device
    ON_HOST = "on host"  # in host memory, for `gathered` and checkpoints
    DISCARDED = "discarded"  # nowhere


class Accumulation(Enum):
    """What the gradients that await a reduction are."""

    WHOLE = auto()  # sums over micro-batches
    CHANGING = auto()  # the end of a backward adds to them
    TORN = auto()  # an interrupt came then: some of them are sums over one micro-batch less


class Scheduler:
    """Runs the units of one root module in step with forward and backward."""

    # Features set these.
    observer = StepObserver()
    notes = MemoryNotes()
    call_observer: CallObserver | None = None  # inside `sw.join`
    leaves: StepLeaves | None = None  # of a reproducible model, whose step has several backwards

    # Where this rank is in a step.
    depth = 0  # number of nested forwards that are running
    # True while events are performed and, if one raises, until `fail`: units may then be in other
    # states than the sequencer says.
    _events_incomplete = False
    _is_leaving = False  # in `leave`, or an interrupt has ended it
    accumulation = Accumulation.WHOLE
    _offloading: Unit | None = None  # its gradients are on their way to the host
    _shows_dense = False  # inside `taking_gradients`

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        mesh: DataParallelMesh,
        device: torch.device,
    ) -> None:
        self.sequencer = Sequencer(plan, [unit.settings for unit in units])
        self.units = tuple(units)
        self.parameters = tuple(one for unit in units for one in unit.parameters)
        self.gradients = tuple(one for unit in units for one in unit.gradients)
        self.in_gathered = False
        self._versions = ShardVersions(self.units)
        self._mesh = mesh
        self._device = here = device_of(device)
        self.ledger = Ledger(
            [unit.label for unit in plan.units],
            clock=lambda: here.record_time(here.current_stream()),
            takes_times=not here.is_accelerator,
        )
        self._tasks: set[int] = set()  # running graph tasks of autograd that have reached the model
        # The graph task that ended last: it is not in `_tasks`, and may still raise.
        self._finishing: int | None = None
        self._abandoning = threading.RLock()  # held while a failed graph task is cleaned up
        # From an exception to `recover`: units with communication in flight, and objects that own
        # memory to which other ranks may still write.
        self._in_flight: list[Unit] = []
        self._exchanges: list[object] = []
        self._calls: dict[int, Call] = {}  # by unit, the last that backward may reach
        # By feature, why the model cannot be converted or unfrozen now: the end of a sentence.
        self.forbids_conversion: dict[str, str] = {}
        self.sleep = Sleep.AWAKE

    @cached_property
    def _comm(self) -> Communicator:
        """The model's communicator, created on first use, which all ranks reach together."""
        return communicator(self._mesh.world, self._device.torch_device)

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward is running."""
        return self.depth == 0 and not self._tasks

    @property
    def is_outermost(self) -> bool:
        """Whether no forward is running, so that the next one is inside no other."""
        return self.depth == 0

    @property
    def is_between_steps(self) -> bool:
        """Whether the model is idle and not inside `gathered`."""
        return self.is_idle and not self.in_gathered

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Call `fail` if the body raises while no forward or backward runs that would call it."""
        try:
            yield
        except BaseException as error:
            if self.is_idle:
                self.fail(error)
            raise

    # -- forward ---------------------------------------------------------------------------------

    def enter(self, index: int, *, recomputed: bool) -> Call | None:
        """Prepare a unit for its forward. Returns None inside `gathered`."""
        if self.in_gathered:
            return None
        if not recomputed and self.depth == 0:
            self.check_awake()
            self.await_abandoned()
        with self.guarded():
            if self.is_idle:
                if self.call_observer is not None:
                    self.call_observer.before_forward(index)
                self._begin_forward()
            if self._events_incomplete:
                raise StepError("this step has failed; do not catch its exception inside the model")
            label = self.units[index].plan.label
            self.report(f"forward of {label}")
            if not recomputed:
                self._comm.watch.enter(label)
                # A forward may change units that it calls later, as MoCo does: gather them again.
                changed = self._versions.update(self.sequencer.tick, (index,))
                self._perform(self.sequencer.request(EventKind.FREE, changed))
            elif not self.sequencer.is_in_backward(hooks.current_task()):
                self._enter_inside(index)
            grad = torch.is_grad_enabled()
            call, events = self.sequencer.enter(index, grad=grad, recomputed=recomputed)
        self.depth += 1
        try:
            if self.call_observer is not None:
                self.call_observer.entered(call)
            self._perform(events)
            self.units[index].use_unsharded()
        except BaseException as error:
            self._events_incomplete = True
            self.leave(call, Outcome.FAILED, error)
            raise
        return call

    def leave(self, call: Call, outcome: Outcome, error: BaseException | None = None) -> None:
        """End the forward of a unit, which may have raised ``error``."""
        if error is not None:
            self.explain(error)
        self.depth, self._is_leaving = self.depth - 1, True
        events = self.sequencer.exit(call, outcome)
        if self.call_observer is not None:
            self.call_observer.left(call)
        if not call.forward_pass.recomputed:
            if call.is_differentiable:
                self._calls[call.unit] = call
            else:
                self._calls.pop(call.unit, None)
        if error is not None and self.is_idle:
            self.fail(error)
            return
        with self.guarded():
            self._perform(events)
            self._use_sharded((call.unit,))
        if self.is_idle:
            self.ledger.end_forward(awaits_backward=call.forward_pass.is_differentiable)
        self._is_leaving = False

    def unwind(self, depth: int, error: BaseException) -> None:
        """After ``error`` of a call that began at ``depth``: end it if `leave` has not done so.

        A signal handler may raise anywhere.
        """
        if self.depth == depth and self.sequencer.is_settled(depth) and not self._is_leaving:
            return
        self.depth, self._is_leaving, self._events_incomplete = depth, False, True
        if self.is_idle:
            self.fail(error)

    def _enter_inside(self, index: int) -> None:
        """Begin the backward of a call that is recomputed before backward has reached any call.

        Backward began at a tensor inside a checkpoint that no output led it to.
        """
        call = self._calls.get(index)
        if call is not None:
            with torch.no_grad():  # no second-order backward: the recomputation enables gradients
                self.before_backward(call)

    def _begin_forward(self) -> None:
        self.recover()
        self.drop_replaced_gradients()
        if self.leaves is not None:
            self.leaves.began()
        self.notes.forget()
        for unit in self.units:
            unit.expect_changes()
        reclaim_locals(self.parameters)  # `Module.to` before a step is no change within it
        changed = self._versions.update(self.sequencer.tick)
        self.ledger.begin_forward(has_changes=bool(changed))
        stale = [unit for unit in changed if self.sequencer.stays_for_next_pass(unit)]
        self._perform(self.sequencer.request(EventKind.FREE, stale))

    # -- backward --------------------------------------------------------------------------------

    def enter_backward(self, task: int, *, is_transformed: bool = False) -> None:
        """Note that graph task ``task`` has reached this model. Graph tasks may be nested."""
        if task in self._tasks:
            return
        self.check_awake()
        hooks.check_calls_end()
        end = hooks.BackwardEnd(
            partial(self.finish_backward, task),
            partial(self.abandon_backward, task),
            partial(self._clean_up, threading.get_ident()),
        )
        _private.queue_callback(end)
        if self.is_idle:
            self._versions.update(self.sequencer.tick)
            self.drop_replaced_gradients()
            if self.leaves is not None:
                self.leaves.began(checks_last_step=not is_transformed)
        elif self.call_observer is not None:
            self.call_observer.began_inner_backward()
        self._tasks.add(task)
        self.sequencer.begin_backward(task)

    def before_backward(self, call: Call, is_transformed: bool = False) -> None:
        """Prepare the unit of ``call`` for its backward.

        In the backward of a transform of `torch.func`, no parameter receives a gradient.
        """
        if self._shows_dense:  # `taking_gradients` has prepared all units
            return
        task = hooks.current_task()
        if not is_transformed:
            hooks.check_first_order()
        self.enter_backward(task, is_transformed=is_transformed)
        if self.call_observer is not None:
            is_first = len(self._tasks) == 1 and not self.sequencer.is_in_backward(task)
            self.call_observer.reached(call, is_first=is_first)
        self.report(f"backward of {self.units[call.unit].plan.label}")
        self._versions.check(call, steps_in_backward=self.sequencer.steps_in_backward)
        events = self.sequencer.before_backward(
            call, task, reduces=not is_transformed, is_recorded=torch.is_grad_enabled()
        )
        if self.leaves is not None:
            self.leaves.check_calls()
        self._perform(events)

    def accept(self, index: int, number: int, position: int) -> None:
        """Take the gradient that autograd has put on a dense parameter of a unit.

        Its ``position`` is that in the unit's `FlatParameters` of this ``number``.
        """
        unit = self.units[index]
        if not unit.expects_gradients and (call := self._calls.get(index)) is not None:
            self.before_backward(call)  # it shows only now that backward has reached the call
        try:
            unit.accept(unit.flats[number], position)
        except BaseException as error:
            self.explain(error)
            raise

    def finish_backward(self, task: int, *, agrees: bool = False) -> None:
        """Complete the backward of ``task``, whose last node autograd has run.

        With ``agrees``, gradients are reduced on all ranks or on none: a hook may raise on one.
        """
        self._tasks.discard(task)
        self._finishing = task
        self.report("end of backward")
        join_streams(self._device.torch_device)  # on which autograd has written gradients
        if self.call_observer is not None and task != hooks.NO_TASK:
            self.call_observer.ending_backward(is_inner=bool(self._tasks))
        is_outermost = self.sequencer.reduces(task) and not self._tasks
        events = self.sequencer.finish_backward(task)
        if self.leaves is not None:
            self.leaves.check_calls()
        if not is_outermost:
            self._perform(events)
            self._use_sharded(range(len(self.units)))
            return
        complete = [unit for unit in self.units if unit.settings.reduces_fully]
        is_shadow = self.call_observer is not None and self.call_observer.is_shadow
        backward = Backward(self.units, complete, self._comm, is_shadow)
        stop = max((i for i, x in enumerate(events, 1) if x.kind is EventKind.REDUCE), default=0)
        self._perform(events[:stop])
        self.observer.reductions_launched(backward)
        self._perform(events[stop:])
        self._finish_offload()
        self.observer.step_end(backward)
        if agrees:
            self._await_all_ranks()
        self.accumulation = Accumulation.CHANGING
        for unit in self.units:
            unit.end_backward()
        self.sequencer.commit()
        self.accumulation = Accumulation.WHOLE
        if self.leaves is not None:
            self.leaves.ended()
        if self.is_idle:  # not when a forward computes gradients itself
            self.ledger.begin_step()
        self._use_sharded(range(len(self.units)))
        if self.call_observer is not None:
            self.call_observer.ended_backward()

    def _await_all_ranks(self) -> None:
        """Return when all ranks have called this, or raise what one of them has raised instead."""
        comm, device = self._comm, self._device.torch_device
        if comm.num_ranks > 1:
            flag = torch.zeros(1, dtype=torch.uint8, device=device)
            comm.wait(comm.reduce.all_reduce_max(flag, comm.world, "agree on the conversion"))
            wait_for_device(device)
            comm.watch.raise_found()

    def _clean_up(self, thread: int, job: Callable[[], None]) -> None:
        """Run ``job`` of a destructor, on another thread if it could wait for this one.

        The garbage collector may run destructors on any thread, which may hold locks. ``thread`` is
        that of the backward, where the cleanup has ended before ``backward`` raises.
        """
        if threading.get_ident() == thread and not self._comm.watch.is_locked_here:
            with _private.without_transforms():
                job()
        else:
            self._comm.cleanup.submit(job)

    def abandon_backward(self, task: int, error: BaseException) -> None:
        """Clean up after a graph task that raised."""
        with self._abandoning:
            if task not in self._tasks and task != self._finishing:
                return  # `abandon` was called first
            self._finishing = None
            self._tasks.discard(task)
            self.notes.remember(f"step {self.ledger.step}, {self._comm.place.where}")
            if not self._tasks:
                self.fail(error)

    def await_abandoned(self) -> None:
        """Wait until backwards that raised have been cleaned up.

        On a device, autograd's thread drops a graph task only after ``backward`` has raised in the
        calling thread.
        """
        if self._tasks and hooks.current_task() == hooks.NO_TASK:
            until = time.monotonic() + _DROP_SECONDS
            while self._tasks and time.monotonic() < until:
                time.sleep(_DROP_POLL_SECONDS)
        with self._abandoning:
            pass

    @contextlib.contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """Put the dense parameters into the modules, and take their ``.grad`` at the end.

        For backwards of parts of a graph, which may begin where no hook is. All units must be
        gathered.
        """
        self.drop_replaced_gradients()
        self._shows_dense = True
        try:
            with self.guarded():
                for unit in self.units:
                    unit.use_unsharded()
                yield
                for unit in self.units:
                    unit.take_gradients()
        finally:
            self._shows_dense = False
        self._use_sharded(range(len(self.units)))

    def finish_accumulation(self, *, agrees: bool = False) -> None:
        """Reduce accumulated gradients as the end of a backward would, and free all units."""
        with self.guarded(), torch.no_grad():  # as hooks run in a backward
            self.drop_replaced_gradients()
            if self.sequencer.has_unreduced_gradients:
                self.finish_backward(hooks.NO_TASK, agrees=agrees)
            else:
                self._perform(self.sequencer.request(EventKind.FREE, range(len(self.units))))

    @property
    def has_accumulated(self) -> bool:
        """Whether, between steps, gradients of earlier micro-batches await a reduction."""
        return self.is_between_steps and self.sequencer.has_unreduced_gradients

    def reduce_accumulated(self) -> None:
        """Reduce accumulated gradients now, whatever the settings say. All ranks must call this.

        Their memory has the layout and dtype of this scheduler's plan, so a model that is about to
        be sharded again needs them in ``p.grad``.
        """
        if not self.has_accumulated:
            return
        if self.leaves is not None:
            self.leaves.refuse_conversion()
        with self.reducing(in_row=True, in_column=True):
            self._reduce_between_steps()

    def end_accumulation(self) -> None:
        """Reduce accumulated gradients as the settings say. All ranks must call this.

        Raises:
            StepError: in a forward, a backward, `gathered` or `sw.join`, or while the model sleeps.
        """
        self.check_idle("gradients cannot be reduced in a forward, a backward or sw.gathered")
        self.check_awake()
        if self.has_accumulated:
            self._reduce_between_steps()

    def _reduce_between_steps(self) -> None:
        self.recover()
        # The gradients would otherwise be inference tensors, to which nothing can be added.
        with torch.inference_mode(mode=False):
            self.finish_accumulation(agrees=True)

    @contextlib.contextmanager
    def reducing(self, *, in_row: bool, in_column: bool) -> Iterator[None]:
        """Reduce over the rows of the mesh, and over its columns, as told, whatever was set."""
        settings = [unit.settings for unit in self.units]
        before = [(one.reduce_grads, one.all_reduce_grads) for one in settings]
        try:
            for one in settings:
                one.reduce_grads, one.all_reduce_grads = in_row, in_column
            yield
        finally:
            for one, kept in zip(settings, before, strict=True):
                one.reduce_grads, one.all_reduce_grads = kept

    def drop_replaced_gradients(self) -> None:
        """Drop accumulated gradients where ``p.grad`` was set to None or to another tensor."""
        if self.sequencer.has_unreduced_gradients:
            for gradients in self.gradients:
                gradients.accumulated.drop_replaced()
            if self.accumulation is Accumulation.TORN:
                if any(is_unreduced(one.sharded.grad) for one in self.parameters):
                    raise StepError(
                        "the last backward was interrupted while it added up gradients, of which "
                        "some lack this micro-batch; call zero_grad(set_to_none=True), and repeat "
                        "all micro-batches"
                    )
                self.drop_accumulated()

    def drop_accumulated(self) -> None:
        """Drop all accumulated gradients."""
        self.sequencer.awaiting_reduction = [False] * len(self.units)
        self.accumulation = Accumulation.WHOLE
        if self.leaves is not None:
            self.leaves.dropped()
        for gradients in self.gradients:
            gradients.accumulated.restore(None)

    # -- steps in backward -----------------------------------------------------------------------

    def set_observer(self, observer: StepObserver) -> None:
        """Replace the observer, between steps."""
        self.check_idle(
            "sw.optimizer_in_backward cannot be turned on or off in the middle of a step"
        )
        self.recover()
        self.observer = observer
        self.sequencer.steps_in_backward = observer.steps_in_backward
        for gradients in self.gradients:
            gradients.step_in_backward(observer.steps_in_backward)

    @property
    def needs_preparation(self) -> bool:
        """Whether `prepare_conversion` does anything."""
        return self.has_accumulated or bool(self.forbids_conversion)

    def prepare_conversion(self) -> None:
        """Reduce accumulated gradients, so that the model can be sharded again.

        Raises:
            PlanError: a feature ``forbids_conversion``.
        """
        for reason in self.forbids_conversion.values():
            raise PlanError(
                "the model was converted to another dtype or device, or parameters were unfrozen, "
                f"{reason}"
            )
        self.reduce_accumulated()

    # -- between steps ---------------------------------------------------------------------------

    def check_idle(self, message: str) -> None:
        """Raise a StepError with ``message`` inside a forward, a backward or `gathered`."""
        self.await_abandoned()
        if self.call_observer is not None:
            raise StepError(f"inside sw.join, so do this after the block: {message}")
        if not self.is_between_steps:
            raise StepError(message)

    def check_awake(self, *, or_on_host: bool = False) -> None:
        """Raise a StepError while the model sleeps."""
        if self.sleep is Sleep.DISCARDED or (self.sleep is Sleep.ON_HOST and not or_on_host):
            raise StepError(
                "the model sleeps; call sw.wake(model, optimizer) first, or model.to(device) if "
                "model.to('cpu') has put it to sleep"
            )

    def request(self, kind: EventKind, index: int) -> None:
        """Gather a unit, wait for it or free it, as the user requested on every rank."""
        if self.in_gathered:
            return
        if kind is EventKind.GATHER:
            self.check_awake()
        self.await_abandoned()
        with self.guarded(), _private.without_transforms():
            if kind is EventKind.GATHER and self.is_idle:
                self.recover()
                self.units[index].expect_changes()
            # Outside a step, no error of another rank would reach a rank that stores nothing of a
            # changed parameter, so values are not compared.
            unit = self.units[index]
            of = unit.parameters if kind is EventKind.FREE and self.is_idle else ()
            changed = [one.name for one in of if one.forget_changes()]
            self._perform(self.sequencer.request(kind, [index]))
            unit.refuse(changed)
            if kind is EventKind.WAIT and self.sequencer.is_usable(index):  # not freed since
                unit.use_unsharded()
            elif kind is EventKind.FREE:
                self._use_sharded([index])

    @contextlib.contextmanager
    def gathering_apart(self) -> Iterator[Communicator]:
        """Free all units, and let the body gather them for use between steps."""
        self.check_idle("parameters cannot be gathered in the middle of a step")
        self.check_awake(or_on_host=True)
        with self.guarded(), _private.without_transforms():
            self.recover()
            self._perform(self.sequencer.release_all())
            self.report("gathered()")
            reclaim_locals(self.parameters)
            yield self._comm
        self.in_gathered = True

    def end_gathered(self, changed: Collection[str]) -> None:
        """End what `gathering_apart` began. The shards of parameters ``changed`` were written."""
        for index, unit in enumerate(self.units):
            if names := [one.name for one in unit.parameters if one.name in changed]:
                self._versions.note(index, self.sequencer.tick, names)

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this rank raised, so that they do not wait for it."""
        self._comm.watch.abort(error)

    # -- errors ----------------------------------------------------------------------------------

    def recover(self) -> None:
        """After an exception: resynchronize the ranks, and free the memory of the failed step."""
        self._comm.watch.recover()
        for unit in self._in_flight:  # now all of its communication ends
            unit.quiesce(time.monotonic() + POLL_SECONDS)
            unit.reset()
        self._in_flight.clear()
        self._exchanges.clear()

    def abandon(self, error: BaseException) -> None:
        """End the step and its backwards, wherever they are."""
        self.await_abandoned()
        self._tasks.clear()
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the step after ``error``: notify the other ranks and free all units."""
        self.explain(error)
        self._comm.watch.abort(error)
        self.sequencer.abandon(self.depth)  # its events free units, as `Unit.reset` does
        self._offloading = None
        self._events_incomplete = self._is_leaving = False
        self._exchanges += self.observer.failed()
        # Collectives that all ranks launched end within moments, and between CPUs all of them, as
        # `abort` has closed the connections; others never will.
        patience = 0.0 if isinstance(error, StepError) else POLL_SECONDS
        until = time.monotonic() + patience
        for unit in self.units:
            if unit in self._in_flight:
                continue
            if unit.quiesce(until):
                unit.reset()
            else:
                unit.use_sharded()
                self._in_flight.append(unit)
        self._calls.clear()
        self.ledger.abandon_step()
        if self.accumulation is Accumulation.CHANGING:
            self.accumulation = Accumulation.TORN
            if not self.sequencer.has_unreduced_gradients:  # there are none of earlier backwards
                self.drop_accumulated()

    def explain(self, error: BaseException) -> None:
        """Add a note about held memory to ``error`` if it is a failed allocation."""
        self.notes.note(error, f"step {self.ledger.step}, {self._comm.place.where}")

    def report(self, where: str) -> None:
        """Note where this rank is; it is sent to the other ranks only while this rank waits."""
        place = self._comm.place
        place.step, place.where = self.ledger.step, where

    # -- events ----------------------------------------------------------------------------------

    def _perform(self, events: Sequence[Event]) -> None:
        """Perform and record ``events``; do nothing after one that raised, until `fail`."""
        if self._events_incomplete or not events:
            return
        self._events_incomplete = True
        is_timed = self._comm.gather.is_timed = self._comm.reduce.is_timed = self.ledger.is_timed
        note_stream(self._device.torch_device)
        now = self.ledger.clock() if is_timed else NO_TIME
        try:
            for event in events:
                record, unit = Record(event, self.ledger.step, now), self.units[event.unit]
                if event.kind is not EventKind.FORWARD:  # the caller runs it
                    if works := self._do(event.kind, unit):
                        record.works, record.mesh = works, unit.mesh
                        record.inner_ranks = unit.plan.inner_ranks
                    now = self.ledger.clock() if is_timed else NO_TIME
                record.ended = now
                self.ledger.append(record)
        except BaseException as error:
            self.explain(error)
            label = self.units[event.unit].plan.label
            note_place(error, f"step {self.ledger.step}, {event.kind} {label}")
            self._comm.watch.abort(error)  # backward would report it without its text
            raise
        self._events_incomplete = False

    def _do(self, kind: EventKind, unit: Unit) -> tuple[Work, ...]:
        """Perform an event, and return the communication that it launched."""
        comm = self._comm
        match kind:
            case EventKind.GATHER:
                return unit.launch_gather(comm.gather)
            case EventKind.WAIT:
                unit.await_gather(comm)
            case EventKind.FREE:
                unit.free(comm)
            case EventKind.BACKWARD:
                unit.expects_gradients = True
                unit.use_unsharded()
            case EventKind.REDUCE:
                return self._reduce(unit)
            case EventKind.FINISH_REDUCE:
                self._finish_offload()
                unit.collect(comm)
                self._offloading = unit if unit.plan.offloads_gradients else None
            case EventKind.STEP:
                self._finish_offload(of=unit)
                self.observer.step(unit, comm)
            case EventKind.RESHARD_TO_SUBGROUP:
                return unit.launch_subgroup_part(comm.gather)
            case EventKind.FREE_SUBGROUP:
                unit.free_subgroup_part()
        return ()

    def _reduce(self, unit: Unit) -> tuple[Work, ...]:
        self.observer.before_reduce(unit)
        works = unit.launch_reduce(self._comm.reduce)
        if unit.settings.all_reduce_grads:
            self.observer.after_reduce(unit, self._comm)
        return works

    def _use_sharded(self, indices: Sequence[int]) -> None:
        """Put the sharded parameters back into units that are not in use."""
        for index in indices:
            if not self._shows_dense and not self.sequencer.is_in_use(index):
                unit = self.units[index]
                unit.refuse(unit.use_sharded())

    def _finish_offload(self, of: Unit | None = None) -> None:
        """Hand over the gradients of the last reduction, if it was that of the unit ``of``.

        They were copied to the host. None: whichever unit it was.
        """
        offloading = self._offloading
        if offloading is not None and of in (None, offloading):
            self._offloading = None
            for gradients in offloading.gradients:
                gradients.finish_offload()
