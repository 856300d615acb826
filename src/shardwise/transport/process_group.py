"""Collectives of a torch process group: the only file that calls torch.distributed's."""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from shardwise.transport.api import Capabilities, Operation, RankGroup, Reduction, Work
from shardwise.transport.device import copy_scaled_, make_stream
from shardwise.transport.host.shared_memory import SharedRange

__all__ = [
    "ProcessGroupCollectives",
    "backend_of",
    "broadcast_object",
    "broadcast_tensors",
    "new_gloo_group",
    "new_group",
    "timeout_of",
]

# Their names since torch 2.13, which warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ProcessGroupCollectives:
    """Collectives of one kind, on process groups of their own, in the order of their launch."""

    sent = (0, 0)

    def __init__(
        self, world: RankGroup, device: torch.device, backend: str | None, name: str
    ) -> None:
        self._ranks, self._own_rank = world.ranks, world.own_rank
        # Weakly: this object is kept for as long as the group is.
        self._parent = None if world.parent is None else weakref.ref(world.parent)
        self._backend = backend
        self._name = name
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
                source = flat if _is_sorted(first.group) else _sort_slots(flat, first.group)
                _reduce_scatter(inner, source, group=groups[first.group.ranks])
            elif inner.data_ptr() != flat.data_ptr():
                inner.copy_(flat)
            if reduction.carried is not None:
                inner.add_(reduction.carried)
            total = inner
            for stage in rest:
                if stage.operation is Operation.REDUCE_SCATTER:
                    total = reduction.scattered(stage.group)
                    source = inner if _is_sorted(stage.group) else _sort_slots(inner, stage.group)
                    _reduce_scatter(total, source, group=groups[stage.group.ranks])
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
            self._groups[key] = new_group(group, self._backend, self._name)
        return self._groups[key]


def _is_sorted(group: RankGroup) -> bool:
    return list(group.ranks) == sorted(group.ranks)


def _gather_unsorted(
    flat: Tensor, own: Tensor, group: RankGroup, process_group: dist.ProcessGroup | None
) -> None:
    """Backends order slots by rank; a group orders them by mesh coordinate, or by shard."""
    by_rank = sorted(group.ranks)
    gathered = torch.empty_like(flat)
    _all_gather(gathered, own, group=process_group)
    slots = gathered.view(group.size, -1)
    torch.stack([slots[by_rank.index(rank)] for rank in group.ranks], out=flat.view_as(slots))


def _sort_slots(flat: Tensor, group: RankGroup) -> Tensor:
    """A copy of ``flat`` [ranks * S] with its slots in the order of ranks."""
    slots = flat.view(group.size, -1)
    return torch.cat([slots[group.ranks.index(rank)] for rank in sorted(group.ranks)])


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """What moves the bytes of tensors on ``device_type``: "gloo", "nccl", "fake" or None."""
    if group is None:
        return None
    pairs = dist.get_backend_config(group).split(",")  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in pairs).get(device_type)


def timeout_of(group: dist.ProcessGroup, backend: str | None) -> timedelta:
    """How long operations of ``group`` may take: the timeout that it was made with."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    default: timedelta = c10d._get_default_timeout(dist.Backend(backend or "gloo"))
    return default


def new_group(group: RankGroup, backend: str | None, name: str) -> dist.ProcessGroup:
    """A process group of the ranks of ``group``; only they call this.

    `torch.distributed.new_group` would do, but it names groups by how many there are, which differs
    between ranks that have made others, and so would wait forever. Nor does it take the timeout of
    the job. ``name`` is the same on all ranks, and no other group of these ranks has it.
    """
    parent = group.parent
    assert parent is not None
    members = dist.get_process_group_ranks(parent)
    ranks = sorted(members[rank] for rank in group.ranks)
    digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    name = f"{parent.group_name}/{name}/{digest}"
    timeout = timeout_of(parent, backend)
    world = c10d._get_default_group()
    if backend == "nccl" and world.bound_device_id is not None and len(ranks) < world.size():
        return _new_nccl_group(ranks, name, timeout, world.bound_device_id)
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend or dist.get_backend_config(parent),
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=timeout,
        device_id=world.bound_device_id,
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made


def new_gloo_group(group: RankGroup, name: str) -> dist.ProcessGroup:
    """As `new_group`, of Gloo alone; torch keeps no record of it, so it goes when it is dropped."""
    assert group.parent is not None
    store = c10d.PrefixStore(name, group.parent.get_group_store())
    timeout = timeout_of(group.parent, "gloo")
    backend = dist.ProcessGroupGloo(store, group.index, group.size, timeout)
    return _wrap(backend, dist.ProcessGroup.BackendType.GLOO, torch.device("cpu"), store)


def _new_nccl_group(
    ranks: list[int], name: str, timeout: timedelta, device: torch.device
) -> dist.ProcessGroup:
    """NCCL between some ranks of a job that is bound to devices.

    Torch would split the communicator of the job, for which it needs all of its ranks.
    """
    store = c10d.PrefixStore(name, c10d._get_default_store())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = ranks
    options.group_name = c10d.GroupName(name)
    own = ranks.index(dist.get_rank())
    backend = dist.ProcessGroupNCCL(store, own, len(ranks), options)
    return _wrap(backend, dist.ProcessGroup.BackendType.NCCL, device, store)


def _wrap(backend: Any, kind: Any, device: torch.device, store: c10d.Store) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


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
