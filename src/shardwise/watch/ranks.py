"""What a rank does while it waits for others, and what its heartbeat thread does meanwhile."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm.api import RankGroup, Work
from shardwise.comm.communicator import Place, Watch
from shardwise.comm.device import ThreadStream, make_current, run_together
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.comm.queue import Collectives, QueueState
from shardwise.errors import PeerAborted, PeerLost, PeerSilent, StepError
from shardwise.watch.flight_record import PREFIX_VARIABLE, write_flight_record
from shardwise.watch.history import Comparison, History
from shardwise.watch.monitor import (
    Monitor,
    Patience,
    connect_to_store,
    describe_elsewhere,
    usual_patience,
)
from shardwise.watch.python_stack import calls_of, collective_of, fingerprint
from shardwise.watch.status import LookCounter, Report

__all__ = ["NUM_RECENT", "RankWatch", "RecentUnits"]

NUM_RECENT = 64  # ranks stall within a few units after they diverge
# A kernel may take long, so a device counts as stuck only after this many looks without progress.
_DEVICE_GRACE = 2
_MAX_LOGGED_RANKS = 4
_MAX_LISTED_RANKS = 16  # of a mesh, in messages

_log = logging.getLogger("shardwise")


class RecentUnits:
    """The last calls of units, numbered in each step."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, int, str]] = deque(maxlen=NUM_RECENT)  # step, call, unit

    def add(self, step: int, unit: str) -> None:
        """Add a call in ``step``."""
        last, call, _ = self._calls[-1] if self._calls else (step, 0, "")
        self._calls.append((step, call + 1 if last == step else 1, unit))

    def of(self, step: int) -> tuple[tuple[int, str], ...]:
        """Return number and unit of each call in ``step``."""
        calls = self._calls.copy()  # the main thread may add one
        return tuple((call, unit) for at, call, unit in calls if at == step)


