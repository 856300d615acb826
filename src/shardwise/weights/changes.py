"""Find the elements that changed since the last version, and gather them on one rank.

Each rank compares the bits of its part with a copy of what was sent, in the dtype of the wire and
in host memory. A checksum per tensor takes no memory and 0.025 s per GB on one core, instead of
0.5 s (bfloat16, 1 % changed), but tells only which tensors have changed: in training nearly all of
them, by a few elements each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.coordination import Coordinator
from shardwise.checkpoint.slices import coordinates_of, part_of_whole
from shardwise.comm.device import is_accelerator
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import local_of
from shardwise.weights.gather import Output, Ranks, Source, group_of
from shardwise.weights.updates import BITS, Update, runs_of, starts_dtype

__all__ = ["Baseline", "Counts", "count_changes", "gather_runs"]

_ALIGNMENT = 8  # bytes, in messages
_PIECE = 1 << 18  # elements


@dataclass
class Baseline:
    """What a target has: its version, and this rank's part of each tensor in host memory."""

    version: int
    settings: object
    identity: str = ""  # of the version in the target, on the first rank
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # by output and source

    def update(self, outputs: Sequence[Output], ranks: Ranks) -> None:
        """Copy this rank's parts of ``outputs``."""
        for output in outputs:
            for number, source in enumerate(output.sources):
                current = _own_elements(source, ranks)
                if current is None:
                    continue
                key = output.name, number
                if key not in self.values:
                    is_pinned = is_accelerator(current.device)
                    self.values[key] = torch.empty(
                        current.shape, dtype=source.dtype, device="cpu", pin_memory=is_pinned
                    )
                self.values[key].copy_(current)

    def changed(self, output: Output, number: int, ranks: Ranks) -> tuple[Tensor, Tensor] | None:
        """Indices [n] into this rank's part of a source, and the values [n] there.

        None if the part does not go to the receiver.
        """
        source = output.sources[number]
        current = _own_elements(source, ranks)
        if current is None:
            return None
        current = current.to(source.dtype)
        sent = self.values[output.name, number].to(current.device, non_blocking=True)
        indices = _differences(current, sent)
        return indices, current[indices]


@dataclass(frozen=True)
class Counts:
    """How many elements of an output have changed, and in how many runs, by rank."""

    elements: Sequence[int]
    runs: Sequence[int]

    def num_bytes(self, output: Output) -> int:
        """The size of the update as runs."""
        [source] = output.sources
        starts = starts_dtype(source.tensor.numel()).itemsize
        return sum(self.runs) * (starts + 1) + sum(self.elements) * source.dtype.itemsize


def count_changes(
    baseline: Baseline, outputs: Sequence[Output], ranks: Ranks, coordinator: Coordinator
) -> list[Counts]:
    """Count the changes of each output on all ranks; every rank must call this."""
    if not outputs:
        return []
    own = torch.zeros(2, len(outputs), dtype=torch.int64, device="cpu")
    for column, output in enumerate(outputs):
        for number, source in enumerate(output.sources):
            found = baseline.changed(output, number, ranks)
            if found is not None and len(found[0]):
                starts, _ = runs_of(_positions(source.tensor, found[0]), source.tensor.numel())
                own[:, column] += torch.tensor([len(found[0]), len(starts)], device="cpu")
    by_rank = coordinator.all_gather_rows(own.tolist(), len(outputs))
    by_output = (
        torch.tensor([rows.tolist() for rows in by_rank], device="cpu").permute(2, 1, 0).tolist()
    )
    return [Counts(elements, runs) for elements, runs in by_output]


