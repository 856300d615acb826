"""All-gather and reduce-scatter: the only file that calls torch.distributed's collectives.

A `Link` carries collectives of one kind, in order, on a process group and a lane of its own, so
that gathers and reductions never queue behind each other.

On Gloo a collective is written as exchanges between all pairs (`wire`), for its own are slow
(64 MB, 2 ranks: all-gather 28-36 ms against 117-194, reduce-scatter 33-41 against 160-185, for it
is an all-reduce there) and take a full-size scratch. Every exchange is tagged with its ticket:
ranks that disagree on what comes next wait for each other instead of mixing their numbers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PeerAborted, StepError
from shardwise.runtime.mesh import Axis
from shardwise.transport.device import Mark, make_lane
from shardwise.transport.health.status import LinkState, Report, Scope, Ticket
from shardwise.transport.host.point_to_point import Wire, window_elements
from shardwise.transport.host.shared_memory import DISAGREES, Claim, is_place
from shardwise.transport.scratch import is_cut, scratch_elements

__all__ = [
    "POLL_SECONDS",
    "Link",
    "Pending",
    "Reduction",
    "copy_from_first",
    "copy_scaled",
    "tell_from_first",
]

POLL_SECONDS = 1.0
_REPORT_BYTES = 8192
_CACHED_ELEMENTS = 1 << 17  # a copy of so many is still in the processor's cache

# Their names since torch 2.13, which warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way, in one exchange or several, one after the other."""

    tickets: tuple[Ticket, ...]
    marks: tuple[Mark, ...]

    @property
    def label(self) -> str:
        return self.tickets[0].label

    @property
    def is_done(self) -> bool:
        return all(mark.is_done for mark in self.marks)

    @property
    def error(self) -> BaseException | None:
        """Why it failed; the first reason."""
        return next((mark.error for mark in self.marks if mark.error is not None), None)

    def wait(self, timeout_seconds: float) -> bool:
        """Whether all exchanges ended, each after at most ``timeout_seconds``, or one failed."""
        for mark in self.marks:
            if not mark.wait(timeout_seconds):
                return False
            if mark.error is not None:
                return True
        return True


@dataclass(frozen=True, slots=True)
class Reduction:
    """The memory of one reduction, and how far it goes."""

    flat: Tensor  # [slots * M], what every rank has to add
    inner: Tensor  # [M], for the sum over the row; may be `out`, or this rank's slot of `flat`
    carried: Tensor | None  # [M], a sum over the row of earlier, to be added
    out: Tensor | None  # [M], or [S] if shards are cut in the column too; None: leave that out
    scratch: Tensor  # [scratch_elements]
    scale: float = 1.0  # what `out` is multiplied with, in its own dtype

    @property
    def is_cast(self) -> bool:
        """Whether the sum ends in another dtype than that of what is summed."""
        return self.out is not None and self.out.dtype != self.flat.dtype


