"""The collectives of all ranks of a mesh, and how a wait that cannot end becomes an error."""

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import torch
import torch.distributed as dist

from shardwise.errors import PeerAborted, PeerLost, PeerSilent, PlanError, StepError
from shardwise.transport.api import RankGroup, Work
from shardwise.transport.device import ThreadStream
from shardwise.transport.health.comparison import Comparison
from shardwise.transport.health.history import History
from shardwise.transport.health.monitor import (
    POLL_SECONDS,
    Heartbeat,
    Monitor,
    Patience,
    connect_to_store,
    describe_elsewhere,
    usual_patience,
)
from shardwise.transport.health.python_stack import calls_of, collective_of, fingerprint
from shardwise.transport.health.status import QueueState, Report
from shardwise.transport.host.collectives import HostCollectives
from shardwise.transport.process_group import ProcessGroupCollectives, backend_of

__all__ = ["POLL_SECONDS", "Collectives", "Communicator", "communicator", "make_collectives"]

RECENT_UNITS = 64  # a rank stalls a few units after it took another way than the others
# A kernel may take long, so a device counts as stuck after so many looks without progress.
_DEVICE_GRACE = 2
_NUM_SAID = 4  # ranks of those that another one waits for

_log = logging.getLogger("shardwise")

Collectives = HostCollectives | ProcessGroupCollectives  # of one kind, one after the other

# One for each process group and device, however many models use it. Keyed by the group object, so
# ranks that live as threads of one process have their own.
_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Communicator]]" = (
    weakref.WeakKeyDictionary()
)
_queues: "weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]]" = weakref.WeakKeyDictionary()


def communicator(
    world: RankGroup, device: torch.device, patience: Patience | None = None
) -> "Communicator":
    """The communicator of all ranks of a mesh; the first call makes it, on all of them."""
    if world.parent is None:
        return Communicator(world, device)
    # No lock: a group belongs to one rank, and a new communicator waits for the other ranks.
    of_group = _communicators.setdefault(world.parent, {})
    if device not in of_group:
        of_group[device] = Communicator(world, device, patience)
    return of_group[device]


def make_collectives(world: RankGroup, device: torch.device, name: str) -> Collectives:
    """A queue of collectives of one kind among the ranks of ``world``; all of them call this."""
    backend = backend_of(world.parent, device.type)
    if device.type == "cpu" and backend is None:
        backend = "gloo"  # the group is of GPUs alone
    # What its ranks have made before it, together.
    number = 0 if world.parent is None else next(_queues.setdefault(world.parent, count()))
    name = f"shardwise/{device.type}/{name}/{number}"
    if world.size > 1 and device.type != "cpu" and backend in ("gloo", None):
        raise PlanError(
            f"the model is on {device}, for which the process group has no backend but Gloo, and "
            'that moves host memory; pass backend="cpu:gloo,cuda:nccl" to init_process_group, or '
            "move the model to the CPU"
        )
    if world.size == 1 or backend != "gloo":
        return ProcessGroupCollectives(world, device, backend, name)
    return HostCollectives(world, name)


