"""Gather whole tensors from the shards of all ranks, a bucket at a time.

The elements of a bucket that a rank owns are next to each other, because shards are cut from flat
buffers in the order of the ranks. They are sent from, and received at, their final position::

    bucket      | W1 ........ | W2 ..... | b |      whole tensors on a receiver
    owned by    | rank 0 | rank 1   | rank 2 |      one message from each owner

Parts of a tensor that are not runs of elements, as with tensor parallelism, are received into other
memory and copied.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.format import in_groups
from shardwise.checkpoint.slices import coordinates_of, part_of_whole
from shardwise.comm.communicator import Communicator, communicator
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import RunSharding, ShardedTensor
from shardwise.tensor.sharding import local_of
from shardwise.weights.updates import TensorInfo

__all__ = ["Output", "Ranks", "Source", "gather_buckets", "group_of"]

_PADDING_BYTES = 64  # between tensors of a flat buffer


class Ranks:
    """The ranks that hold a part of a model, and which of them receive whole tensors."""

    def __init__(
        self, mesh: DataParallelMesh, device: torch.device, to: int | Literal["all"]
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.members = mesh.global_ranks
        self.own = self.members[mesh.group_rank]
        self.to = to
        self._numbers = {rank: number for number, rank in enumerate(self.members)}

    @cached_property
    def comm(self) -> Communicator:
        """All ranks use it first at the same time."""
        return communicator(self.mesh.world, self.device)

    @property
    def is_receiver(self) -> bool:
        return self.receives(self.own)

    def receives(self, rank: int) -> bool:
        return self.to in ("all", rank)

    def number_of(self, rank: int) -> int:
        return self._numbers[rank]


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of the model, which travels in ``dtype``."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def peak_bytes(self) -> int:
        """Memory to gather it; parts that are not runs of elements are received elsewhere."""
        placements = getattr(self.tensor, "placements", ())
        in_runs = isinstance(self.tensor, ShardedTensor) or all(
            placement.is_replicate() or placement.dim == 0 for placement in placements
        )
        return self.num_bytes * (1 if in_runs else 2) + _PADDING_BYTES


@dataclass(frozen=True, eq=False)
class Output:
    """A whole tensor: a gathered one, or what ``combine`` makes of one or several."""

    name: str
    sources: Sequence[Source]
    combine: Callable[[Sequence[Tensor]], Tensor] = lambda whole: whole[0]
    extra_bytes: int = 0  # which ``combine`` allocates
    made: TensorInfo | None = None  # what ``combine`` makes; None: it passes the only source on
    setting: object = None  # of ``combine``, such as the factor of an adapter

    @property
    def info(self) -> TensorInfo:
        source = self.sources[0]
        return self.made or TensorInfo(tuple(source.tensor.shape), source.dtype)

    @property
    def peak_bytes(self) -> int:
        return sum(source.peak_bytes for source in self.sources) + self.extra_bytes


def gather_buckets(
    outputs: Sequence[Output], ranks: Ranks, bucket_bytes: int
) -> Generator[list[tuple[str, Tensor]], None, None]:
    """Yield each bucket's outputs on the ranks that receive them; every rank has to iterate.

    The next bucket is gathered while this one is used, and while the caller may still hold an
    output of the last one, unless the three exceed twice ``bucket_bytes``. A rank that stops
    iterating takes part in the gathers of the others until all have stopped.
    """
    most_bytes = 2 * bucket_bytes
    buckets = list(in_groups(outputs, lambda output: output.peak_bytes, most_bytes // 3))
    ranks.comm.watch.recover()
    queue = _Queue(buckets, ranks)
    held_bytes = 0
    sizes = [sum(output.peak_bytes for output in bucket) for bucket in buckets]
    try:
        if not ranks.is_receiver:
            queue.drain()
            return
        for number, num_bytes in enumerate(sizes):
            arrived = queue.take(number)
            if held_bytes + num_bytes + sum(sizes[number + 1 : number + 2]) <= most_bytes:
                queue.launch(number + 1)
            yield arrived
            held_bytes = num_bytes
    except GeneratorExit:
        if not sys.is_finalizing():
            queue.drain(stopped=True)
        raise
    except BaseException as error:  # an interrupt, or there is no memory for a bucket
        ranks.comm.watch.abort(error)
        raise


class _Queue:
    """Launches buckets in order, at most one ahead."""

    def __init__(self, buckets: Sequence[Sequence[Output]], ranks: Ranks) -> None:
        self._buckets = buckets
        self._ranks = ranks
        self._launched = 0
        self._flight: _Flight | None = None

    def launch(self, number: int, *, stopped: bool = False) -> None:
        """Launch bucket ``number``, unless it was launched or does not exist."""
        if self._launched <= number < len(self._buckets):
            self._flight = _Flight(self._buckets[number], number, self._ranks, stopped=stopped)
            self._launched += 1

    def take(self, number: int) -> list[tuple[str, Tensor]]:
        self.launch(number)
        flight, self._flight = self._flight, None
        assert flight is not None
        return flight.outputs()

    def drain(self, *, stopped: bool = False) -> None:
        """Take part in the gathers of the receivers until all of them have stopped."""
        while True:
            if self._flight is None:
                self.launch(self._launched, stopped=stopped)
            flight, self._flight = self._flight, None
            if flight is None:
                return
            flight.outputs()
            if flight.all_stopped():
                return


class _Flight:
    def __init__(
        self, bucket: Sequence[Output], number: int, ranks: Ranks, *, stopped: bool
    ) -> None:
        self._bucket = bucket
        self._ranks = ranks
        self._label = f"gather bucket {number} of full_tensors"
        self._flags = torch.zeros(len(ranks.members), dtype=torch.uint8, device=ranks.device)
        self._flags[ranks.mesh.group_rank] = stopped
        queue, world = ranks.comm.gather, ranks.mesh.world
        self._works = [queue.all_gather(self._flags, world, self._label)]
        sources = [source for output in bucket for source in output.sources]
        self._pieces = [_piece(group, ranks) for group in _neighbors(sources)]
        self._works += [queue.exchange(piece.pairs, self._label) for piece in self._pieces]

    def all_stopped(self) -> bool:
        """Whether all receivers had stopped iterating when they launched this bucket."""
        members = self._ranks.members
        flags = self._flags.tolist()
        return all(f for r, f in zip(members, flags, strict=True) if self._ranks.receives(r))

    def outputs(self) -> list[tuple[str, Tensor]]:
        """Wait for the gathers; return the outputs on a receiver."""
        for work in self._works:
            self._ranks.comm.wait(work)
        whole: dict[int, Tensor] = {}
        for piece in self._pieces:
            piece.finish()
            whole |= piece.whole
        self._pieces.clear()
        if not self._ranks.is_receiver:
            return []
        return [
            (one.name, one.combine([whole.pop(id(x)) for x in one.sources])) for one in self._bucket
        ]


class _Piece:
    """What one exchange moves: ``pairs`` to send and to receive, as bytes, by rank."""

    def __init__(self) -> None:
        self.whole: dict[int, Tensor] = {}  # by the id of the source
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def finish(self) -> None:
        """Copy what was not received at its position."""
        self.pairs.clear()
        for view, received in self._copies:
            view.copy_(received)
        self._copies.clear()

    def exchange(
        self, ranks: Ranks, group: Sequence[int], own: Tensor, part: Callable[[int], Tensor]
    ) -> None:
        """Send ``own``, contiguous, to the receivers in ``group``; receive each member's ``part``.

        ``part`` is a view of the whole tensor, by the position in ``group``.
        """
        nothing = own.reshape(-1)[:0]
        for position, rank in enumerate(group):
            if rank == ranks.own:
                continue
            sent = own.reshape(-1) if ranks.receives(rank) else nothing
            view = part(position) if ranks.is_receiver else nothing
            if not (sent.numel() or view.numel()):
                continue
            into = view if view.is_contiguous() else torch.empty_like(view).contiguous()
            if into is not view:
                self._copies.append((view, into))
            self.pairs[ranks.number_of(rank)] = _as_bytes(sent), _as_bytes(into.reshape(-1))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor [n]; one byte if only the other rank sends something."""
    if tensor.numel():
        return tensor.view(torch.uint8)
    return torch.zeros(1, dtype=torch.uint8, device=tensor.device)


