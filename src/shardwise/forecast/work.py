"""The work of one rank in one micro-batch: operations, and the activations that are alive.

`trace` makes a `Workload`. It is independent of the machine; a machine model converts it to
seconds. It has neither parameters nor their gradients, which follow from the plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwise.schedule.events import EventKind

__all__ = ["Kind", "Operation", "Segment", "Workload"]


class Kind(StrEnum):
    """Kinds of operations, by what limits them."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"  # element-wise operations, reductions, copies
    COLLECTIVE = "collective"  # collectives of tensor, context or expert parallelism


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that a rank launches."""

    name: str  # such as "mm", "scaled_dot_product_attention", "native_layer_norm", "all_reduce"
    kind: Kind
    flops: int  # 2*m*n*k for a product; for attention as if not causal; otherwise 0
    shape: tuple[int, ...]  # (batch, m, n, k), (batch, heads, queries, keys, head_dim), or ()
    itemsize: int  # bytes of the compute dtype
    reads: tuple[tuple[int, int], ...]  # (storage number, bytes) of each tensor
    writes: tuple[tuple[int, int], ...]
    is_causal: bool = False
    is_recomputed: bool = False  # during backward, by activation checkpointing
    axis: str = ""  # for collectives: "tensor", "context" or "expert"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return sum(size for _, size in self.reads) + sum(size for _, size in self.writes)


@dataclass(frozen=True, slots=True)
class Segment:
    """Compute from the start of a unit's forward or backward to the next such event.

    Bytes count activations: all memory that the pass allocates, except the batch, parameters and
    accumulated gradients of parameters.
    """

    kind: EventKind  # FORWARD or BACKWARD; a FORWARD within the backward pass is a recomputation
    unit: int  # index in the units of the workload, and of the plan
    operations: tuple[Operation, ...]
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    # Reduction of the peak if an embedding adds its rows to the gradient of the tied head, as the
    # engine does on a CPU, instead of allocating a separate gradient.
    added_rows_bytes: int = 0
    # Reduction of the peak if weight gradients of the unit's linear layers are computed in its
    # reduce buffer, instead of being copied to it.
    in_slot_bytes: int = 0

    def shifted(self, unit: int, num_bytes: int) -> "Segment":
        """Return the same compute in another unit, with ``num_bytes`` more allocated throughout."""
        return replace(
            self,
            unit=unit,
            start_bytes=self.start_bytes + num_bytes,
            peak_bytes=self.peak_bytes + num_bytes,
            end_bytes=self.end_bytes + num_bytes,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one rank in one micro-batch."""

    units: tuple[str, ...]  # names; the first is "", the root
    segments: tuple[Segment, ...]
    forward_segments: int  # number of segments in the forward pass, which come first
    tokens: int
    sent_bytes: int = 0  # sent from a pipeline stage to the next one

    @property
    def operations(self) -> Iterator[Operation]:
        """All operations, in the order of their segments."""
        return (operation for segment in self.segments for operation in segment.operations)

    def repeated(self, stack: str, blocks: Sequence[int]) -> "Workload":
        """Return the workload of a deeper model that consists of copies of this one's blocks.

        For example, ``repeated("layers", [0, 1, 1, 1, 2])`` turns a model of three blocks into one
        of five. The first and the last block should keep their places, because the segments of the
        last block include the work after it. Copies of a block share its operations, including
        their storage numbers.

        Args:
            stack: name of the module that contains the blocks, such as "layers".
            blocks: for each block of the result, the number of a block of this workload.
        """
        block_of = [_block_of(name, stack) for name in self.units]
        found = sorted({block for block in block_of if block is not None})
        if found != list(range(len(found))) or not found:
            raise ValueError(f"{stack!r}: expected units {stack}.0, {stack}.1, ..., got {found}")
        repetition = _Repetition(stack, blocks, block_of)
        places = range(len(blocks))
        forward, added = repetition.of_pass(self.segments[: self.forward_segments], places, 0)
        backward = self.segments[self.forward_segments :]
        return replace(
            self,
            units=tuple(repetition.names(self.units)),
            segments=(*forward, *repetition.of_pass(backward, places[::-1], added)[0]),
            forward_segments=len(forward),
        )


class _Repetition:
    """One call of `Workload.repeated`; ``block_of`` has the block of each unit of the source."""

    def __init__(self, stack: str, blocks: Sequence[int], block_of: Sequence[int | None]) -> None:
        self._stack, self._blocks, self._block_of = stack, blocks, block_of
        inner = [unit for unit, block in enumerate(block_of) if block is not None]
        outer = [(-1, unit) for unit, block in enumerate(block_of) if block is None]
        copies = [
            (place, unit)
            for place, block in enumerate(blocks)
            for unit in inner
            if block_of[unit] == block
        ]
        # Pairs of a place (-1: not in a block) and a unit of the source, in the order of the
        # result's units: all blocks follow where the first one was.
        before = [pair for pair in outer if pair[1] < inner[0]]
        self._units = [*before, *copies, *outer[len(before) :]]
        self._index = {pair: index for index, pair in enumerate(self._units)}

    def names(self, source: Sequence[str]) -> Iterator[str]:
        """Yield the names of the result's units."""
        for place, unit in self._units:
            inner = source[unit].removeprefix(f"{self._stack}.{self._block_of[unit]}")
            yield source[unit] if place < 0 else f"{self._stack}.{place}{inner}"

    def of_pass(
        self, segments: Sequence[Segment], places: Sequence[int], added: int
    ) -> tuple[list[Segment], int]:
        """Repeat the segments of one pass, which starts ``added`` bytes higher than the source.

        Returns:
            The segments, and by how many bytes more than the source the pass ends.
        """
        in_blocks = [
            index
            for index, segment in enumerate(segments)
            if self._block_of[segment.unit] is not None
        ]
        if not in_blocks:
            return [self._moved(segment, -1, added) for segment in segments], added
        first, last = in_blocks[0], in_blocks[-1]
        runs: dict[int, list[Segment]] = {}
        for segment in segments[first : last + 1]:
            block = self._block_of[segment.unit]
            if block is None:
                raise ValueError(f"{self._stack!r}: other units run between its blocks")
            runs.setdefault(block, []).append(segment)
        # No gradient reaches frozen blocks before the first one that is trained.
        order = [(place, runs[block]) for place in places if (block := self._blocks[place]) in runs]
        result = [self._moved(segment, -1, added) for segment in segments[:first]]
        offset, end = added, added + order[0][1][0].start_bytes
        for place, run in order:
            offset = end - run[0].start_bytes
            result += [self._moved(segment, place, offset) for segment in run]
            end = result[-1].end_bytes
        result += [self._moved(segment, -1, offset) for segment in segments[last + 1 :]]
        return result, offset

    def _moved(self, segment: Segment, place: int, num_bytes: int) -> Segment:
        return segment.shifted(self._index[place, segment.unit], num_bytes)


def _block_of(unit: str, stack: str) -> int | None:
    """Return the number of the block of ``stack`` that a unit belongs to, or None."""
    if not unit.startswith(f"{stack}."):
        return None
    number = unit[len(stack) + 1 :].split(".", maxsplit=1)[0]
    return int(number) if number.isdecimal() else None
