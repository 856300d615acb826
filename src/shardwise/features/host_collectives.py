"""Collectives between CPUs, built from exchanges between all pairs of ranks.

Gloo's own collectives are slower (64 MB, 2 ranks: all-gather 117-194 ms instead of 28-36,
reduce-scatter, which is an all-reduce there, 160-185 instead of 33-41) and need scratch memory of
full size. Every exchange has the tag of its collective, so ranks that disagree on the next one wait
for each other instead of mixing their numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from shardwise._private import group_timeout
from shardwise.comm.api import (
    CollectiveId,
    Hop,
    Operation,
    RankGroup,
    Reduction,
    Sent,
    SharedBuffer,
    Step,
    Work,
)
from shardwise.comm.communicator import WaitUntil
from shardwise.comm.device import ThreadStream, copy_scaled_
from shardwise.comm.queue import Collectives, QueueState
from shardwise.errors import PeerAborted, PeerLost, StepError
from shardwise.host.point_to_point import PointToPoint, RankLostError, Run, check_memory, parts_of
from shardwise.host.shared_memory import Place, SharedMemory

__all__ = ["HostCollectives"]

_MAX_TEXT = 500  # characters of an error that other ranks get
_LOST = b"lost"  # in the place of such an error
_Exchange = tuple[CollectiveId, Run]


class HostCollectives(Collectives):
    """A queue of collectives among the ranks of ``world``, which run on a thread.

    Methods without a description are those of `Collectives`.
    """

    stream: ThreadStream

    def __init__(self, world: RankGroup, name: str, wait: WaitUntil | None = None) -> None:
        super().__init__(world, name)
        assert world.parent is not None
        self._store, self._time_limit = world.parent.get_group_store(), group_timeout(world.parent)
        self._connect(wait)
        self.stream = ThreadStream(f"shardwise-{name}")
        self._begun = 0
        self._running: CollectiveId | None = None

    def _connect(self, wait: WaitUntil | None = None) -> None:
        store = PrefixStore(f"{self.name}/{self._epoch}", self._store)
        size = len(self._ranks)
        self.point_to_point = PointToPoint(store, self._own_rank, size, self._time_limit, wait)

    def all_gather(
        self,
        flat: Tensor,
        group: RankGroup,
        label: str,
        fill: Callable[[], None] | None = None,
        shared: SharedBuffer | None = None,
    ) -> Work:
        gather = self._gathering(flat.view(group.size, -1).unbind(), group)
        slot_bytes = flat.nbytes // group.size
        if shared is None or group.size == 1 or not self.point_to_point.host.can_share(group.ranks):
            return self._submit([(self._next_id(label, group, slot_bytes), gather)], fill)

        memory = shared.memory
        assert isinstance(memory, SharedMemory)
        own = memory.locate(shared.address, shared.in_use)
        agree = partial(self._agree_on_memory, group, shared, memory, *own)

        def run(tag: int) -> None:
            if not self._fill_shared(group, agree, fill, label, tag):
                gather(tag)

        return self._submit([(self._next_id(label, group, slot_bytes), run)])

    def exchange(self, pairs: Mapping[int, tuple[Tensor, Tensor]], label: str) -> Work:
        check_memory(tensor for pair in pairs.values() for tensor in pair)
        ranks = tuple(sorted({*pairs, self._own_rank}))
        collective = replace(self._next_id(label, self.world, 0), ranks=ranks)
        work = self._submit([(collective, partial(self.point_to_point.exchange, pairs))])
        work.sent = tuple(
            Sent((self._own_rank, rank), sent.nbytes) for rank, (sent, _) in pairs.items()
        )
        self._count(1, sum(one.num_bytes for one in work.sent))
        return work

    def reduce(self, reduction: Reduction, label: str) -> Work:
        # Always in a tree.
        inner, out, scale = reduction.inner, reduction.out, reduction.scale
        first, *rest = reduction.stages
        rows = reduction.flat.view(first.group.size, -1).unbind()
        target = None if rest else out
        exchanges = [self._sum(label, first.group, rows, inner, target, scale, reduction.carried)]
        if not rest:
            return self._submit(exchanges)
        [second] = rest
        group = second.group
        if second.operation is Operation.REDUCE_SCATTER:
            rows, total = inner.view(group.size, -1).unbind(), reduction.scattered(group)
            return self._submit([*exchanges, self._sum(label, group, rows, total, out, scale)])
        if out is not None and reduction.is_cast:
            exchanges += self._all_reduce(label, inner, group, 1.0)
            return self._submit(exchanges, finish=partial(copy_scaled_, out, inner, scale))
        return self._submit([*exchanges, *self._all_reduce(label, inner, group, scale)])

    def all_reduce_max(self, values: Tensor, group: RankGroup, label: str) -> Work:
        # For few values.
        rows = values.repeat(group.size, 1)  # [ranks, n]
        gather = self._gathering(rows.unbind(), group)
        exchange = self._next_id(label, group, values.nbytes), gather
        return self._submit([exchange], finish=lambda: torch.amax(rows, 0, out=values))

    def relay(self, steps: Sequence[Step], label: str) -> Work:
        hops = [step for step in steps if isinstance(step, Hop)]
        ids = [self._next_id(label, hop.group, hop.row_bytes) for hop in hops]

        def job() -> None:
            numbered = iter(ids)
            for step in steps:
                if isinstance(step, Hop):
                    self._run_hop(step, next(numbered))
                else:
                    step()

        return self._launch(job, ids)

    # -- the queue -------------------------------------------------------------------------------

    def _submit(
        self,
        exchanges: Sequence[_Exchange],
        prepare: Callable[[], None] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> Work:
        def job() -> None:
            if prepare is not None and not self._is_stopped:
                prepare()  # if it raises, the exchange was not begun
            for collective, run in exchanges:
                self._perform(collective, run)
            if finish is not None:
                finish()

        return self._launch(job, [collective for collective, _ in exchanges])

    def _launch(self, job: Callable[[], None], collectives: Sequence[CollectiveId]) -> Work:
        work = self.stream.submit(job, collectives[-1])
        work.sent = tuple(Sent(each.ranks, each.slot_bytes) for each in collectives)
        sizes = [(len(ranks) - 1) * num_bytes for ranks, num_bytes in work.sent]
        self._count(sum(map(bool, sizes)), sum(sizes))
        return work

    def _count(self, num_exchanges: int, num_bytes: int) -> None:
        self.sent = self.sent[0] + num_exchanges, self.sent[1] + num_bytes

    def _perform(self, collective: CollectiveId, run: Run) -> None:
        self._begin(collective)
        try:
            run(collective.tag)
        except RankLostError as error:
            raise PeerLost(str(error)) from (error.__cause__ or error)
        finally:
            with self._lock:
                self._running = None
                self._ended.append(collective)

    def _begin(self, collective: CollectiveId) -> None:
        with self._lock:
            if self._is_stopped:
                raise StepError(f"{collective.label} was cancelled")
            self._running = collective
            self._begun += 1

    def _run_hop(self, hop: Hop, collective: CollectiveId) -> None:
        if self._is_stopped:
            raise StepError(f"{collective.label} was cancelled")
        sent, rows = hop.prepare(torch.device("cpu"))  # if it raises, the exchange was not begun
        own = [sent] * hop.group.size if hop.gathers else sent.unbind()
        pairs = {rank: (own[i], rows[i]) for i, rank in hop.group.others}
        self._perform(collective, partial(self.point_to_point.exchange, pairs))
        hop.decode(rows)

    # -- gathers ---------------------------------------------------------------------------------

    def _gathering(self, slots: Sequence[Tensor], group: RankGroup) -> Run:
        """Return a function that sends this rank's slot [S] and receives the others."""
        own = slots[group.index]
        if group.size == 1 or not own.numel():
            return lambda _tag: None
        check_memory([own])
        pairs = {rank: (own, slots[i]) for i, rank in group.others}
        return partial(self.point_to_point.exchange, pairs)

    def _fill_shared(
        self,
        group: RankGroup,
        agree: Callable[[int], bool],
        fill: Callable[[], None] | None,
        label: str,
        tag: int,
    ) -> bool:
        """Fill this rank's slot, in the range of the first rank or else in private memory.

        Returns:
            Whether the ranks share the range, so that nothing has to be exchanged.
        """
        is_shared, failure = False, None
        try:
            is_shared = agree(tag)
            if fill is not None:
                fill()
        except Exception as error:  # noqa: BLE001 - raised after the other ranks know
            failure = error
        outcome = b"filled"
        if failure is not None:
            text = f"{type(failure).__name__}: {failure}"[:_MAX_TEXT]
            # The reason is that of the rank that is lost, for which the others look themselves.
            outcome = _LOST if isinstance(failure, RankLostError) else text.encode()
        outcomes = self.point_to_point.swap_messages(_other_ranks(group), outcome, tag)
        if failure is not None:
            raise failure
        for rank, other in outcomes.items():
            if other.content == _LOST:
                raise RankLostError(f"rank {rank} lost another rank")
            if other.content != b"filled":
                text = other.content.decode(errors="replace")
                raise PeerAborted(f"rank {rank} could not take part in {label}: {text}")
        return is_shared

    def _agree_on_memory(
        self,
        group: RankGroup,
        shared: SharedBuffer,
        memory: SharedMemory,
        own: Place,
        descriptor: int,
        tag: int,
    ) -> bool:
        """Move to the range of the first rank, if all ranks use the same buffers."""
        first = group.ranks[0]
        is_first = first == self._own_rank
        messages = self.point_to_point.swap_messages(
            _other_ranks(group), own.pack(), tag, descriptor if is_first else -1
        )
        places = {rank: Place.unpack(one.content) for rank, one in messages.items()}
        place = own if is_first else places[first]
        agrees = all(other.in_use == own.in_use for other in places.values())
        if not (agrees and place.number):
            shared.replace(None)
            return False
        if not is_first:
            file = messages[first].file
            if file is None:
                raise OSError(
                    f"the file of the memory of rank {first} did not arrive; perhaps this rank has "
                    "too many open files (ulimit -n)"
                )
            shared.replace(memory.open(file, place, shared.num_bytes))
        return True

    # -- the stages of a reduction ---------------------------------------------------------------

    def _all_reduce(
        self, label: str, inner: Tensor, group: RankGroup, scale: float
    ) -> Iterator[_Exchange]:
        """Yield the exchanges that leave ``scale`` times the sum in ``inner``."""
        rows, rest = parts_of(inner, group.size)
        if rows:
            own = rows[group.index]
            yield self._sum(label, group, rows, own, own, scale)
            yield self._next_id(label, group, own.nbytes), self._gathering(rows, group)
        if rest.numel():
            yield self._sum(label, group, [rest] * group.size, rest, rest, scale)

    def _sum(
        self,
        label: str,
        group: RankGroup,
        parts: Sequence[Tensor],
        total: Tensor,
        out: Tensor | None,
        scale: float,
        carried: Tensor | None = None,
    ) -> _Exchange:
        """Sum the ``parts`` [S] that all ranks have for this one."""

        def finish(total: Tensor, piece: slice) -> None:
            if carried is not None:
                total.add_(carried[piece])
            if out is not None:
                copy_scaled_(out[piece], total, scale)

        is_cast = out is not None and out.dtype != total.dtype
        run = self.point_to_point.prepare_sum(
            group.ranks, parts, total, finish, keeps_total=is_cast
        )
        return self._next_id(label, group, total.nbytes), run

    # -- progress, and recovery ------------------------------------------------------------------

    def state(self) -> QueueState:
        with self._lock:
            return QueueState.of(self._issued, self._begun, self._running, self._ended)

    def stop(self) -> None:
        """End all exchanges, here and on the ranks that this one exchanges with; begin no more."""
        with self._lock:
            self._is_stopped = True
        self.point_to_point.close()

    def restart(self, epoch: int) -> None:
        """Continue with new connections."""
        self.stream.submit(lambda: None).wait()
        self._begun = 0
        self.sent = (0, 0)
        super().restart(epoch)
        self._connect()


def _other_ranks(group: RankGroup) -> list[int]:
    return [rank for _, rank in group.others]
