"""The collectives among the ranks of a mesh. A wait that cannot end raises an error."""

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count

import torch
import torch.distributed as dist

from shardwise.errors import (
    PeerAborted,
    PeerLost,
    PeerSilent,
    PlanError,
    ShardwiseError,
    StepError,
)
from shardwise.transport.api import RankGroup, Work
from shardwise.transport.device import ThreadStream, make_current, run_together
from shardwise.transport.health.history import Comparison, History
from shardwise.transport.health.monitor import (
    POLL_SECONDS,
    Heartbeat,
    Monitor,
    Patience,
    Place,
    connect_to_store,
    describe_elsewhere,
    usual_patience,
)
from shardwise.transport.health.python_stack import calls_of, collective_of, fingerprint
from shardwise.transport.health.status import LookCounter, QueueState, Report
from shardwise.transport.host_collectives import HostCollectives
from shardwise.transport.process_group import ProcessGroupCollectives, backend_of

__all__ = [
    "POLL_SECONDS",
    "Collectives",
    "Communicator",
    "communicator",
    "make_collectives",
    "note_place",
]

RECENT_UNITS = 64  # ranks stall within a few units after they diverge
# A kernel may take long, so a device counts as stuck only after this many looks without progress.
_DEVICE_GRACE = 2
_MAX_LOGGED_RANKS = 4

_log = logging.getLogger("shardwise")

Collectives = HostCollectives | ProcessGroupCollectives  # one queue; its collectives run in order

# One per process group, device and number of queues, shared by all models. Keyed by the group
# object, so ranks that are threads of one process have separate ones.
_ByDevice = dict[tuple[torch.device, bool], "Communicator"]
_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, _ByDevice]" = (
    weakref.WeakKeyDictionary()
)
_queues: "weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]]" = weakref.WeakKeyDictionary()


def communicator(
    world: RankGroup, device: torch.device, patience: Patience | None = None
) -> "Communicator":
    """Return the communicator of all ranks of a mesh. All ranks make the first call together."""
    if world.parent is None:
        return Communicator(world, device)
    # No lock: a group belongs to one rank, and a new communicator waits for the other ranks.
    of_group, key = _communicators.setdefault(world.parent, {}), (device, world.has_one_queue)
    if key not in of_group:
        of_group[key] = Communicator(world, device, patience)
    return of_group[key]