class Link:
    """Collectives of one kind among the ranks of an axis, one after the other."""

    def __init__(self, axis: Axis, device: torch.device, name: str) -> None:
        backend = axis.backend(device.type)
        own = axis.group_rank
        self._members: dict[str, _Members] = {
            Scope.ALL: _Members(tuple(range(axis.num_ranks)), own),
            Scope.ROW: _Members(axis.row, own),
            Scope.COLUMN: _Members(axis.column, own),
        }
        self._members[Scope.SHARDS] = (
            _Members(axis.shard_ranks, own) if axis.is_two_level else self._members[Scope.ROW]
        )
        self._own = own
        self._topology = axis.topology
        self._direct = backend == "gloo"
        # Not the axis: it holds the group, under which this object is kept weakly.
        ranks = () if axis.group is None else dist.get_process_group_ranks(axis.group)
        self._new_group = partial(_new_group, tuple(ranks), backend)
        group = self._new_group(self._members[Scope.ALL])
        self._wire: Wire | None = None
        if self._direct and group is not None:
            self._wire = Wire(group, own, axis.num_ranks)
        # Whether all ranks are on one host, which lets them read each other's memory. Then what
        # they read to be summed passes through `_window`.
        others = [rank for _, rank in self._members[Scope.ALL].others()]
        is_cpu = device.type == "cpu"
        self.reads_memory = is_cpu and self._wire is not None and self._wire.can_read(others)
        self._window = torch.empty(0, dtype=torch.uint8, device="cpu")
        if not self._direct:
            for members in self._members.values():
                members.group = members.group or self._new_group(members)
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
    def sent(self) -> tuple[int, int]:
        """Exchanges so far, and the bytes that this rank sent in them; not those of a backend."""
        return (0, 0) if self._wire is None else (self._wire.num_exchanges, self._wire.sent_bytes)

    def scratch_elements(self, flat_elements: int, *, is_cast: bool = False) -> int:
        """How much scratch the reduction of a flat buffer needs, or one whose sum ``is_cast``."""
        if not self._direct or self.reads_memory:
            return 0
        row, column = self._members[Scope.ROW].size, self._members[Scope.COLUMN].size
        two_level = self._topology.is_two_level
        return scratch_elements(flat_elements, row, column, two_level=two_level, is_cast=is_cast)

    def all_gather(
        self,
        flat: Tensor,
        fill: Callable[[], None],
        label: str,
        *,
        scope: str = Scope.SHARDS,
        claim: Claim | None = None,
    ) -> Pending:
        """Give every rank the whole of ``flat``.

        Args:
            flat: [ranks * S], of which ``fill`` writes this rank's slot [S].
            fill: runs just before the slot is sent.
            label: what this is, in the words of the ledger.
            scope: the ranks; by default those whose shards make the model.
            claim: allows to have ``flat`` in memory that the ranks have in common; for all or none.
        """
        members = self._members[scope]
        gather = self._gathering(flat, members)
        slot_bytes = flat.nbytes // members.size
        if claim is None or not self._can_share(members):
            return self._submit(label, slot_bytes, scope, lambda ticket: gather(ticket.tag), fill)
        in_common = partial(self._gather_in_common, members, claim, fill, slot_bytes, gather)
        return self._submit(label, slot_bytes, scope, in_common, is_claimed=True)

    def all_gather_in_subgroup(
        self, flat: Tensor, fill: Callable[[], None], label: str, size: int
    ) -> Pending:
        """As `all_gather`, among this rank and its neighbours in groups of ``size`` of the row."""
        scope = str(size)
        if scope not in self._members:
            row = self._members[Scope.ROW]
            first = row.own // size * size
            members = _Members(row.ranks[first : first + size], self._own)
            members.group = None if self._direct else self._new_group(members)
            self._members[scope] = members
        return self.all_gather(flat, fill, label, scope=scope)

    def swap(self, pairs: dict[int, tuple[Tensor, Tensor]], label: str) -> Pending:
        """Send the first of each pair to its rank, and receive the second from it."""
        assert self._wire is not None
        exchange = self._wire.exchange
        return self._submit(label, 0, Scope.ALL, lambda ticket: exchange(pairs, ticket.tag))

    def reduce(self, reduction: Reduction, label: str) -> Pending:
        """Sum over all ranks, by row and then by column, in as many exchanges as that takes.

        Over the row it is a reduce-scatter. Over the column it is one too if shards are cut there,
        and otherwise an all-reduce, whose every rank gets the same bits.
        """
        stages = [self._sum_row(reduction, label)]
        if reduction.out is not None and self._members[Scope.COLUMN].size > 1:
            stages += self._sum_column(reduction, label)
        return Pending(
            tuple(ticket for stage in stages for ticket in stage.tickets),
            tuple(mark for stage in stages for mark in stage.marks),
        )

    def _submit(
        self,
        label: str,
        slot_bytes: int,
        scope: str,
        run: Callable[[Ticket], None],
        prepare: Callable[[], None] | None = None,
        *,
        is_claimed: bool = False,
    ) -> Pending:
        self._issued += 1
        ticket = Ticket(self._issued, label, slot_bytes, scope, is_claimed)

        def job() -> None:
            if prepare is not None and not self._stopped:
                prepare()  # if it raises, the ticket was not taken
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

        return Pending((ticket,), (self.lane.submit(job),))

    # -- in common memory ------------------------------------------------------------------------

    def _can_share(self, members: "_Members") -> bool:
        if members.can_share is None:  # once, for it takes longer the more they are
            wire = self._wire if members.size > 1 else None
            members.can_share = wire is not None and wire.can_share(members.ranks)
        return members.can_share

    def _gather_in_common(
        self,
        members: "_Members",
        claim: Claim,
        fill: Callable[[], None],
        slot_bytes: int,
        gather: Callable[[int], None],
        ticket: Ticket,
    ) -> None:
        """All write into the place of the first; or each in its own memory, and they ``gather``."""
        assert self._wire is not None
        others = [rank for _, rank in members.others()]
        failure: BaseException | None = None
        is_common = False
        try:
            words = self._wire.tell(others, claim.word, ticket.tag)
            first = members.ranks[0]
            place = words.get(first, claim.word)
            is_common = is_place(place) and all(map(claim.agrees, words.values()))
            if not is_common:
                claim.part()
            elif first != self._own:
                claim.move(self._wire.process_of(first), place)
            fill()
        except Exception as error:  # noqa: BLE001 - it is raised once the others know
            failure = error
        said = self._wire.tell(others, b"failed" if failure else b"filled", ticket.tag)
        if failure is not None:
            raise failure
        failed = [rank for rank, word in said.items() if word != b"filled"]
        if failed:
            raise PeerAborted(f"rank {failed[0]} could not take part in {ticket.label}")
        if is_common:
            self._wire.count(slot_bytes * len(others))
        else:
            gather(ticket.tag)

    # -- the stages of a reduction ---------------------------------------------------------------
    #
    # Views are made by the caller: an op on the lane would have to wait for the interpreter.

    def _sum_row(self, reduction: Reduction, label: str) -> Pending:
        members = self._members[Scope.ROW]
        flat, inner = reduction.flat, reduction.inner
        is_last = self._members[Scope.COLUMN].size == 1
        finish = _Finish(reduction.carried, reduction.out if is_last else None, reduction.scale)
        if members.size > 1 and self._direct:
            parts = flat.view(members.size, -1).unbind()
            sum_up = self._summing(members, parts, inner, reduction.scratch, finish)
            return self._submit(label, inner.nbytes, Scope.ROW, lambda ticket: sum_up(ticket.tag))

        def run(_ticket: Ticket) -> None:
            if members.size > 1:
                _reduce_scatter(inner, flat, group=members.group)
            elif inner.data_ptr() != flat.data_ptr():
                inner.copy_(flat)
            finish(inner, slice(None))

        return self._submit(label, inner.nbytes, Scope.ROW, run)

    def _sum_column(self, reduction: Reduction, label: str) -> Iterator[Pending]:
        members = self._members[Scope.COLUMN]
        inner, out, scratch = reduction.inner, reduction.out, reduction.scratch
        assert out is not None
        finish = _Finish(None, out, reduction.scale)
        total = inner
        if self._topology.is_two_level:
            total = inner.view(members.size, -1)[members.own] if reduction.is_cast else out

        def exchange(parts: Sequence[Tensor], total: Tensor, finish: _Finish) -> Pending:
            sum_up = self._summing(members, parts, total, scratch, finish)
            return self._submit(label, total.nbytes, Scope.COLUMN, lambda t: sum_up(t.tag))

        if not self._direct:

            def run(_ticket: Ticket) -> None:
                _sum_by_backend(inner, total, members.group)
                finish(total, slice(None))

            yield self._submit(label, total.nbytes, Scope.COLUMN, run)
        elif self._topology.is_two_level:
            yield exchange(inner.view(members.size, -1).unbind(), total, finish)
        elif not is_cut(inner.numel(), members.size):
            yield exchange([inner] * members.size, inner, finish)
        else:
            size = inner.numel() // members.size
            cut, rest = inner[: size * members.size], inner[size * members.size :]
            parts = cut.view(members.size, size)
            own = parts[members.own]
            stays = reduction.is_cast  # until it is whole
            yield exchange(list(parts), own, _Finish(None, None if stays else own, reduction.scale))
            gather = self._gathering(cut, members)
            slot_bytes = size * inner.itemsize
            yield self._submit(label, slot_bytes, Scope.COLUMN, lambda ticket: gather(ticket.tag))
            if rest.numel():
                of_rest = _Finish(None, None if stays else rest, reduction.scale)
                yield exchange([rest] * members.size, rest, of_rest)
            if stays:
                yield Pending((), (self.lane.submit(partial(finish, inner, slice(None))),))

    def _gathering(self, flat: Tensor, members: "_Members") -> Callable[[int], None]:
        """What gives every member the whole of ``flat``, each having filled its slot."""
        if members.size == 1 or not flat.numel():
            return lambda _tag: None
        slots = flat.view(members.size, -1).unbind()
        own = slots[members.own]
        if not self._direct:
            return lambda _tag: _gather_by_backend(flat, own, members)
        assert self._wire is not None
        pairs = {rank: (own, slots[i]) for i, rank in members.others()}
        return partial(self._wire.exchange, pairs)

    def _summing(
        self,
        members: "_Members",
        parts: Sequence[Tensor],
        total: Tensor,
        scratch: Tensor,
        finish: "_Finish",
    ) -> Callable[[int], None]:
        """What sends ``parts[i]`` to member i, and sums what comes and the own part in ``total``.

        In the order of the members, so that replicas get the same bits; then ``finish``.
        """
        if not total.numel():
            return lambda _tag: None
        assert self._wire is not None
        own_is_total = parts[members.own].data_ptr() == total.data_ptr()
        in_pieces = all(parts[i].data_ptr() != total.data_ptr() for i, _ in members.others())
        if self.reads_memory and in_pieces and finish.casts(total):
            return self._summing_in_windows(members, parts, finish)
        num_slots = members.size - 1 if own_is_total else members.size - 2
        size = total.numel()
        if self.reads_memory and num_slots:
            if in_pieces:
                size = min(size, window_elements(members.size, total.itemsize))
            scratch = self._windows(num_slots * size, total.dtype)
        free = [*torch.split(scratch[: num_slots * size], size)]
        if not own_is_total:
            free = [total, *free]
        received = {i: free[n] for n, (i, _) in enumerate(members.others())}
        pairs = {rank: (parts[i], received[i]) for i, rank in members.others()}
        received[members.own] = parts[members.own]

        def add(piece: slice) -> None:
            so_far = _piece_of(received[0], piece, total)
            for i in range(1, members.size):
                # The first that came is in the first sum, so its memory may have that.
                to = total if i == members.size - 1 else free[0]
                here = _piece_of(to, piece, total)
                so_far = torch.add(so_far, _piece_of(received[i], piece, total), out=here)
            finish(total, piece)

        exchange = self._wire.exchange
        if in_pieces:
            return partial(exchange, pairs, use=add)

        def sum_up(tag: int) -> None:
            exchange(pairs, tag)  # others read what `add` writes to
            add(slice(None))

        return sum_up

    def _summing_in_windows(
        self, members: "_Members", parts: Sequence[Tensor], finish: "_Finish"
    ) -> Callable[[int], None]:
        """As `_summing`, where the sum is nowhere but in ``finish.out``.

        The own part passes through a window, too: an addition of halves that are not in the
        processor's cache takes three times as long.
        """
        own, out = parts[members.own], finish.out
        assert self._wire is not None
        assert out is not None
        size = min(own.numel(), window_elements(members.size, own.itemsize))
        windows = torch.split(self._windows(members.size * size, own.dtype), size)
        pairs = {rank: (parts[i], windows[i]) for i, rank in members.others()}

        def add(piece: slice) -> None:
            terms = [_piece_of(window, piece, own) for window in windows]
            terms[members.own].copy_(own[piece])
            total = terms[0]
            for term in terms[1:]:
                total.add_(term)
            if finish.carried is not None:
                total.add_(finish.carried[piece])
            copy_scaled(out[piece], total, finish.scale)

        return partial(self._wire.exchange, pairs, use=add)

    def _windows(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Scratch that all exchanges share, for the lane runs one at a time."""
        num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(mode=False):  # the lane writes to it
            if self._window.numel() < num_bytes:
                self._window = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            return self._window[:num_bytes].view(dtype)

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
        rank = self._own
        running = {state.running.tag: state.running for state in states if state.running}
        for tag, ticket in sorted(running.items()):
            waiting = [
                other
                for other in self._topology.partners(ticket.scope, rank)
                if (theirs := states[other].running) is not None and theirs.tag == tag
            ]
            if self._wire is not None and not states[rank].took(ticket):
                if ticket.is_claimed:
                    self._wire.tell(waiting, DISAGREES, tag)
                    self._wire.tell(waiting, b"filled", tag)
                self._wire.exchange({peer: _dummies(ticket) for peer in waiting}, tag)
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
        received = [own] if self._wire is None else self._wire.swap(own, tag)
        return [_decode(encoded) for encoded in received]


class _Members:
    """Some ranks of a group, in order; ``own`` is the place of this one among them."""

    def __init__(self, ranks: tuple[int, ...], own_rank: int) -> None:
        self.ranks = ranks
        self.own = ranks.index(own_rank)
        self.group: dist.ProcessGroup | None = None  # theirs alone, where the backend wants one
        self.can_share: bool | None = None  # memory

    @property
    def size(self) -> int:
        return len(self.ranks)

    def others(self) -> list[tuple[int, int]]:
        """Place and rank of the others."""
        return [(i, rank) for i, rank in enumerate(self.ranks) if i != self.own]


def _new_group(
    ranks: tuple[int, ...], backend: str | None, members: _Members
) -> dist.ProcessGroup | None:
    """A process group of their own for ``members``; only they call this."""
    if members.size == 1:
        return None
    local = backend != "fake"  # the fake backend cannot, and has nobody to wait for
    group: dist.ProcessGroup = dist.new_group(
        sorted(ranks[rank] for rank in members.ranks),
        backend=backend,
        use_local_synchronization=local,
    )
    return group


def _gather_by_backend(flat: Tensor, own: Tensor, members: _Members) -> None:
    """Backends order slots by rank, which in a model cut over two axes is not that of shards."""
    by_rank = sorted(members.ranks)
    if by_rank == list(members.ranks):
        _all_gather(flat, own, group=members.group)
        return
    gathered = torch.empty_like(flat)
    _all_gather(gathered, own, group=members.group)
    slots = gathered.view(members.size, -1)
    torch.stack([slots[by_rank.index(rank)] for rank in members.ranks], out=flat.view_as(slots))


def _piece_of(tensor: Tensor, piece: slice, of: Tensor) -> Tensor:
    """A piece of what is as long as ``of``, or of what passes through a window."""
    if tensor.numel() < of.numel():
        piece = slice(piece.stop - piece.start)
    return tensor[piece]


@dataclass(frozen=True, slots=True)
class _Finish:
    """What is done to a sum."""

    carried: Tensor | None  # is added to it
    out: Tensor | None  # where it goes then, cast and scaled, unless it is there; None: it stays
    scale: float

    def casts(self, total: Tensor) -> bool:
        return self.out is not None and self.out.dtype != total.dtype

    def __call__(self, total: Tensor, piece: slice) -> None:
        if self.carried is not None:
            total[piece].add_(self.carried[piece])
        if self.out is not None:
            copy_scaled(self.out[piece], total[piece], self.scale)


def copy_scaled(to: Tensor, of: Tensor, scale: float) -> None:
    """Fill ``to`` [n] with ``scale`` times ``of`` [n], which may be the same; first it is cast."""
    size = max(1, len(to)) if to.is_cuda else _CACHED_ELEMENTS
    for into, piece in zip(torch.split(to, size), torch.split(of, size), strict=True):
        if into.data_ptr() != piece.data_ptr():
            into.copy_(piece)
        if scale != 1.0:
            into.mul_(scale)


def _sum_by_backend(inner: Tensor, out: Tensor, group: dist.ProcessGroup | None) -> None:
    if out.numel() < inner.numel():
        _reduce_scatter(out, inner, group=group)
    else:
        dist.all_reduce(inner, group=group)


def _dummies(ticket: Ticket) -> tuple[Tensor, Tensor]:
    sent = torch.zeros(ticket.slot_bytes, dtype=torch.uint8, device="cpu")
    return sent, torch.empty_like(sent)


def _encode(report: Report) -> Tensor:
    text = report.to_json().encode()
    return torch.frombuffer(bytearray(text.ljust(_REPORT_BYTES)), dtype=torch.uint8)


def _decode(encoded: Tensor) -> Report:
    return Report.from_json(bytes(encoded.tolist()))


def copy_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give every rank the values that the first of ``group`` has; between steps only."""
    if group is None or dist.get_backend(group) == "fake":
        return
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, group=group, group_src=0)
            tensor.copy_(dense)


def tell_from_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """What the first rank of ``group`` passes, on every rank; it is pickled."""
    told = [value]
    if group is not None and dist.get_backend(group) != "fake":
        dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]
