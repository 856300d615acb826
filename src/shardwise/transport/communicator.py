"""The pair of links of an axis, and what keeps its ranks from waiting for each other for ever."""

import contextlib
import weakref
import zlib
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwise.errors import PeerLost, RanksDiverged
from shardwise.runtime.mesh import Axis
from shardwise.transport.collectives import POLL_SECONDS, Link, Pending
from shardwise.transport.health.heartbeat import STOPPED_SECONDS, Pulse
from shardwise.transport.health.status import Board, LinkState, Report, Topology, Trail, verdict

__all__ = ["Communicator", "communicator"]

# One pair of links for each process group and way to shard over it, however many models use them.
# Keyed by the group object, so ranks that live as threads of one process have their own.
_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Topology, Communicator]]" = (
    weakref.WeakKeyDictionary()
)


def communicator(axis: Axis, device: torch.device) -> "Communicator":
    """The links of ``axis``; the first call makes them, on all its ranks."""
    if axis.group is None:
        return Communicator(axis, device)
    # No lock: a group belongs to one rank, and making links waits for the others of the axis.
    of_group = _communicators.setdefault(axis.group, {})
    if axis.topology not in of_group:
        of_group[axis.topology] = Communicator(axis, device)
    return of_group[axis.topology]


class Communicator:
    """A link for gathers and one for reductions, whose waits end."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        # Not the axis: it holds the group, under which this object is kept weakly.
        self.num_ranks = axis.num_ranks
        self.rank = axis.group_rank
        self._topology = axis.topology
        self.gather = Link(axis, device, "gather")
        self.reduce = Link(axis, device, "reduce")
        self._links = (self.gather, self.reduce)
        store = _store() if self.gather.has_wire else None
        where = (_name(axis), axis.group_rank, axis.num_ranks)
        self._board = None if store is None else Board(store, *where)
        self._pulse = None if store is None else Pulse(store, *where)
        self.epoch = 0  # how often the ranks were brought back into step
        self._broken = False
        self._lost: PeerLost | None = None
        self.step = 0
        self.where = "before the first step"
        self.trail = Trail()

    def wait(self, pending: Pending) -> None:
        """Return when compute may use the result.

        Raises:
            RanksDiverged: the ranks wait for different things.
            PeerAborted: another rank raised.
            PeerLost: another rank is gone.
        """
        beat = 0
        last: tuple[LinkState, ...] = ()
        while not pending.wait(POLL_SECONDS):
            states = tuple(link.state() for link in self._links)
            # Its thread may have ended it and not come to say so yet, on a busy machine.
            is_over = any(pending.tickets[-1].tag in state.ended for state in states)
            beat = beat + 1 if states == last and not is_over else 0
            last = states
            report = self._report(beat, waits_for=pending.label)
            trail = self.trail
            self._confer(replace(report, num_entered=trail.num_entered, entered=trail.entered))
        if last and self._board is not None:
            self._board.post(self._report(beat=0))
        if pending.error is not None:
            self.abort(pending.error)
            raise pending.error

    def check_pulses(self) -> None:
        """To be called every now and then while this rank waits for others.

        Raises:
            PeerLost: a process was stopped; see `Pulse`.
        """
        if self._pulse is not None:
            self._pulse.check()

    @property
    def is_broken(self) -> bool:
        """Whether an error has reached the ranks since they were last in step."""
        return self._broken

    def abort(self, error: BaseException) -> None:
        """Tell the others that this rank raised, so that they need not wait for it."""
        if self._board is None or self._broken:
            return
        self._broken = True
        text = str(error) if isinstance(error, PeerLost) else f"{type(error).__name__}: {error}"
        self._tell(replace(self._report(0), error=text[:500]), error)

    def recover(self) -> None:
        """After an error: bring all ranks back into step. Costs nothing when there was none."""
        if not self._broken or self._board is None:
            return
        if self._lost is not None:
            raise PeerLost(str(self._lost))
        for link in self._links:
            link.stop()
        try:
            reports = self.gather.swap_reports(self._report(0))
        except PeerLost as error:
            self._lost = error
            raise
        for position, link in enumerate(self._links):
            link.release([report.links[position] for report in reports])
        self.epoch += 1
        self._broken = False
        self.trail.clear()

    def _confer(self, report: Report) -> None:
        if self._board is None:
            return
        try:
            self._board.post(report)
            error = verdict(self._board.read(), self.epoch, self._topology)
            if error is None:
                self.check_pulses()
        except PeerLost as lost:
            error = lost
        if error is None:
            return
        self._broken = True
        diverged = isinstance(error, RanksDiverged)
        report = replace(self._report(0), error=str(error), relayed=True, diverged=diverged)
        self._tell(report, error)
        raise error

    def _tell(self, report: Report, error: BaseException) -> None:
        if isinstance(error, PeerLost):
            self._lost = error
            report = replace(report, lost=True)
        assert self._board is not None
        with contextlib.suppress(PeerLost):  # then nobody can be told
            self._board.post(report)

    def _report(self, beat: int, *, waits_for: str | None = None) -> Report:
        where = self.where if waits_for is None else f"{self.where}, waits for {waits_for}"
        links = tuple(link.state() for link in self._links)
        return Report(self.epoch, beat, self.step, where, links)


def _store() -> Store:
    """The job's store, by a connection of our own.

    So nobody's wait on it stops the sign of life, and where the process that holds it was stopped,
    we do not wait as long as the job would.
    """
    # It has no public accessor; a store of our own would need an address of its own.
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=STOPPED_SECONDS))
    return store


def _name(axis: Axis) -> str:
    group = "" if axis.group is None else axis.group.group_name
    return f"{group}/{zlib.crc32(repr(axis.topology).encode())}"
