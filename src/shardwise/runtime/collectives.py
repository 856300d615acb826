"""All-gather and reduce-scatter: the only file that calls torch.distributed's collectives.

A `Link` carries collectives of one kind, in order, on a process group and a lane of its own, so
that gathers and reductions never queue behind each other. A `Communicator` is the pair of them.

On Gloo a collective is written as sends and receives between all pairs, for its own are slow
(64 MB, 2 ranks: all-gather 28-36 ms against 117-194, reduce-scatter 33-41 against 160-185, for it
is an all-reduce there) and take a full-size scratch. Every exchange is tagged with its ticket:
ranks that disagree on what comes next wait for each other instead of mixing their numbers.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PeerLost, RanksDiverged, StepError
from shardwise.runtime.device import Mark, make_lane
from shardwise.runtime.guard import Board, LinkState, Report, Ticket
from shardwise.runtime.guard import verdict as verdict_on
from shardwise.runtime.mesh import Axis

__all__ = ["Communicator", "Link", "Pending", "communicator"]

POLL_SECONDS = 1.0
_REPORT_BYTES = 8192

# One pair of links for each process group, however many models use it. Keyed by the group object,
# so ranks that live as threads of one process have their own.
_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]" = (
    weakref.WeakKeyDictionary()
)


# Their names since torch 2.13, which warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def communicator(axis: Axis, device: torch.device) -> "Communicator":
    """The links of ``axis``; the first call makes them, on all its ranks."""
    if axis.group is None:
        return Communicator(axis, device)
    # No lock: a group belongs to one rank, and making links waits for the others of the axis.
    if axis.group not in _communicators:
        _communicators[axis.group] = Communicator(axis, device)
    return _communicators[axis.group]


class Pending:
    """A collective under way."""

    def __init__(self, ticket: Ticket, mark: Mark) -> None:
        self.ticket = ticket
        self.mark = mark


class Link:
    """Collectives of one kind among the ranks of an axis, one after the other."""

    def __init__(self, axis: Axis, device: torch.device, name: str) -> None:
        self._size = axis.size
        self._rank = axis.rank
        backend = axis.backend(device.type)
        self._group = _new_group(axis, backend)
        self._direct = backend == "gloo"
        self.lane = make_lane(device, threaded=self._direct, name=f"shardwise-{name}")
        self._issued = 0
        self._running: Ticket | None = None
        self._ended: deque[int] = deque(maxlen=16)
        self._stopped = False
        self._lock = threading.Lock()

    @property
    def has_wire(self) -> bool:
        """Whether exchanges are point to point, so that ranks can be out of step for a while."""
        return self._direct

    @property
    def scratch_slots(self) -> int:
        """Slots of scratch that a reduce-scatter needs."""
        return self._size - 1 if self._direct else 0

    def all_gather(self, flat: Tensor, fill: Callable[[], None], label: str) -> Pending:
        """Give every rank the whole of ``flat``.

        Args:
            flat: [world_size * S], of which ``fill`` writes this rank's slot [S].
            fill: runs just before the slot is sent.
            label: what this is, in the words of the ledger.
        """

        def run(ticket: Ticket) -> None:
            fill()
            self._gather_slots(flat, ticket)

        return self._submit(label, flat.nbytes // self._size, run)

    def reduce_scatter(self, flat: Tensor, out: Tensor, scratch: Tensor, label: str) -> Pending:
        """Sum ``flat`` [world_size * S] over the ranks; this rank's slot goes to ``out`` [S].

        ``scratch`` [scratch_slots * S] is used on the way.
        """

        def run(ticket: Ticket) -> None:
            self._sum_slots(flat, out, scratch, ticket)

        return self._submit(label, out.nbytes, run)

    def _submit(self, label: str, slot_bytes: int, run: Callable[[Ticket], None]) -> Pending:
        self._issued += 1
        ticket = Ticket(self._issued, label, slot_bytes)

        def job() -> None:
            with self._lock:
                if self._stopped:
                    raise StepError(f"{ticket.label} was cancelled")
                self._running = ticket
            try:
                run(ticket)
            finally:
                with self._lock:
                    self._running = None
                    self._ended.append(ticket.tag)

        return Pending(ticket, self.lane.submit(job))

    # -- the collectives themselves, on the lane -------------------------------------------------

    def _gather_slots(self, flat: Tensor, ticket: Ticket) -> None:
        if self._group is None or not flat.numel():
            return
        slots = flat.view(self._size, -1)
        if not self._direct:
            _all_gather(flat, slots[self._rank], group=self._group)
            return
        own = slots[self._rank]
        self._exchange({peer: (own, slots[peer]) for peer in self._peers()}, ticket.tag)

    def _sum_slots(self, flat: Tensor, out: Tensor, scratch: Tensor, ticket: Ticket) -> None:
        if self._group is None:
            out.copy_(flat)
            return
        if not flat.numel():
            return
        if not self._direct:
            _reduce_scatter(out, flat, group=self._group)
            return
        slots = flat.view(self._size, -1)
        received = dict(zip(self._peers(), scratch.view(-1, out.numel()), strict=True))
        self._exchange({peer: (slots[peer], into) for peer, into in received.items()}, ticket.tag)
        received[self._rank] = slots[self._rank]
        # In the order of ranks, so that the sum does not depend on who computes it.
        torch.add(received[0], received[1], out=out)
        for rank in range(2, self._size):
            out.add_(received[rank])

    def _exchange(self, tensors: dict[int, tuple[Tensor, Tensor]], tag: int) -> None:
        """Send the first of each pair to its peer and receive the second from it."""
        works: list[tuple[int, dist.Work | None]] = []
        for peer, (_, received) in tensors.items():
            with self._connected_to(peer):
                work = dist.irecv(received, group=self._group, group_src=peer, tag=tag)
                works.append((peer, work))
        for peer, (sent, _) in tensors.items():
            with self._connected_to(peer):
                work = dist.isend(sent, group=self._group, group_dst=peer, tag=tag)
                works.append((peer, work))
        for peer, pending in works:
            with self._connected_to(peer):
                if pending is not None:
                    pending.wait()

    @contextlib.contextmanager
    def _connected_to(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"rank {self._rank} lost rank {peer}: {error}") from error

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    # -- coming back into step -------------------------------------------------------------------

    def state(self) -> LinkState:
        with self._lock:
            return LinkState(self._issued, self._running, tuple(self._ended))

    def stop(self) -> None:
        """Run no more tickets; the one that runs is left to end."""
        with self._lock:
            self._stopped = True

    def release(self, states: list[LinkState]) -> None:
        """Send what the others' running tickets wait for and this rank never took; start afresh."""
        own = states[self._rank]
        running = {state.running.tag: state.running for state in states if state.running}
        for tag, ticket in sorted(running.items()):
            if not own.took(ticket):
                waiting = [
                    r
                    for r, s in enumerate(states)
                    if s.running is not None and s.running.tag == tag
                ]
                self._exchange({peer: _dummies(ticket) for peer in waiting}, tag)
        idle = self.lane.submit(lambda: None)
        while not idle.wait(POLL_SECONDS):
            pass
        with self._lock:
            self._issued = max(state.issued for state in states)
            self._stopped = False

    def swap_reports(self, report: Report) -> list[Report]:
        """Every rank's report, straight over the wire; returns when all have come to this point."""
        tag = Ticket(report.epoch, "swap reports", _REPORT_BYTES).tag
        own = _encode(report)
        received = {peer: torch.zeros_like(own) for peer in self._peers()}
        self._exchange({peer: (own, received[peer]) for peer in self._peers()}, tag)
        received[self._rank] = own
        return [_decode(received[rank]) for rank in range(self._size)]