class Communicator:
    """A queue for gathers and one for reductions, so that neither waits behind the other.

    A wait for either ends: with the result, or with an error that says what the ranks wait for.
    """

    def __init__(
        self, world: RankGroup, device: torch.device, patience: Patience | None = None
    ) -> None:
        self.num_ranks = world.size
        self.rank = world.own_rank
        self.patience = patience = patience or usual_patience(device)
        self.gather = make_collectives(world, device, "gather")
        self.reduce = make_collectives(world, device, "reduce")
        self._monitored = [q for q in (self.gather, self.reduce) if q.is_monitored]
        self.epoch = 0  # how often the ranks were brought back into step
        self.is_broken = False  # an error has reached the ranks since they were last in step
        self._lost: PeerLost | None = None  # for good
        self._recovery: Work | None = None  # under way
        self._lock = threading.Lock()  # held by a look at the device, and by `abort`
        self._found: StepError | None = None  # by `_look_at_device`, to be raised
        self._stuck = 0  # looks at a device that has come no further
        self._seen: tuple[QueueState, ...] = ()  # at the last one
        # Beats in a collective of torch's, its ranks, and the queues then.
        self._blocked: tuple[int, tuple[int, ...], tuple[QueueState, ...]] = (0, (), ())
        self._comparison = Comparison(self.rank)
        self._host_is_at = 0  # a fingerprint, then
        self._waits_since = 0.0  # on the clock of `time.monotonic`
        self._said = 0.0  # after how many seconds
        self._parent = None if world.parent is None else weakref.ref(world.parent)
        self._thread = threading.get_ident()  # that runs the model
        self.step = 0
        self.where = "before the first step"
        # Step, number of the call in it, and unit.
        self._entered: deque[tuple[int, int, str]] = deque(maxlen=RECENT_UNITS)
        self._monitor: Monitor | None = None
        if self._monitored:
            assert world.parent is not None
            name = f"{world.parent.group_name}/{self.gather.name}"
            self._monitor = Monitor(
                connect_to_store(patience),
                name,
                self.rank,
                self.num_ranks,
                patience,
                weakref.WeakMethod(self._beat),
                weakref.WeakMethod(self._say_farewell),
            )

    @property
    def world(self) -> RankGroup:
        """All ranks."""
        return self.gather.world

    @property
    def is_monitored(self) -> bool:
        """Whether ranks that wait learn of errors on other ranks."""
        return self._monitor is not None

    def enter(self, unit: str) -> None:
        """Note that the forward of ``unit`` begins."""
        step, call, _ = self._entered[-1] if self._entered else (self.step, 0, "")
        self._entered.append((self.step, call + 1 if step == self.step else 1, unit))
        self._thread = threading.get_ident()

    def wait(self, work: Work) -> None:
        """Return when compute may use the result: on a device, at once.

        Raises:
            RanksDiverged: the ranks wait for different things.
            PeerAborted: another rank raised.
            PeerLost: another rank is gone, or gives no sign of life.
        """
        self.raise_found()
        collective = work.collective
        awaited = "" if collective is None else collective.label
        looks = 0
        last: tuple[QueueState, ...] = ()
        self._begin_to_wait()
        while not work.wait(self.patience.poll_seconds):
            states = self._queues()
            # On a busy machine its thread may have ended it and not yet had the time to say so.
            is_over = collective is not None and any(collective.tag in s.ended for s in states)
            looks = looks + 1 if states == last and not is_over else 0
            last = states
            error = self._look_around(looks, awaited)
            if error is not None:
                self._give_up(error)
                raise error
        if last and self._monitor is not None:
            self._monitor.publish(self._report())
        if work.error is not None:
            self.raise_found()
            lost = self._with_table(work.error)
            self.abort(lost)
            raise lost

    def check_peers(self) -> None:
        """To be called every now and then while this rank waits for others.

        Raises:
            PeerSilent: another process gives no sign of life.
        """
        if self._monitor is not None:
            self._monitor.check_heartbeats()

    def abort(self, error: BaseException) -> None:
        """Tell the others that this rank raised, so that they need not wait for it."""
        with self._lock:
            self._found = None  # this rank has an error to raise
            if self._monitor is not None and not self.is_broken:
                place = f"step {self.step}, {self.where}"
                aborted = PeerAborted(f"rank {self.rank} gave up in {place}: {_shown(error)}")
                self._give_up(error if isinstance(error, PeerLost) else aborted)

    def recover(self) -> None:
        """After an error: bring all ranks back into step. Costs nothing when there was none.

        Raises:
            PeerLost: another rank is gone; or gives no sign of life, and the next call tries again.
            StepError: the last step of a device was in vain; what `wait` would have raised.
        """
        is_broken = self.is_broken  # before: a thread that sets it has found something first
        self.raise_found()
        if not is_broken or self._monitor is None:
            return
        if self._lost is not None:
            raise PeerLost(str(self._lost))
        if self._recovery is None:
            self._recovery = ThreadStream("shardwise-recovery").submit(self._synchronize)
        while not self._recovery.wait(self.patience.poll_seconds):
            self.check_peers()
        recovery, self._recovery = self._recovery, None
        if recovery.error is not None:
            if isinstance(recovery.error, PeerLost):
                self._lost = recovery.error
            raise recovery.error
        self.epoch += 1
        self.is_broken = False
        self._comparison = Comparison(self.rank)
        self._entered.clear()

    def _synchronize(self) -> None:
        """Exchange reports with all ranks, and end what only some of them have begun."""
        assert self._monitor is not None
        reports = self._monitor.meet(self._report())
        for number, queue in enumerate(self._monitored):
            queue.restart([report.queues[number] for report in reports])

    def _look_at_device(self) -> None:
        """Find out whether the device waits in vain; the heartbeat's thread calls it.

        Nothing of this takes place in a step, where the host waits for no collective.
        """
        states, was_stuck = self._queues(), self._stuck
        host_was_at, self._host_is_at = self._host_is_at, fingerprint(self._thread)
        running = [state.running.label for state in states if state.running is not None]
        self._stuck = was_stuck + 1 if running and states == self._seen else 0
        self._seen = states
        if not self._stuck:
            self._begin_to_wait()
        if self._stuck or was_stuck:
            looks = max(0, self._stuck - _DEVICE_GRACE)
            is_busy = self._host_is_at != host_was_at
            self._find(self._look_around(looks, ", ".join(running), is_busy))

    def _find(self, error: StepError | None) -> None:
        """Keep what the thread of the heartbeat has found out for `raise_found`."""
        if error is not None:
            self._found = error
            self._give_up(error)

    def raise_found(self) -> None:
        """Raise the error that the heartbeat's thread found; call it after the host has waited."""
        found, self._found = self._found, None
        if found is not None:
            raise found

    def _look_around(
        self, looks: int, awaited: str, is_host_busy: bool = False
    ) -> StepError | None:
        """Publish where this rank is; the error to raise if the reports of others leave no hope."""
        if self._monitor is None:
            return None
        report = replace(
            self._report(),
            looks=looks,
            awaited=awaited,
            is_host_busy=is_host_busy,
            entered=tuple((call, unit) for step, call, unit in self._entered if step == self.step),
        )
        try:
            self._monitor.publish(report)
            reports = self._monitor.check_reports(self.epoch)
            self._monitor.check_heartbeats(f"; step {self.step}, {self.where}, waits for {awaited}")
            self._say_whom_it_waits_for(report, reports)
        except StepError as error:
            return self._announce(error)
        return None

    def _announce(self, error: StepError) -> StepError:
        """Publish an error that ends the step on all ranks; the first one of those published."""
        assert self._monitor is not None
        failure = replace(self._report(), failure=type(error).__name__, error=str(error))
        with contextlib.suppress(PeerLost):  # the store is gone, so no rank can read it
            return self._monitor.announce(failure).raised
        return error

    def _begin_to_wait(self) -> None:
        self._waits_since, self._said = time.monotonic(), 0.0

    def _say_whom_it_waits_for(self, own: Report, reports: Mapping[int, Report]) -> None:
        """Log it after ``say_seconds``, and each time that the wait has become twice as long."""
        assert self._monitor is not None
        seconds = time.monotonic() - self._waits_since
        if seconds < max(self.patience.say_seconds, 2 * self._said):
            return
        self._said = seconds
        others = (rank for rank in range(self.num_ranks) if rank != self.rank)
        elsewhere = [rank for rank in others if rank not in reports or not reports[rank].is_stuck]
        beats = {rank: self._monitor.heartbeat(rank) for rank in elsewhere[:_NUM_SAID]}
        _log.warning(
            "rank %d has waited for %.1f s: step %d, %s, %s%s",
            *(self.rank, seconds, self.step, self.where, own.awaited),
            describe_elsewhere(elsewhere, beats),
        )

    def _beat(self, count: int) -> None:
        """Show others where this rank stands, and look at them; on the thread of the heartbeat."""
        monitor = self._monitor
        if monitor is None:
            return  # it is being made
        report = self._report()
        queues = (queue for queue in self._monitored if isinstance(queue, ProcessGroupCollectives))
        histories = [queue.history for queue in queues]
        marks = tuple(one.marks() for one in histories)
        if self.is_broken:  # aborted collectives count as ended
            monitor.beat(Heartbeat(count, report))
            return
        monitor.beat(Heartbeat(count, report, marks))
        self._look_at_others(monitor, report, histories)

    def _say_farewell(self) -> None:
        """Show ranks that may wait for this one why it ends; when the interpreter does."""
        assert self._monitor is not None
        error = getattr(sys, "last_value", None)  # that nothing has caught
        text = "no exception, it ran fewer steps" if error is None else _shown(error)
        self._monitor.beat(Heartbeat(0, replace(self._report(), error=text)))

    def _look_at_others(
        self, monitor: Monitor, report: Report, histories: Sequence[History]
    ) -> None:
        with self._lock:
            if self.is_broken:  # by now
                return
            self._show_if_blocked(monitor, report)
            if histories:  # on a device no host waits
                self._look_at_device()
                if not self.is_broken:
                    self._find(self._comparison.look(monitor, histories, self.epoch))

    def _show_if_blocked(self, monitor: Monitor, report: Report) -> None:
        """Publish a report for a thread that is in a collective of torch's, and then is not."""
        parent = None if self._parent is None else self._parent()
        inside = set(collective_of(self._thread))
        members = dist.get_process_group_ranks(parent) if inside and parent is not None else []
        ranks = tuple(i for i, rank in enumerate(members) if rank in inside and i != self.rank)
        beats, ranks_before, queues_before = self._blocked
        is_same = ranks == ranks_before and report.queues == queues_before
        self._blocked = beats + 1 if is_same else 0, ranks, report.queues
        if ranks:
            monitor.publish(replace(report, looks=self._blocked[0], blocked_with=ranks))
        elif ranks_before:
            monitor.publish(report)

    def _with_table(self, error: BaseException) -> BaseException:
        """A lost rank's ``error`` with where all ranks stood."""
        if not isinstance(error, PeerLost) or self._monitor is None:
            return error
        with contextlib.suppress(PeerLost):  # the store is gone
            return type(error)(f"{error}\n{self._monitor.table()}")
        return error

    def _give_up(self, error: StepError) -> None:
        assert self._monitor is not None
        self.is_broken = True
        if isinstance(error, PeerLost) and not isinstance(error, PeerSilent):
            self._lost = error
        self._announce(error)
        for queue in self._monitored:
            queue.stop()

    def _report(self) -> Report:
        calls = calls_of(self._thread)
        return Report(self.epoch, 0, self.step, self.where, self._queues(), python=calls)

    def _queues(self) -> tuple[QueueState, ...]:
        return tuple(queue.state() for queue in self._monitored)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
