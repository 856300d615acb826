"""Describes runs of elements to `torch.distributed.checkpoint`, which supports only boxes."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import ShardedTensorError
from shardwise.plan.layout import Run

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Box", "boxes", "chunks_of", "items_of"]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: its offset and its size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements ``[start, stop)`` of a row-major tensor, in order.

    There are at most ``2 * ndim - 1``: the rest of a row, whole rows, and the beginning of a row.
    """
    if not shape and start < stop:
        yield Box((), ())
    inner = tuple(shape[1:])
    row = prod(inner)
    while shape and start < stop:
        index, begin = divmod(start, row)
        num_rows = (stop - start) // row if not begin else 0
        if num_rows:
            yield Box((index, *(0 for _ in inner)), (num_rows, *inner))
            start += num_rows * row
        else:
            end = min(row, begin + stop - start)
            for box in boxes(inner, begin, end):
                yield Box((index, *box.offsets), (1, *box.sizes))
            start += end - begin


def chunks_of(shape: Sequence[int], run: Run, local: Tensor) -> list[tuple[Any, Tensor]]:
    """The boxes that ``local`` [run] stores: torch's description and a view of each."""
    # Imported here, because torch's checkpoint package imports much that few programs need.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

    parts = list(boxes(shape, run.start, run.stop))
    views = torch.split(local, [prod(part.sizes) for part in parts]) if parts else ()
    return [
        (
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
            view.view(part.sizes),
        )
        for part, view in zip(parts, views, strict=True)
    ]


def items_of(name: str, shape: Sequence[int], run: Run, local: Tensor) -> list[object]:
    """The items for `torch.distributed.checkpoint` to write from ``local`` [run].

    Raises:
        ShardedTensorError: the writer would keep one of several.
    """
    from torch.distributed.checkpoint import metadata, planner  # noqa: PLC0415

    properties = metadata.TensorProperties.create_from_tensor(local)
    chunks = chunks_of(shape, run, local)
    if len(chunks) > 1 and _writes_one_box():
        raise ShardedTensorError(
            f"{name}: a HuggingFaceStorageWriter writes one box of each tensor from each rank, and "
            f"elements {run.start}:{run.stop} of {tuple(shape)} are {len(chunks)}; pass "
            "granularity='row' or 'dim' to fully_shard, or use `shardwise export --format hf`"
        )
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(name, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, torch.Size(shape)),
        )
        for chunk, _ in chunks
    ]


def _writes_one_box() -> bool:
    """Whether a save is running whose writer keeps the last box of a tensor, without an error."""
    module = sys.modules.get("torch.distributed.checkpoint.hf_storage")
    frame: FrameType | None = sys._getframe()
    while module is not None and frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            writer = frame.f_locals.get("storage_writer")  # an argument of the public functions
            if isinstance(writer, module.HuggingFaceStorageWriter):
                return True
        frame = frame.f_back
    return False
