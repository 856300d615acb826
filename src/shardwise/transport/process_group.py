"""Collectives of a torch process group: the only file that calls torch.distributed's."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.transport.api import Capabilities, Operation, RankGroup, Reduction, Work
from shardwise.transport.device import copy_scaled_, make_stream
from shardwise.transport.host.shared_memory import SharedRange

__all__ = [
    "ProcessGroupCollectives",
    "backend_of",
    "broadcast_object",
    "broadcast_tensors",
    "new_group",
]

# Their names since torch 2.13, which warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ProcessGroupCollectives:
    """Collectives of one kind, on process groups of their own, in the order of their launch."""

    sent = (0, 0)

    def __init__(self, world: RankGroup, device: torch.device, backend: str | None) -> None:
        self._ranks, self._own_rank = world.ranks, world.own_rank
        # Weakly: this object is kept for as long as the group is.
        self._parent = None if world.parent is None else weakref.ref(world.parent)
        self._backend = backend
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by their ranks in order
        self.stream = make_stream(device)
        self.capabilities = Capabilities(stream_ordered=device.type == "cuda")

    @property
    def world(self) -> RankGroup:
        parent = None if self._parent is None else self._parent()
        return RankGroup(self._ranks, self._own_rank, parent)

    def all_gather(
        self,
        flat: Tensor,
        group: RankGroup,
        label: str,  # noqa: ARG002
        fill: Callable[[], None] | None = None,
        shared: SharedRange | None = None,  # noqa: ARG002
    ) -> Work:
        process_group = self._process_group(group)
        with self.stream.enqueue() as work:
            if fill is not None:
                fill()
            if group.size > 1 and flat.numel():
                own = flat.view(group.size, -1)[group.index]
                if _is_sorted(group):
                    _all_gather(flat, own, group=process_group)
                else:
                    _gather_unsorted(flat, own, group, process_group)
        return work

    def reduce(self, reduction: Reduction, label: str) -> Work:  # noqa: ARG002
        first, *rest = reduction.stages
        groups = {stage.group.ranks: self._process_group(stage.group) for stage in reduction.stages}
        flat, inner, out = reduction.flat, reduction.inner, reduction.out
        with self.stream.enqueue() as work:
            if first.group.size > 1:
                _reduce_scatter(inner, flat, group=groups[first.group.ranks])
            elif inner.data_ptr() != flat.data_ptr():
                inner.copy_(flat)
            if reduction.carried is not None:
                inner.add_(reduction.carried)
            total = inner
            for stage in rest:
                if stage.operation is Operation.REDUCE_SCATTER:
                    total = reduction.scattered(stage.group)
                    _reduce_scatter(total, inner, group=groups[stage.group.ranks])
                else:
                    dist.all_reduce(inner, group=groups[stage.group.ranks])
            if out is not None:
                copy_scaled_(out, total, reduction.scale)
        return work

    def exchange(self, pairs: Mapping[int, tuple[Tensor, Tensor]], label: str) -> Work:
        raise NotImplementedError(f"{label}: no exchange between pairs on {self._backend}")

    def _process_group(self, group: RankGroup) -> dist.ProcessGroup | None:
        if group.size == 1:
            return None
        key = tuple(sorted(group.ranks))
        if key not in self._groups:
            self._groups[key] = new_group(group, self._backend)
        return self._groups[key]


def _is_sorted(group: RankGroup) -> bool:
    return list(group.ranks) == sorted(group.ranks)


def _gather_unsorted(
    flat: Tensor, own: Tensor, group: RankGroup, process_group: dist.ProcessGroup | None
) -> None:
    """Backends order slots by rank, which in a model cut over two axes is not that of shards."""
    by_rank = sorted(group.ranks)
    gathered = torch.empty_like(flat)
    _all_gather(gathered, own, group=process_group)
    slots = gathered.view(group.size, -1)
    torch.stack([slots[by_rank.index(rank)] for rank in group.ranks], out=flat.view_as(slots))


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """What moves the bytes of tensors on ``device_type``: "gloo", "nccl", "fake" or None."""
    if group is None:
        return None
    pairs = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in pairs).get(device_type)


def new_group(group: RankGroup, backend: str | None) -> dist.ProcessGroup:
    """A process group of the ranks of ``group``; only they call this."""
    assert group.parent is not None
    ranks = dist.get_process_group_ranks(group.parent)
    local = backend != "fake"  # the fake backend cannot, and has nobody to wait for
    made: dist.ProcessGroup = dist.new_group(
        sorted(ranks[rank] for rank in group.ranks),
        backend=backend,
        use_local_synchronization=local,
    )
    return made


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give every rank the values that the first of ``group`` has; between steps only."""
    if group is None or dist.get_backend(group) == "fake":
        return
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, group=group, group_src=0)
            tensor.copy_(dense)


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value that the first rank of ``group`` passes, pickled, on every rank."""
    values = [value]
    if group is not None and dist.get_backend(group) != "fake":
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]