def gather_runs(
    baseline: Baseline, counts: Mapping[str, Counts], outputs: Sequence[Output], ranks: Ranks
) -> list[Update]:
    """Gather the changes of ``outputs`` on the receiver; every rank must call this."""
    messages = [torch.empty(0, dtype=torch.uint8, device=ranks.device)]
    for output in outputs:
        found = baseline.changed(output, 0, ranks)
        if found is not None and len(found[0]):
            tensor = output.sources[0].tensor
            starts, lengths = runs_of(_positions(tensor, found[0]), tensor.numel())
            messages += [_padded(part.to(ranks.device)) for part in (starts, lengths, found[1])]
    own = torch.cat(messages)
    received: dict[int, Tensor] = {ranks.own: own}
    pairs = {}
    nothing = torch.zeros(1, dtype=torch.uint8, device=ranks.device)
    for number, rank in enumerate(ranks.members):
        sections = [_section_bytes(one, counts[one.name], number) for one in outputs]
        num_bytes = sum(map(sum, sections))
        if not num_bytes or rank == ranks.to or ranks.own not in (rank, ranks.to):
            continue
        if ranks.is_receiver:
            received[rank] = torch.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
            pairs[number] = nothing, received[rank]
        else:
            assert isinstance(ranks.to, int)
            assert len(own) == num_bytes, "counted before"
            pairs[ranks.number_of(ranks.to)] = own, nothing.clone()
    ranks.comm.wait(ranks.comm.gather.exchange(pairs, "gather changes of publish"))
    if not ranks.is_receiver:
        return []
    parts: dict[str, list[list[Tensor]]] = {output.name: [] for output in outputs}
    for rank, message in received.items():
        found_parts = _decode(message, outputs, counts, ranks.number_of(rank))
        for name, sections_of in found_parts:
            parts[name].append(sections_of)
    return [_update(output, parts[output.name]) for output in outputs]


def _differences(one: Tensor, other: Tensor) -> Tensor:
    """The indices of elements [n] with different bits.

    In pieces that stay in the processor's cache, a CPU is up to twice as fast. On a GPU, `nonzero`
    takes less than 2**31 elements.
    """
    kind, size = BITS[one.dtype.itemsize], _PIECE if one.device.type == "cpu" else 1 << 30
    pieces = zip(
        torch.split(one.view(kind), size), torch.split(other.view(kind), size), strict=True
    )
    found = [torch.ne(a, b).nonzero().view(-1).add_(n * size) for n, (a, b) in enumerate(pieces)]
    return torch.cat(found)


def _own_elements(source: Source, ranks: Ranks) -> Tensor | None:
    """This rank's part of a tensor [n]; None if another rank's part goes to the receiver."""
    tensor = source.tensor
    group = group_of(tensor, ranks)
    if ranks.to not in group or ranks.own not in group:
        return None
    return local_of(tensor).detach().reshape(-1)


def _positions(tensor: Tensor, indices: Tensor) -> Tensor:
    """Where ``indices`` [n] into this rank's part are in the row-major whole tensor; ascending."""
    if isinstance(tensor, ShardedTensor):
        return indices + tensor.sharding.run.start
    if not isinstance(tensor, DTensor):
        return indices
    whole = torch.empty(tensor.shape, device="meta")
    view = part_of_whole(whole, tensor, coordinates_of(tensor.device_mesh))
    positions = torch.full_like(indices, int(view.storage_offset()))
    for size, stride in zip(view.shape[::-1], view.stride()[::-1], strict=True):
        positions += indices % size * stride
        indices = indices // size
    return positions


def _section_bytes(output: Output, counts: Counts, number: int) -> tuple[int, int, int]:
    source = output.sources[0]
    runs, elements = counts.runs[number], counts.elements[number]
    starts = runs * starts_dtype(source.tensor.numel()).itemsize
    sizes = (starts, runs, elements * source.dtype.itemsize)
    return tuple(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)  # type: ignore[return-value]


def _padded(part: Tensor) -> Tensor:
    content = part.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(content, (0, -len(content) % _ALIGNMENT))


def _decode(
    message: Tensor, outputs: Sequence[Output], counts: Mapping[str, Counts], number: int
) -> Iterator[tuple[str, list[Tensor]]]:
    for output in outputs:
        source, count = output.sources[0], counts[output.name]
        kinds = starts_dtype(source.tensor.numel()), torch.uint8, source.dtype
        lengths = count.runs[number], count.runs[number], count.elements[number]
        sections = []
        for size, kind, length in zip(
            _section_bytes(output, count, number), kinds, lengths, strict=True
        ):
            sections.append(message[:size].view(kind)[:length])
            message = message[size:]
        yield output.name, sections


def _update(output: Output, parts: Sequence[Sequence[Tensor]]) -> Update:
    starts, lengths, values = (torch.cat(same) for same in zip(*parts, strict=True))
    return Update(output.name, values, starts, lengths)
