"""What one rank computes in one micro-batch: operations, and the activations alive around them.

A `Workload` comes from `trace`. It says nothing about a machine, so it is turned into seconds by a
machine model, and it holds neither parameters nor their gradients, which follow from the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwise.schedule.events import EventKind

__all__ = ["Kind", "Operation", "Segment", "Workload"]


class Kind(StrEnum):
    """What limits an operation."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"  # element-wise operations, reductions, copies
    COLLECTIVE = "collective"  # of tensor, context or expert parallelism


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that a rank launches."""

    name: str  # as "mm", "scaled_dot_product_attention", "native_layer_norm", "all_reduce"
    kind: Kind
    flops: int  # 2*m*n*k of a product; of attention: as if it were not causal; otherwise 0
    shape: tuple[int, ...]  # (batch, m, n, k), (batch, heads, queries, keys, head_dim), or ()
    itemsize: int  # of the dtype that it computes in
    reads: tuple[tuple[int, int], ...]  # number of the storage and bytes of each tensor
    writes: tuple[tuple[int, int], ...]
    is_causal: bool = False
    is_recomputed: bool = False  # within the backward pass, by activation checkpointing
    axis: str = ""  # of a collective: "tensor", "context" or "expert"

    @property
    def num_bytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(size for _, size in self.reads) + sum(size for _, size in self.writes)


@dataclass(frozen=True, slots=True)
class Segment:
    """Compute from the forward or backward of a unit to the next such event.

    Bytes are of activations: memory that the pass allocates and that is neither the batch nor a
    parameter, nor a gradient that was added to its parameter.
    """

    kind: EventKind  # FORWARD or BACKWARD; a FORWARD within the backward pass is a recomputation
    unit: int  # index in the units of the workload, and of the plan
    operations: tuple[Operation, ...]
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    # Less at the peak where an embedding adds its rows to the gradient of the head that shares its
    # weight, as the engine has it on a CPU, and makes no gradient of its own.
    added_rows_bytes: int = 0

    def shifted(self, unit: int, num_bytes: int) -> "Segment":
        """The same compute in another unit, with ``num_bytes`` more allocated around it."""
        return replace(
            self,
            unit=unit,
            start_bytes=self.start_bytes + num_bytes,
            peak_bytes=self.peak_bytes + num_bytes,
            end_bytes=self.end_bytes + num_bytes,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """One micro-batch of one rank."""

    units: tuple[str, ...]  # names; the first is "", the root
    segments: tuple[Segment, ...]
    forward_segments: int  # those of the forward pass come first
    sequences: int
    tokens: int
    sent_bytes: int = 0  # from a stage of a pipeline to the next one

    def repeated(self, stack: str, blocks: Sequence[int]) -> "Workload":
        """The workload of a deeper model, made of the blocks of this one.

        ``blocks`` names the block of this workload that stands at each place: with
        ``repeated("layers", [0, 1, 1, 1, 2])`` a model of three blocks becomes one of five. The
        first and the last block should stay in their places, because what follows the last block
        outside of it is among its segments. The copies of a block share its operations, and so
        the numbers of their storages.

        Args:
            stack: name of the module that holds the blocks, as "layers".
            blocks: a block of this workload for each block of the result.
        """
        return _Repetition(self, stack, blocks).result()


class _Repetition:
    """One call of `Workload.repeated`."""

    def __init__(self, source: Workload, stack: str, blocks: Sequence[int]) -> None:
        self._source, self._stack, self._blocks = source, stack, blocks
        self._block_of = [_block_of(name, stack) for name in source.units]
        found = sorted({block for block in self._block_of if block is not None})
        if found != list(range(len(found))) or not found:
            raise ValueError(f"{stack!r}: expected units {stack}.0, {stack}.1, ..., got {found}")
        self._names, self._index = self._units()

    def result(self) -> Workload:
        source = self._source
        places = list(range(len(self._blocks)))
        forward, added = self._pass(source.segments[: source.forward_segments], places, 0)
        backwards = source.segments[source.forward_segments :]
        backward, _ = self._pass(backwards, places[::-1], added)
        return replace(
            source,
            units=tuple(self._names),
            segments=(*forward, *backward),
            forward_segments=len(forward),
        )

    def _units(self) -> tuple[list[str], dict[tuple[int, int], int]]:
        """Names of the result's units; the index of a source's unit at a place (or at -1)."""
        names: list[str] = []
        index: dict[tuple[int, int], int] = {}
        is_placed = False
        for unit, name in enumerate(self._source.units):
            if self._block_of[unit] is None:
                index[unit, -1] = len(names)
                names.append(name)
            elif not is_placed:
                is_placed = True
                for place, block in enumerate(self._blocks):
                    for inner in self._units_of(block):
                        index[inner, place] = len(names)
                        rest = self._source.units[inner][len(f"{self._stack}.{block}") :]
                        names.append(f"{self._stack}.{place}{rest}")
        return names, index

    def _units_of(self, block: int) -> list[int]:
        return [unit for unit, its_block in enumerate(self._block_of) if its_block == block]

    def _pass(
        self, segments: Sequence[Segment], places: Sequence[int], added: int
    ) -> tuple[list[Segment], int]:
        """The segments of one pass, which starts with ``added`` bytes more than in the source.

        Returns them and how many bytes more it ends with.
        """
        own = [index for index, one in enumerate(segments) if self._block_of[one.unit] is not None]
        if not own:
            return [self._moved(one, -1, added) for one in segments], added
        first, last = own[0], own[-1]
        runs = self._runs(segments[first : last + 1])
        order = [runs[self._blocks[place]] for place in places]
        result = [self._moved(one, -1, added) for one in segments[:first]]
        more, end = added, added + order[0][0].start_bytes
        for place, run in zip(places, order, strict=True):
            more = end - run[0].start_bytes
            result += [self._moved(one, place, more) for one in run]
            end = result[-1].end_bytes
        result += [self._moved(one, -1, more) for one in segments[last + 1 :]]
        return result, more

    def _runs(self, segments: Sequence[Segment]) -> dict[int, list[Segment]]:
        runs: dict[int, list[Segment]] = {}
        for segment in segments:
            block = self._block_of[segment.unit]
            if block is None:
                raise ValueError(f"{self._stack!r}: other units run between its blocks")
            runs.setdefault(block, []).append(segment)
        return runs

    def _moved(self, segment: Segment, place: int, num_bytes: int) -> Segment:
        return segment.shifted(self._index[segment.unit, place], num_bytes)


def _block_of(unit: str, stack: str) -> int | None:
    """The number of the block of ``stack`` that a unit belongs to."""
    if not unit.startswith(f"{stack}."):
        return None
    number = unit[len(stack) + 1 :].split(".", maxsplit=1)[0]
    return int(number) if number.isdecimal() else None