class Communicator:
    """The links of one axis, and what keeps its ranks from waiting for each other for ever."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        # Not the axis: it holds the group, under which this object is kept weakly.
        self.size = axis.size
        self.rank = axis.rank
        self.gather = Link(axis, device, "gather")
        self.reduce = Link(axis, device, "reduce")
        self._links = (self.gather, self.reduce)
        self._board = _board(axis) if self.gather.has_wire else None
        self._epoch = 0
        self._broken = False
        self.step = 0
        self.where = "before the first step"

    def wait(self, pending: Pending) -> None:
        """Return when compute may use the result.

        Raises:
            RanksDiverged: the ranks wait for different things.
            PeerAborted: another rank raised.
            PeerLost: another rank is gone.
        """
        beat = 0
        last: tuple[LinkState, ...] = ()
        while not pending.mark.wait(POLL_SECONDS):
            states = tuple(link.state() for link in self._links)
            beat = beat + 1 if states == last else 0
            last = states
            self._confer(self._report(beat, waits_for=pending.ticket.label))
        if last and self._board is not None:
            self._board.post(self._report(beat=0))
        if pending.mark.error is not None:
            self._broken = True
            raise pending.mark.error

    def abort(self, error: BaseException) -> None:
        """Tell the others that this rank raised, so that they need not wait for it."""
        if self._board is None or self._broken:
            return
        self._broken = True
        text = f"{type(error).__name__}: {error}"
        self._board.post(replace(self._report(0), error=text[:500]))

    def recover(self) -> None:
        """After an error: bring all ranks back into step. Costs nothing when there was none."""
        if not self._broken or self._board is None:
            return
        for link in self._links:
            link.stop()
        reports = self.gather.swap_reports(self._report(0))
        for position, link in enumerate(self._links):
            link.release([report.links[position] for report in reports])
        self._epoch += 1
        self._broken = False

    def _confer(self, report: Report) -> None:
        if self._board is None:
            return
        self._board.post(report)
        error = verdict_on(self._board.read(), self._epoch)
        if error is None:
            return
        self._broken = True
        diverged = isinstance(error, RanksDiverged)
        report = replace(self._report(0), error=str(error), relayed=True, diverged=diverged)
        self._board.post(report)
        raise error

    def _report(self, beat: int, *, waits_for: str | None = None) -> Report:
        where = self.where if waits_for is None else f"{self.where}, waits for {waits_for}"
        links = tuple(link.state() for link in self._links)
        return Report(self._epoch, beat, self.step, where, links)


def _new_group(axis: Axis, backend: str | None) -> dist.ProcessGroup | None:
    """A process group of its own over the ranks of ``axis``; only they call this."""
    if axis.group is None:
        return None
    ranks = dist.get_process_group_ranks(axis.group)
    local = backend != "fake"  # the fake backend cannot, and has nobody to wait for
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend=backend, use_local_synchronization=local
    )
    return group


def _board(axis: Axis) -> Board:
    assert axis.group is not None
    # The store has no public accessor; a store of our own would need an address of its own.
    store = dist.distributed_c10d._get_default_store()
    return Board(store, axis.group.group_name, axis.rank, axis.size)


def _dummies(ticket: Ticket) -> tuple[Tensor, Tensor]:
    sent = torch.zeros(ticket.slot_bytes, dtype=torch.uint8)
    return sent, torch.empty_like(sent)


def _encode(report: Report) -> Tensor:
    text = report.to_json().encode()
    return torch.frombuffer(bytearray(text.ljust(_REPORT_BYTES)), dtype=torch.uint8)


def _decode(encoded: Tensor) -> Report:
    return Report.from_json(bytes(encoded.tolist()))