def make_collectives(world: RankGroup, device: torch.device, name: str) -> Collectives:
    """Create a queue of collectives among the ranks of ``world``. All of them call this."""
    backend = backend_of(world.parent, device.type)
    if device.type == "cpu" and backend in (None, "hostccl"):
        backend = "gloo"  # as between CPUs; None: the group is for GPUs only
    # The number of queues that these ranks have created before.
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
    """Two queues of collectives: gathers do not wait behind reductions, nor the reverse.

    With `RankGroup.has_one_queue`, all collectives are in one, in the order of their launch, which
    is the same on all ranks: half as many process groups.

    A wait for either ends with the result, or with an error that says what each rank waits for.
    """

    def __init__(
        self, world: RankGroup, device: torch.device, patience: Patience | None = None
    ) -> None:
        self._device = device
        self.num_ranks = world.size
        self.rank = world.own_rank
        self.patience = patience = patience or usual_patience()
        names = ("gather",) if world.has_one_queue else ("gather", "reduce")
        queues = [make_collectives(world, device, name) for name in names]
        self.gather, self.reduce = queues[0], queues[-1]
        self._monitored = [queue for queue in queues if queue.is_monitored]
        self.epoch = 0  # number of recoveries
        self.is_broken = False  # an error has ended a step since the last recovery
        self._lost: PeerLost | None = None  # the process group can never be used again
        self._recovery: Work | None = None  # in progress
        self.place = Place()
        self._entered: deque[tuple[int, int, str]] = deque(maxlen=RECENT_UNITS)  # step, call, unit
        self._wait_began = 0.0  # on the clock of `time.monotonic`
        self._logged_seconds = 0.0  # length of the wait when it was last logged
        self._num_logged = 0  # times that it was logged
        # The heartbeat thread uses all that follows.
        self._lock = threading.Lock()  # held while it checks others, and by `abort`
        self._lock_thread = 0  # the thread that holds it
        self._error: StepError | None = None  # that it found, for the main thread to raise
        self._device_looks = LookCounter()  # at collectives that run on the device
        self._torch_looks = LookCounter()  # at the main thread in a collective of torch
        self._torch_ranks: tuple[int, ...] = ()  # of this collective
        self._comparison = Comparison(self.rank)
        self._stack = 0  # fingerprint of the main thread at the last look
        self._thread = threading.get_ident()  # the main thread: it runs the model
        self._parent = None if world.parent is None else weakref.ref(world.parent)
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
                self.place,
            )

    @cached_property
    def cleanup(self) -> ThreadStream:
        """Runs what destructors leave to do: they may run on a thread that holds any lock."""
        stream = ThreadStream("shardwise-cleanup")
        stream.submit(partial(make_current, self._device))
        return stream

    @property
    def is_locked_here(self) -> bool:
        """Whether this thread holds the lock that `abort` waits for, so that it would hang."""
        return self._lock_thread == threading.get_ident()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._lock_thread = threading.get_ident()
            try:
                yield
            finally:
                self._lock_thread = 0

    @property
    def step(self) -> int:
        """The step that this rank is in."""
        return self.place.step

    @property
    def where(self) -> str:
        """Where in the step this rank is."""
        return self.place.where

    @property
    def world(self) -> RankGroup:
        """All ranks."""
        return self.gather.world

    @property
    def is_monitored(self) -> bool:
        """Whether a waiting rank learns of errors on other ranks."""
        return self._monitor is not None

    def enter(self, unit: str) -> None:
        """Record that the forward of ``unit`` begins."""
        step, call, _ = self._entered[-1] if self._entered else (self.step, 0, "")
        self._entered.append((self.step, call + 1 if step == self.step else 1, unit))
        self._thread = threading.get_ident()

    def wait(self, work: Work) -> None:
        """Return when compute may use the result: on a device, immediately.

        Raises:
            RanksDiverged: the ranks wait for different things.
            PeerAborted: another rank raised.
            PeerLost: another rank died, or its process is silent.
            Exception: the work's own error, on this rank.
        """
        self.raise_found()
        collective = work.collective
        awaited = "" if collective is None else collective.label
        looks: LookCounter | None = None
        error: BaseException | None
        self._restart_wait()
        while not work.wait(self.patience.poll_seconds):
            looks = looks or LookCounter()
            states = self._queues()
            # On a busy machine, the stream's thread may not have marked it as done yet.
            is_over = collective is not None and any(collective.tag in s.ended for s in states)
            looks.look(states, has_moved=is_over)
            error = self._look_at_peers(looks.count, awaited)
            if error is not None:
                raise self._end_step(error)
        if looks is not None and self._monitor is not None:
            self._monitor.publish(self._report())
        if work.error is not None:
            self.raise_found()
            if isinstance(work.error, PeerLost) and self._monitor is not None:
                raise self._end_lost(self._explained(work.error))
            note_place(work.error, f"step {self.step}, {self.where}, {awaited or 'an exchange'}")
            self.abort(work.error)
            raise work.error

    def check_peers(self) -> None:
        """Check that the other processes run. Call it regularly while this rank waits for them.

        Raises:
            PeerSilent: another process is silent.
        """
        if self._monitor is not None:
            self._monitor.check_heartbeats()

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this rank raised, so that they do not wait for it."""
        with self._locked():
            self._error = None  # this rank raises its own
            if self._monitor is not None and not self.is_broken:
                place = f"step {self.step}, {self.where}"
                aborted = PeerAborted(f"rank {self.rank} gave up in {place}: {_describe(error)}")
                self._end_step(error if isinstance(error, PeerLost) else aborted)

    def recover(self) -> None:
        """Resynchronize the ranks after an error. Costs nothing if there was none.

        Raises:
            PeerLost: another rank died; or it is silent, and the next call tries again.
            StepError: what `wait` would have raised for the last step of a device.
        """
        is_broken = self.is_broken  # before `raise_found`: the heartbeat thread sets it last
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
            if isinstance(recovery.error, PeerLost) and not isinstance(recovery.error, PeerSilent):
                self._lost = recovery.error
            raise recovery.error
        self.epoch += 1
        self.is_broken = False
        self._comparison = Comparison(self.rank)
        self._entered.clear()

    def _synchronize(self) -> None:
        """Exchange reports with all ranks, and end collectives that only some of them began.

        It runs on a thread.
        """
        make_current(self._device)
        assert self._monitor is not None
        restarts = self._monitor.meet(self._report())
        for queue, restart in zip(self._monitored, restarts, strict=True):
            queue.restart(restart)

    def raise_found(self) -> None:
        """Raise the error that the heartbeat thread found. Call it after the host has waited."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- a wait that takes long ------------------------------------------------------------------

    def _look_at_peers(
        self, looks: int, awaited: str, is_host_busy: bool = False
    ) -> StepError | None:
        """Publish a report of this rank; return an error if no rank can move, or one is gone.

        This rank waits for the collective ``awaited`` and has not moved for ``looks`` looks.
        """
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
            self._monitor.check_reports(self.epoch)
            self._monitor.check_heartbeats(f"; step {self.step}, {self.where}, waits for {awaited}")
            self._log_slow_wait(report)
        except StepError as error:
            return self._explained(error)
        return None

    def _explained(self, error: StepError) -> StepError:
        """Return ``error`` with the positions of all ranks, if another one is lost."""
        if isinstance(error, PeerLost) and self._monitor is not None:
            with contextlib.suppress(PeerLost):  # the store is gone
                return self._monitor.explain(error, self.epoch)
        return error

    def _restart_wait(self) -> None:
        self._wait_began, self._logged_seconds, self._num_logged = time.monotonic(), 0.0, 0

    def _log_slow_wait(self, own: Report) -> None:
        """Log the wait after ``log_seconds``, and each time that it has become twice as long.

        Of the ranks that wait for the same, the first reads which ranks they wait for.
        """
        assert self._monitor is not None
        seconds = time.monotonic() - self._wait_began
        if seconds < max(self.patience.log_seconds, 2 * self._logged_seconds):
            return
        self._logged_seconds, self._num_logged = seconds, self._num_logged + 1
        wait = f"step {self.step}, {self.where}, {own.awaited}"
        others = "; another rank has logged which ranks are awaited"
        if self._monitor.is_first("log", self._num_logged, self.epoch, wait):
            reports = enumerate(self._monitor.reports(self.epoch))
            stuck = {rank for rank, report in reports if report is not None and report.is_stuck}
            elsewhere = [rank for rank in range(self.num_ranks) if rank not in {*stuck, self.rank}]
            beats = {rank: self._monitor.heartbeat(rank) for rank in elsewhere[:_MAX_LOGGED_RANKS]}
            others = describe_elsewhere(elsewhere, beats)
        _log.warning("rank %d has waited for %.1f s: %s%s", self.rank, seconds, wait, others)

    def _end_step(self, error: StepError, *, raises_later: bool = False) -> StepError:
        """End the step on all ranks; return the error that all raise, the first published one."""
        assert self._monitor is not None
        agreed = error
        failure = replace(self._report(), failure=type(error).__name__, error=str(error))
        try:
            with contextlib.suppress(PeerLost):  # the store is gone, so no rank can read it
                agreed = self._monitor.announce(failure).raised
        finally:  # also after an interrupt: `recover` then waits for the other ranks
            if raises_later:  # in `raise_found`
                self._error = agreed
            self.is_broken = True
            for one in (error, agreed):
                if isinstance(one, PeerLost) and not isinstance(one, PeerSilent):
                    self._lost = one
            run_together([queue.stop for queue in self._monitored])
        return agreed

    def _end_lost(self, error: StepError) -> StepError:
        """End the step after a lost connection, unless the heartbeat thread has ended it."""
        with self._locked():
            found, self._error = self._error, None
            return found or (error if self.is_broken else self._end_step(error))

    # -- on the heartbeat thread -----------------------------------------------------------------

    def _beat(self, count: int) -> None:
        """Publish where this rank is, and check the device and the other ranks."""
        monitor = self._monitor
        if monitor is None:
            return  # the constructor has not returned
        make_current(self._device)
        report = self._report()
        histories = [q.history for q in self._monitored if isinstance(q, ProcessGroupCollectives)]
        marks = tuple(history.marks.copy() for history in histories)
        if self.is_broken:
            marks = ()  # aborted collectives count as ended
        try:
            monitor.beat(Heartbeat(count, report, marks))
        finally:  # a device may wait for other ranks even if the store cannot be reached
            with self._locked():
                if not self.is_broken:
                    self._look(monitor, report, histories)

    def _look(self, monitor: Monitor, report: Report, histories: Sequence[History]) -> None:
        self._report_torch_collective(monitor, report)
        if not histories:
            return  # without a device, the main thread waits itself
        error = self._look_at_device() or self._comparison.look(monitor, histories, self.epoch)
        if error is not None:
            self._end_step(error, raises_later=True)

    def _report_torch_collective(self, monitor: Monitor, report: Report) -> None:
        """Publish when the main thread is inside a collective of torch, and when it has left it."""
        parent = None if self._parent is None else self._parent()
        inside = set(collective_of(self._thread))
        members: list[int] = []
        if inside and parent is not None:
            with contextlib.suppress(KeyError):  # the program has destroyed the group
                members = dist.get_process_group_ranks(parent)
        ranks = tuple(i for i, rank in enumerate(members) if rank in inside)
        ranks = ranks if set(ranks) - {self.rank} else ()
        looks = self._torch_looks.look((ranks, report.queues))
        if ranks:
            monitor.publish(replace(report, looks=looks, blocked_with=ranks))
            # The main thread raises it when it is out of torch.
            if (error := monitor.judge(self.epoch)) is not None:
                failed = replace(report, failure=type(error).__name__, error=str(error))
                monitor.announce(failed)
        elif self._torch_ranks:
            monitor.publish(report)
        self._torch_ranks = ranks

    def _look_at_device(self) -> StepError | None:
        """Check whether the device is stuck: in a step, the host waits for no collective."""
        states, was_stuck = self._queues(), self._device_looks.count
        last_stack, self._stack = self._stack, fingerprint(self._thread)
        running = [state.running.label for state in states if state.running is not None]
        stuck = self._device_looks.look(states, has_moved=not running)
        if not stuck:
            self._restart_wait()
            if not was_stuck:
                return None
        looks = max(0, stuck - _DEVICE_GRACE)
        return self._look_at_peers(looks, ", ".join(running), self._stack != last_stack)

    def _report(self) -> Report:
        calls = calls_of(self._thread)
        return Report(self.epoch, 0, self.step, self.where, self._queues(), python=calls)

    def _queues(self) -> tuple[QueueState, ...]:
        return tuple(queue.state() for queue in self._monitored)


def note_place(error: BaseException, place: str) -> None:
    """Add to an error of this rank where it was raised ("step 3, ..."), if no note says so."""
    notes = getattr(error, "__notes__", ())
    if not (isinstance(error, ShardwiseError) or any(" in step " in note for note in notes)):
        error.add_note(f"raised in {place}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