def _neighbors(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Group tensors that are next to each other in a flat buffer; the others are alone."""
    by_layout: dict[tuple[int, torch.dtype], list[Source]] = {}
    for source in sources:
        if isinstance(source.tensor, ShardedTensor):
            layout = source.tensor.sharding.layout
            by_layout.setdefault((id(layout), source.dtype), []).append(source)
        else:
            yield [source]
    for group in by_layout.values():
        extents = _sharding_of(group[0]).layout.extents
        positions = {id(extent): position for position, extent in enumerate(extents)}
        placed = sorted((positions[id(_sharding_of(one).extent)], n) for n, one in enumerate(group))
        # Where positions follow each other, they grow as fast as the index.
        for _, run in groupby(enumerate(placed), key=lambda pair: pair[1][0] - pair[0]):
            yield [group[n] for _, (_, n) in run]


def group_of(tensor: Tensor, ranks: Ranks) -> list[int]:
    """The global ranks that hold a whole ``tensor``, with this one; only one if it is plain."""
    if isinstance(tensor, ShardedTensor):
        members = tensor.sharding.mesh.global_ranks
        return [members[rank] for rank in tensor.sharding.mesh.shards.ranks]
    if isinstance(tensor, DTensor):
        return [int(tensor.device_mesh.mesh[place]) for place in _places(tensor)]
    return ranks.members[:1]


def _places(tensor: DTensor) -> list[tuple[int, ...]]:
    """The coordinates of the ranks that hold the whole tensor together with this rank."""
    mesh = tensor.device_mesh
    indices = [
        [own] if placement.is_replicate() else range(size)
        for placement, size, own in zip(
            tensor.placements, mesh.shape, coordinates_of(mesh), strict=True
        )
    ]
    return list(product(*indices))


def _piece(sources: Sequence[Source], ranks: Ranks) -> _Piece:
    tensor = sources[0].tensor
    group = group_of(tensor, ranks)
    is_plain = not isinstance(tensor, DTensor)
    if not (is_plain or any(map(ranks.receives, group))):
        return _Piece()
    if isinstance(tensor, ShardedTensor):
        return _piece_of_runs(sources, group, ranks)
    if isinstance(tensor, DTensor):
        return _piece_of_parts(sources[0], tensor, group, ranks)
    return _piece_of_first_rank(sources[0], ranks)


def _piece_of_first_rank(source: Source, ranks: Ranks) -> _Piece:
    """Send a tensor that every rank has from the first rank."""
    piece, is_first = _Piece(), ranks.own == ranks.members[0]
    shape = source.tensor.shape if ranks.is_receiver or is_first else (0,)
    whole = torch.empty(shape, dtype=source.dtype, device=ranks.device)
    if is_first:
        whole.copy_(source.tensor.detach())
    nothing = whole.reshape(-1)[:0]
    own = whole if is_first else nothing
    piece.exchange(ranks, ranks.members, own, lambda n: nothing if n else whole)
    piece.whole[id(source)] = whole
    return piece


def _piece_of_runs(sources: Sequence[Source], group: Sequence[int], ranks: Ranks) -> _Piece:
    """Gather a range of a flat buffer: a contiguous part is owned by each rank."""
    piece, shardings = _Piece(), [_sharding_of(source) for source in sources]
    mesh, size = shardings[0].mesh, shardings[0].layout.shard_elements
    start, stop = shardings[0].extent.offset, shardings[-1].extent.stop
    bounds = [min(max(n * size, start), stop) for n in range(mesh.size + 1)]
    own_start, own_stop = bounds[mesh.rank], bounds[mesh.rank + 1]
    first, last = (start, stop) if ranks.is_receiver else (own_start, own_stop)
    flat = torch.empty(last - first, dtype=sources[0].dtype, device=ranks.device)
    for source, sharding in zip(sources, shardings, strict=True):
        begin = sharding.extent.offset + sharding.run.start - first
        flat[begin : begin + len(sharding.run)].copy_(local_of(source.tensor).detach())
        if ranks.is_receiver:
            whole = flat[sharding.extent.offset - first : sharding.extent.stop - first]
            piece.whole[id(source)] = whole.view(sharding.shape)
    own = flat[own_start - first : own_stop - first]
    piece.exchange(ranks, group, own, lambda n: flat[bounds[n] - first : bounds[n + 1] - first])
    return piece


def _piece_of_parts(source: Source, tensor: DTensor, group: Sequence[int], ranks: Ranks) -> _Piece:
    """Gather a tensor of which each rank has some rows or columns."""
    piece, places = _Piece(), _places(tensor)
    own = local_of(tensor).detach().to(ranks.device, source.dtype)
    if not ranks.is_receiver:
        piece.exchange(ranks, group, own.contiguous(), lambda _: own)
        return piece
    whole = torch.empty(tensor.shape, dtype=source.dtype, device=ranks.device)
    view = part_of_whole(whole, tensor, coordinates_of(tensor.device_mesh)).copy_(own)
    own = view if view.is_contiguous() else view.contiguous()
    piece.exchange(ranks, group, own, lambda n: part_of_whole(whole, tensor, places[n]))
    piece.whole[id(source)] = whole
    return piece


def _sharding_of(source: Source) -> RunSharding:
    assert isinstance(source.tensor, ShardedTensor)
    return source.tensor.sharding