class SlowWait:
    """The length of a wait, which is logged each time that it has become twice as long."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.logged_seconds = 0.0  # when it was last due
        self.num_logged = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def is_due(self, first_seconds: float) -> bool:
        """Whether to log it now; the first time after ``first_seconds``."""
        seconds = self.seconds
        if seconds < max(first_seconds, 2 * self.logged_seconds):
            return False
        self.logged_seconds, self.num_logged = seconds, self.num_logged + 1
        return True


class RankWatch(Watch):
    """Watches the other ranks for one rank. A wait that cannot end raises an error.

    The error says what each rank waits for. Methods without a description are those of `Watch`.
    """

    is_active = True

    def __init__(
        self,
        world: RankGroup,
        device: torch.device,
        queues: Sequence[Collectives],
        place: Place,
        patience: Patience | None = None,
    ) -> None:
        assert world.parent is not None
        self._device = device
        self._rank, self._num_ranks = world.own_rank, world.size
        self._parent = weakref.ref(world.parent)
        self._numbering = _numbering(self._ranks_in_job())
        self._queues = queues
        self.place = place
        self.patience = patience = patience or usual_patience()
        self._on_device = [one for one in queues if isinstance(one, ProcessGroupCollectives)]
        self._lost: StepError | None = None  # why the process group can never be used again
        self._recovery: Work | None = None  # in progress
        self._entered = RecentUnits()
        self._known_states: tuple[QueueState, ...] = ()  # of the queues, at the last look
        # The heartbeat thread uses all that follows.
        self._lock = threading.Lock()  # held while it checks others, and by `abort`
        self._lockers: set[int] = set()  # the thread that holds it, and those that are about to
        self._device_wait = SlowWait()
        self._error: StepError | None = None  # that it found, for the main thread to raise
        self._device_looks = LookCounter()  # at collectives that run on the device
        self._torch_looks = LookCounter()  # at the main thread in a collective of torch
        self._torch_ranks: tuple[int, ...] = ()  # of this collective
        self._follow_queues()
        self._stack = 0  # fingerprint of the main thread at the last look
        self._thread = threading.get_ident()  # the main thread: it runs the model
        self._monitor = Monitor(
            connect_to_store(patience),
            f"{world.parent.group_name}/{queues[0].name}",
            self._rank,
            self._num_ranks,
            patience,
            weakref.WeakMethod(self._beat),
            place,
        )
        _watches.add(self)

    def leave_to_parent(self) -> None:
        """In a forked process, which has neither the threads nor the connections of its parent."""
        self._lock, self._lockers, self._error = threading.Lock(), set(), None
        self.is_broken = True  # so that `recover` raises, and nothing is sent to other ranks
        self._lost = StepError(
            f"process {os.getpid()} was forked from rank {self._rank} after it had sharded the "
            "model, and has no connections to other ranks; call the model in the process of the "
            "rank only: not in a DataLoader's worker, for instance"
        )

    def _follow_queues(self) -> None:
        self._histories = [History() for _ in self._on_device]
        for queue, history in zip(self._on_device, self._histories, strict=True):
            queue.observer = history
        self._comparison = Comparison(self._rank)

    @property
    def is_locked_here(self) -> bool:
        return threading.get_ident() in self._lockers

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._lockers.add(thread)  # first: the garbage collector may run a destructor anywhere
        try:
            with self._lock:
                yield
        finally:
            self._lockers.discard(thread)

    def enter(self, unit: str) -> None:
        self._entered.add(self.place.step, unit)
        self._thread = threading.get_ident()

    def wait(self, work: Work) -> None:
        self.raise_found()
        collective = work.collective
        awaited = "an exchange" if collective is None else collective.label
        looks: LookCounter | None = None
        wait = SlowWait()
        while not work.wait(self.patience.poll_seconds):
            looks = looks or LookCounter()
            states = self._states()
            # It may be over: on a busy machine, the stream's thread may not have marked it as done
            # yet. A work without a collective waits for something else, such as other replicas.
            is_over = collective is None or any(collective.tag in s.ended for s in states)
            looks.look(states, has_moved=is_over)
            error = self._look_at_peers(looks.count, awaited, wait)
            if isinstance(error, PeerAborted) and work.wait(self.patience.poll_seconds):
                # It has ended, or the other rank has closed the connections between CPUs. On a
                # rank that raises itself, its own error counts.
                break
            if error is not None:
                raise self._end_step(error)
        if looks is not None:
            self._monitor.publish(self._report())

    def failed(self, error: BaseException) -> None:
        self.raise_found()
        if isinstance(error, PeerLost):
            lost = self._explained(error)
            with self._locked():  # the heartbeat thread may have ended the step
                found, self._error = self._error, None
                raise found or (lost if self.is_broken else self._end_step(lost))

    def check_peers(self) -> None:
        self._monitor.check_heartbeats()

    def abort(self, error: BaseException) -> None:
        with self._locked():
            self._error = None  # this rank raises its own
            if not self.is_broken:
                place = f"step {self.place.step}, {self.place.where}"
                aborted = PeerAborted(f"rank {self._rank} gave up in {place}: {_describe(error)}")
                self._end_step(error if isinstance(error, PeerLost) else aborted)

    def recover(self) -> None:
        is_broken = self.is_broken  # read first: the heartbeat thread sets the error before it
        self.raise_found()
        if not is_broken:
            return
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        if self._recovery is None:
            self._recovery = ThreadStream("shardwise-recovery").submit(self._synchronize)
        wait = SlowWait()
        while not self._recovery.wait(self.patience.poll_seconds):
            self.check_peers()
            self._log_slow_recovery(wait)
        recovery, self._recovery = self._recovery, None
        if recovery.error is not None:
            if isinstance(recovery.error, PeerLost) and not isinstance(recovery.error, PeerSilent):
                self._lost = recovery.error
            raise recovery.error
        self.epoch += 1
        self.is_broken = False
        self._entered = RecentUnits()

    def _synchronize(self) -> None:
        """Continue together with all ranks. It runs on a thread."""
        make_current(self._device)
        self._monitor.meet(self.epoch)
        for queue in self._queues:
            queue.restart(self.epoch + 1)
        self._follow_queues()

    def raise_found(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            with self._locked():  # until the heartbeat thread, which found it, has ended the step
                raise error

    # -- a wait that takes long ------------------------------------------------------------------

    def _look_at_peers(
        self, looks: int, awaited: str, wait: SlowWait, is_host_busy: bool = False
    ) -> StepError | None:
        """Publish a report of this rank; return an error if no rank can move, or one is gone.

        This rank waits for the collective ``awaited`` and has not moved for ``looks`` looks.
        """
        report = replace(
            self._report(),
            looks=looks,
            awaited=awaited,
            is_host_busy=is_host_busy,
            entered=self._entered.of(self.place.step),
        )
        try:
            self._monitor.publish(report)
            self._monitor.check_reports(self.epoch)
            where = f"; step {self.place.step}, {self.place.where}, waits for {awaited}"
            self._monitor.check_heartbeats(where)
            self._log_slow_wait(report, wait)
        except StepError as error:
            return self._explained(error)
        return None

    def _explained(self, error: StepError) -> StepError:
        """Return ``error`` with the positions of all ranks, if another one is lost."""
        if isinstance(error, PeerLost):
            with contextlib.suppress(PeerLost):  # the store is gone
                return self._monitor.explain(error, self.epoch)
        return error

    def _log_slow_wait(self, own: Report, wait: SlowWait) -> None:
        """Log the wait if it is long.

        Of the ranks that wait for the same, the first reads which ranks they wait for.
        """
        if not wait.is_due(self.patience.log_seconds):
            return
        place = f"step {self.place.step}, {self.place.where}, {own.awaited}"
        others = "; another rank has logged which ranks are awaited"
        if self._monitor.is_first("log", wait.num_logged, self.epoch, place):
            reports = enumerate(self._monitor.reports(self.epoch))
            stuck = {rank for rank, report in reports if report is not None and report.is_stuck}
            elsewhere = [
                rank for rank in range(self._num_ranks) if rank not in {*stuck, self._rank}
            ]
            beats = {rank: self._monitor.heartbeat(rank) for rank in elsewhere[:_MAX_LOGGED_RANKS]}
            others = describe_elsewhere(elsewhere, beats)
        others += self._numbering
        seconds = wait.logged_seconds  # without those that the store took to answer
        _log.warning("rank %d has waited for %.1f s: %s%s", self._rank, seconds, place, others)

    def _log_slow_recovery(self, wait: SlowWait) -> None:
        """Log a long wait for ranks that have not called anything since an error; one rank does."""
        if wait.is_due(self.patience.log_seconds) and self._monitor.is_first(
            "recovery", wait.num_logged, self.epoch
        ):
            absent = self._monitor.absent(self.epoch, _MAX_LOGGED_RANKS)
            others = describe_elsewhere(
                absent, {one: self._monitor.heartbeat(one) for one in absent}
            )
            text = "rank %d has waited for %.1f s to go on after an error%s"
            _log.warning(text, self._rank, wait.logged_seconds, others + self._numbering)

    def _end_step(self, error: StepError, *, raises_later: bool = False) -> StepError:
        """End the step on all ranks; return the error that all raise, the first published one."""
        agreed = error
        text = str(error)
        if self._numbering not in text:  # on a line of its own below a table of ranks
            is_table = "\n" in text
            text += "\n" + self._numbering.removeprefix("; ") if is_table else self._numbering
        failure = replace(self._report(), failure=type(error).__name__, error=text)
        try:
            with contextlib.suppress(PeerLost):  # the store is gone, so no rank can read it
                agreed = self._monitor.announce(failure).raised
        finally:  # also after an interrupt: `recover` then waits for the other ranks
            if raises_later:  # in `raise_found`
                self._error = agreed
            self.is_broken = True
            if isinstance(agreed, PeerLost) and not isinstance(agreed, PeerSilent):
                self._lost = agreed
            try:
                self._write_flight_records()
            finally:
                run_together([queue.stop for queue in self._queues])
        return agreed

    def _ranks_in_job(self) -> list[int]:
        """The numbers of these ranks in the job; those in the mesh if its group is gone."""
        parent = self._parent()
        if parent is not None:
            with contextlib.suppress(KeyError):  # the program has destroyed the group
                return dist.get_process_group_ranks(parent)
        return list(range(self._num_ranks))

    def _write_flight_records(self) -> None:
        prefix = os.environ.get(PREFIX_VARIABLE)
        if not prefix:
            return
        members = self._ranks_in_job()
        for queue in self._on_device:
            path = Path(f"{prefix}{queue.name.replace('/', '_')}_{members[self._rank]}")
            with contextlib.suppress(OSError):  # the error is more important than the record
                write_flight_record(path, str(queue.backend), members, queue.recent())

    # -- on the heartbeat thread -----------------------------------------------------------------

    def _beat(self, count: int) -> None:
        """Publish where this rank is, and check the device and the other ranks."""
        monitor: Monitor | None = getattr(self, "_monitor", None)
        if monitor is None:
            return  # the constructor has not returned
        make_current(self._device)
        report = self._report()
        marks = tuple(history.marks.copy() for history in self._histories)
        if self.is_broken:
            marks = ()  # aborted collectives count as ended
        try:
            monitor.beat(replace(report, count=count, marks=marks))
        finally:  # a device may wait for other ranks even if the store cannot be reached
            with self._locked():
                if not self.is_broken:
                    self._look(monitor, report)

    def _look(self, monitor: Monitor, report: Report) -> None:
        self._report_torch_collective(monitor, report)
        if not self._on_device:
            return  # without a device, the main thread waits itself
        error = self._look_at_device() or self._comparison.look(
            monitor, self._histories, self.epoch
        )
        if error is not None:
            self._end_step(error, raises_later=True)

    def _report_torch_collective(self, monitor: Monitor, report: Report) -> None:
        """Publish when the main thread is inside a collective of torch, and when it has left it."""
        parent = self._parent()
        inside = set(collective_of(self._thread))
        members: list[int] = []
        if inside and parent is not None:
            with contextlib.suppress(KeyError):  # the program has destroyed the group
                members = dist.get_process_group_ranks(parent)
        ranks = tuple(i for i, rank in enumerate(members) if rank in inside)
        ranks = ranks if set(ranks) - {self._rank} else ()
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
        states, was_stuck = self._states(), self._device_looks.count
        last_stack, self._stack = self._stack, fingerprint(self._thread)
        running = [state.running.label for state in states if state.running is not None]
        stuck = self._device_looks.look(states, has_moved=not running)
        if not stuck:
            self._device_wait = SlowWait()
            if not was_stuck:
                return None
        looks = max(0, stuck - _DEVICE_GRACE)
        is_host_busy = self._stack != last_stack
        return self._look_at_peers(looks, ", ".join(running), self._device_wait, is_host_busy)

    def _report(self) -> Report:
        calls = calls_of(self._thread)
        return Report(
            self.epoch, 0, self.place.step, self.place.where, self._states(), python=calls
        )

    def _states(self) -> tuple[QueueState, ...]:
        with contextlib.suppress(RuntimeError):  # a device that has failed cannot be asked
            self._known_states = tuple(queue.state() for queue in self._queues)
        return self._known_states


_watches: "weakref.WeakSet[RankWatch]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for watch in [*_watches]:
        watch.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _numbering(members: list[int]) -> str:
    """How the ranks of a mesh are numbered in the job; nothing if the mesh has all of them."""
    if members == list(range(len(members))):
        return ""
    shown = [str(rank) for rank in members]
    if len(shown) > _MAX_LISTED_RANKS:
        shown[_MAX_LISTED_RANKS // 2 : -1] = ["..."]
    return f"; ranks of this mesh, in order, are {', '.join(shown)} of the job"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
