"""Collectives through torch process groups: the only file that calls torch.distributed's."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._private import (
    default_store,
    group_timeout,
    scaled_sum,
    symmetric_tensor,
    tensor_allocator,
)
from shardwise.comm.api import (
    CollectiveId,
    Hop,
    MemoryKind,
    Operation,
    QueueObserver,
    RankGroup,
    Reduction,
    Sent,
    SharedBuffer,
    Step,
    Work,
    all_reduce_bytes,
)
from shardwise.comm.backends import capabilities_of
from shardwise.comm.device import DeviceStream, DeviceWork, copy_scaled_, run_together
from shardwise.comm.groups import becomes_true, new_group
from shardwise.comm.queue import Collectives, QueueState
from shardwise.comm.tree import tree_sum
from shardwise.errors import PeerAborted, StepError

__all__ = ["ProcessGroupCollectives"]

# New names in torch 2.13, which warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
SUM = dist.ReduceOp.SUM
_ALLOCATE_SECONDS = 60.0  # timeout of ranks that allocate symmetric memory together
_ALL = "all ranks have come"
_MAX_DESCRIPTION = 300  # characters
# Multiplying by 2**-k is exact in these dtypes, before or after a sum. In float16 small numbers
# would be lost (`Gradients._divisors` of the runtime).
_SCALED = {torch.bfloat16, torch.float32, torch.float64}


class ProcessGroupCollectives(Collectives):
    """A queue of collectives on process groups of its own.

    Methods without a description are those of `Collectives`.
    """

    stream: DeviceStream

    def __init__(
        self, world: RankGroup, device: torch.device, backend: str | None, name: str
    ) -> None:
        super().__init__(world, name)
        self.backend = backend
        self._can = capabilities_of(backend)
        # By the digest of their ranks, and whether they are used on the second stream.
        self._groups: dict[tuple[str, bool], dist.ProcessGroup] = {}
        self._earlier: list[dist.ProcessGroup] = []  # replaced; their collectives may still run
        self._device = device
        self._memory_kind = MemoryKind.OWN
        self._without_kernels = False
        self._allocations = 0
        self._also_gathers = world.has_one_queue
        self.stream = DeviceStream(device)
        self._second_stream = DeviceStream(device)
        # The device may wait for other ranks, while the host does not.
        self.is_monitored = self._can.is_stream_ordered and world.size > 1
        self._creating: CollectiveId | None = None  # stands for a group or memory
        self._created: deque[int] = deque(maxlen=16)  # tags of what all ranks have come to create
        self._queued: deque[tuple[DeviceWork, CollectiveId]] = deque()  # oldest first
        # Ended, and freed by the thread that launches. While another thread loads a kernel, which
        # waits until the device is idle, CUDA's driver lets a thread wait that records an event and
        # may let one wait that frees it, but not one that asks whether it is over.
        self._over: list[tuple[DeviceWork, CollectiveId]] = []
        self.observer: QueueObserver | None = None

    def all_gather(
        self,
        flat: Tensor,
        group: RankGroup,
        label: str,
        fill: Callable[[], None] | None = None,
        shared: SharedBuffer | None = None,  # noqa: ARG002
    ) -> Work:
        with self.stream.enqueue(timed=self.is_timed) as work:
            if fill is not None:
                fill()
            if group.size > 1 and flat.numel():
                whole = flat.view(torch.uint8)  # backends do not know all dtypes
                size = len(whole) // group.size
                own = whole[group.index * size : (group.index + 1) * size]
                sent = own if self._can.in_place else own.clone()
                _all_gather(whole, sent, group=self._process_group(group))
        return self._record(work, label, flat.nbytes // group.size, group)

    def reduce(self, reduction: Reduction, label: str) -> Work:
        """Run the stages of ``reduction`` one after the other.

        The second stage has a stream of its own, so that it overlaps the first stage of the next
        reduction.
        """
        first, *rest = reduction.stages
        flat, inner, out = reduction.flat, reduction.inner, reduction.out
        last_sum, scale = self._last_sum(reduction)
        with self.stream.enqueue(timed=self.is_timed) as work:
            if first.group.size > 1:
                operator = SUM if rest else last_sum
                made = self._process_group(first.group)
                self._sum_slots(inner, flat, made, operator, in_tree=reduction.in_tree)
            elif inner.data_ptr() != flat.data_ptr():
                inner.copy_(flat)
            if reduction.carried is not None:
                inner.add_(reduction.carried)
            if not rest and out is not None:
                copy_scaled_(out, inner, scale)
        self._record(work, label, inner.nbytes, first.group)
        if not rest or work.error is not None:
            return work
        [second], began = rest, work.times[0]
        #   stream          the first stage, and the group of all ranks
        #   second stream   the second stage, unless its group is that of all ranks, or unless
        #                   gathers use it, too (in one queue, where shards are on both axes)
        is_gathered = self._also_gathers and second.operation is Operation.REDUCE_SCATTER
        is_apart = first.group.size > 1 and not is_gathered
        stream = self._second_stream if is_apart else self.stream
        with stream.enqueue(after=work, timed=self.is_timed) as work:
            total, made = inner, self._process_group(second.group, is_apart=is_apart)
            if second.operation is Operation.REDUCE_SCATTER:
                total = reduction.scattered(second.group)
                self._sum_slots(total, inner, made, last_sum, in_tree=reduction.in_tree)
            elif reduction.in_tree:
                self._all_reduce_in_tree(inner, made)
            else:
                dist.all_reduce(inner, last_sum, group=made)
            if out is not None:
                copy_scaled_(out, total, scale)
        work.times = began, work.times[1]
        num_bytes = inner.nbytes // second.group.size
        if second.operation is Operation.ALL_REDUCE:
            num_bytes = all_reduce_bytes(inner.nbytes, inner.itemsize, second.group.size)
        self._record(work, label, num_bytes, second.group)
        work.sent = (Sent(first.group.ranks, inner.nbytes), *work.sent)
        return work

    def relay(self, steps: Sequence[Step], label: str) -> Work:
        hops = [step for step in steps if isinstance(step, Hop)]
        with self.stream.enqueue(timed=self.is_timed) as work:
            for step in steps:
                if isinstance(step, Hop):
                    self._run_hop(step)
                else:
                    step()
        self._record(work, label, hops[-1].row_bytes, hops[-1].group)
        work.sent = tuple(Sent(hop.group.ranks, hop.row_bytes) for hop in hops)
        return work

    def _run_hop(self, hop: Hop) -> None:
        sent, rows = hop.prepare(self._device)
        group = self._process_group(hop.group)
        if hop.gathers:
            _all_gather(rows.view(-1), sent if self._can.in_place else sent.clone(), group=group)
        else:
            dist.all_to_all_single(rows.view(-1), sent.view(-1), group=group)
        hop.decode(rows)

    def all_reduce_max(self, values: Tensor, group: RankGroup, label: str) -> Work:
        with self.stream.enqueue(timed=self.is_timed) as work:
            if group.size > 1:
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self._process_group(group))
        return self._record(work, label, values.nbytes, group)

    def use_memory(self, kind: MemoryKind, *, only_moves: bool) -> None:
        """Make `allocate` return memory of ``kind``; ``only_moves`` if no collective sums.

        Call it between steps.
        """
        self._memory_kind = kind
        without_kernels = only_moves and kind is MemoryKind.SYMMETRIC
        if without_kernels != self._without_kernels:
            self._without_kernels = without_kernels
            self._earlier += self._groups.values()
            self._groups = {}

    def allocate(self, num_bytes: int, group: RankGroup, what: str) -> torch.UntypedStorage:
        """Allocate memory that the backend registers for collectives of ``group``.

        All ranks of the group allocate symmetric memory together, in the same order.

        Raises:
            StepError: the ranks allocate different sizes, or describe them differently (``what``),
                or the allocation failed on another rank.
            PeerAborted: another rank raised.
        """
        made = self._process_group(group)
        assert made is not None
        if self._memory_kind is MemoryKind.SYMMETRIC:
            together = self._allocating(f"{num_bytes} bytes, {what}", made, group)
            return symmetric_tensor(num_bytes, made, self._device, together).untyped_storage()
        allocate = tensor_allocator(made, self._device)
        assert allocate is not None, "`features.collective_memory` has checked it"
        return allocate(num_bytes).untyped_storage()

    @contextlib.contextmanager
    def _allocating(self, own: str, made: dist.ProcessGroup, group: RankGroup) -> Iterator[None]:
        """Run the body, which allocates, on all ranks of ``group``; raise if it raises on one.

        All ranks then wait for each other in C++, which a rank that raised would never reach.
        """
        self._allocations += 1
        key = f"{made.group_name}/memory/{self._allocations}"
        try:
            self._check_same(key, own, group)
            yield
        except Exception as error:
            default_store().set(f"{key}/met", f"rank {group.own_rank} raised {error!r}")
            raise
        self._meet(key, group, "symmetric memory", timedelta(seconds=_ALLOCATE_SECONDS))

    def _check_same(self, key: str, own: str, group: RankGroup) -> None:
        """Raise StepError if the first rank that called this allocates something else."""
        first = default_store().compare_set(key, "", f"{group.own_rank} {own}").decode()
        rank, _, what = first.partition(" ")
        if what != own:
            raise StepError(
                f"symmetric memory must be the same on all ranks, but rank {group.own_rank} "
                f"allocates {own[:_MAX_DESCRIPTION]}, and rank {rank} allocates "
                f"{what[:_MAX_DESCRIPTION]}; call the units in the same order on all ranks, or "
                "omit set_symm_mem_for_comm"
            )

    def exchange(self, pairs: Mapping[int, tuple[Tensor, Tensor]], label: str) -> Work:
        world = self.world
        with self.stream.enqueue(timed=self.is_timed) as work:
            if not self._can.is_stream_ordered:
                self._send_and_receive(pairs)
            elif world.size > 1:  # on a device, in one launch
                dtype = next((sent.dtype for sent, _ in pairs.values()), torch.uint8)
                nothing = torch.empty(0, dtype=dtype, device=self._device)
                sent, received = (
                    [pairs[rank][i] if rank in pairs else nothing for rank in world.ranks]
                    for i in (0, 1)
                )
                dist.all_to_all(received, sent, group=self._process_group(world))
        # 0 bytes: histories compare sizes, which differ between ranks here.
        self._record(work, label, 0, world)
        own = world.own_rank
        work.sent = tuple(Sent((own, rank), sent.nbytes) for rank, (sent, _) in pairs.items())
        return work

    def _send_and_receive(self, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Exchange ``pairs`` in messages: Gloo has no all-to-all of tensors of different sizes."""
        group, works = self._process_group(self.world), []
        for slot, rank in self.world.others:
            if rank in pairs:
                sent, received = (tensor.view(torch.uint8) for tensor in pairs[rank])
                works.append(dist.irecv(received, group=group, group_src=slot))
                works.append(dist.isend(sent, group=group, group_dst=slot))
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()

    def _last_sum(self, reduction: Reduction) -> tuple[Any, float]:
        """Return the operator of the last stage, and the factor to multiply its result by.

        The backend multiplies if this gives the same bits as a multiplication of the sum.
        """
        *before, last = reduction.stages
        scale, size = reduction.scale, last.group.size
        is_whole = reduction.out is not None and (bool(before) or reduction.carried is None)
        is_exact = reduction.flat.dtype in _SCALED and math.frexp(scale)[0] == 0.5  # noqa: PLR2004
        only_sums = reduction.only_sums or reduction.in_tree
        if size == 1 or scale == 1.0 or only_sums or not (is_whole and is_exact):
            return SUM, scale
        if self._can.averages and scale * size == 1.0:
            return dist.ReduceOp.AVG, 1.0
        return (scaled_sum(scale), 1.0) if self._can.scales else (SUM, scale)

    def _sum_slots(
        self,
        out: Tensor,
        flat: Tensor,
        made: dist.ProcessGroup | None,
        operator: Any,
        *,
        in_tree: bool,
    ) -> None:
        """Reduce-scatter ``flat`` [ranks * S] to ``out`` [S]."""
        if in_tree:  # sends the same bytes
            rows = torch.empty_like(flat)
            dist.all_to_all_single(rows, flat, group=made)
            assert made is not None, "a sum has several ranks"
            out.copy_(tree_sum(rows.view(made.size(), -1), in_place=True))
            return
        if not self._can.in_place:
            flat = flat.clone()
        if flat.is_complex():  # in other collectives torch does this itself
            out, flat = torch.view_as_real(out).view(-1), torch.view_as_real(flat).view(-1)
        _reduce_scatter(out, flat, operator, group=made)

    def _all_reduce_in_tree(self, tensor: Tensor, made: dist.ProcessGroup | None) -> None:
        assert made is not None, "a sum has several ranks"
        num_ranks = made.size()
        size = len(tensor) // num_ranks * num_ranks
        cut, rest = tensor[:size], tensor[size:]
        if size:
            own = torch.empty_like(cut.view(num_ranks, -1)[0])
            self._sum_slots(own, cut, made, SUM, in_tree=True)
            _all_gather(cut, own, group=made)
        if rest.numel():
            rows = rest.new_empty(num_ranks, len(rest))
            _all_gather(rows.view(-1), rest.clone(), group=made)
            rest.copy_(tree_sum(rows, in_place=True))

    def _process_group(
        self, group: RankGroup, *, is_apart: bool = False
    ) -> dist.ProcessGroup | None:
        """The process group of these ranks; each is used on one stream only.

        A second one is used on the second stream (``is_apart``): a group of a second stage may also
        be one of sums that are relayed, as those of another model are.
        """
        if group.size == 1:
            return None
        if (group.digest, is_apart) not in self._groups:
            self._create_group(group, is_apart=is_apart)
        return self._groups[group.digest, is_apart]

    def _create_group(self, group: RankGroup, *, is_apart: bool) -> None:
        kind = "/without kernels" if self._without_kernels else ""
        kind += "/apart" if is_apart else ""
        epoch = self._epoch
        name = f"{self.name}{kind}" + (f"/{epoch}" if epoch else "")
        if self.is_monitored:  # the creation cannot be ended, so no rank enters it alone
            assert group.parent is not None
            key = f"{group.parent.group_name}/{name}/{group.digest}"
            self._meet(key, group, "a process group", group_timeout(group.parent))
        made = new_group(group, self.backend, name, without_kernels=self._without_kernels)
        with self._lock:
            is_stopped = self._is_stopped or self._epoch != epoch
            if not is_stopped:
                self._groups[group.digest, is_apart] = made
        if is_stopped:  # `stop` did not know this group
            _abort(made)
            _destroy(made)
            raise self._stopped()

    def _meet(self, key: str, group: RankGroup, what: str, timeout: timedelta) -> None:
        """Return when all ranks of ``group`` have called this with ``key``, to create ``what``.

        Unlike a wait of the backend, it ends when the ranks are stopped.

        Raises:
            PeerAborted: another rank raised.
            StepError: another rank cannot create its part, or ``timeout`` is over.
        """
        store = default_store()
        num_ranks, key = store.add(f"{key}/ranks", 1), f"{key}/met"
        if num_ranks == group.size:
            store.set(key, _ALL)
        self._creating = CollectiveId(0, f"creation of {what}", 0, group.ranks, key)
        try:
            becomes_true(lambda: self._is_stopped or store.check([key]), timeout.total_seconds())
            self._created.append(self._creating.tag)  # a rank that still waits for it can go on
        finally:
            self._creating = None
        if self._is_stopped:
            raise self._stopped()
        reason = store.get(key).decode() if store.check([key]) else "a rank did not come in time"
        if reason != _ALL:
            raise StepError(f"the ranks {group.ranks} cannot create {what}: {reason}")

    def _stopped(self) -> PeerAborted:
        return PeerAborted("no process group can be created until the ranks have recovered")

    # -- progress, and recovery ------------------------------------------------------------------

    def _record(self, work: DeviceWork, label: str, num_bytes: int, group: RankGroup) -> Work:
        """Add ``work`` to the progress that `state` reports."""
        work.sent = (Sent(group.ranks, num_bytes),)
        if self.is_monitored:
            work.collective = self._next_id(label, group, num_bytes)
            if self.observer is not None:
                self.observer.issued(work.collective)
            self._queued.append((work, work.collective))
            self._over.clear()
        return work

    def state(self) -> QueueState:
        """Return the progress of the device."""
        with self._lock:
            while self._queued and self._queued[0][0].is_over:
                collective = self._queued[0][1]
                self._over.append(self._queued.popleft())
                self._ended.append(collective)
                if self.observer is not None:
                    self.observer.ended(collective)
            running = self._queued[0][1] if self._queued else self._creating
            if self._is_stopped:  # it was aborted
                running = None
            state = QueueState.of(self._issued, self._issued, running, self._ended)
            return replace(state, ended=(*self._created, *state.ended))

    def stop(self) -> None:
        """Abort the collectives on the device, some of which would never end."""
        with self._lock:
            self._is_stopped = True
            groups = [*self._groups.values(), *self._earlier]
        # NCCL aborts a communicator when its kernels have ended, which may wait for those of other
        # communicators of the device (pytorch/pytorch#119797).
        run_together([partial(_abort, group) for group in groups])

    def recent(self) -> list[tuple[CollectiveId, str]]:
        """Return the last collectives, each "completed", "started" or "scheduled"."""
        with self._lock:
            queued = [collective for _, collective in self._queued]
            states = [(one, "completed") for one in self._ended]
        return states + [(one, "scheduled" if i else "started") for i, one in enumerate(queued)]

    def restart(self, epoch: int) -> None:
        """Continue with new process groups."""
        for group in (*self._groups.values(), *self._earlier):
            _destroy(group)
        with self._lock:
            self._groups.clear()
            self._earlier.clear()
            self._queued.clear()
            self._created.clear()
            self.observer = None
        super().restart(epoch)


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):  # already aborted, or not supported
        group.abort()


def _destroy(group: dist.ProcessGroup) -> None:
    """Free an aborted group, which torch would keep until the end of the job."""
    with contextlib.suppress(ValueError, RuntimeError):  # destroyed with its job
        dist.destroy_process_group(group)
