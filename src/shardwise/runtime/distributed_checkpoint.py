"""Runs of elements as `torch.distributed.checkpoint` knows parts of tensors: as boxes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.plan.layout import Run

__all__ = ["Box", "boxes", "chunks_of", "items_of"]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins and how long it is, along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements ``[start, stop)`` of a row-major tensor as boxes, in order.

    At most two a dim, less one: the rest of a row, whole rows, and the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row, inner = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(inner, last, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _in_row(inner, first - 1, start % row, row)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if stop % row:
        yield from _in_row(inner, last, 0, stop % row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape, start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def chunks_of(shape: Sequence[int], run: Run, local: Tensor) -> list[tuple[Any, Tensor]]:
    """The parts of a tensor that ``local`` [run] holds: torch's description, and a view of each."""
    # Not at the top: it loads much that only they need who call this.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

    parts = list(boxes(shape, run.start, run.stop))
    lengths = [prod(part.sizes) for part in parts]
    starts = [0, *accumulate(lengths)]
    return [
        (
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
            local[start : start + length].view(part.sizes),
        )
        for part, start, length in zip(parts, starts, lengths, strict=False)
    ]


def items_of(name: str, shape: Sequence[int], run: Run, local: Tensor) -> list[object]:
    """What `torch.distributed.checkpoint` is to write of ``local`` [run]."""
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (  # noqa: PLC0415
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(shape)),
        )
        for chunk, _ in chunks_of(shape, run, local)
    ]
