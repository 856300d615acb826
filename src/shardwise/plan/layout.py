"""Where every element of every parameter lives: integers only, no torch.

A unit's parameters of one dtype lie one after the other in a *flat buffer*, and rank r owns the
r-th of ``world_size`` equal *slots* of it, ``shard_elements`` (S) long. So the all-gather writes
straight into the buffer, the reduce-scatter reads straight from it, and a parameter is a view.

Two ranks, W1 [5, 3], W2 [2, 4], b [3]: 26 elements, S = 13 with an alignment of one element::

    flat buffer   | W1  0 1 2 3 4 5 6 7 8 9 a b c | W1 d e  W2 0 1 2 3 4 5 6 7  b 0 1 2 |
                  |<--------- rank 0 ------------>|<-------------- rank 1 ------------->|
    offsets         W1 0                                    W2 15               b 23
    runs            W1 [0, 13)                      W1 [13, 15)  W2 [0, 8)  b [0, 3)

A rank's share of a parameter is always one *run* of consecutive elements of the row-major
parameter, often all of it or nothing. Slots and parameters begin at multiples of ``alignment``
elements (vector loads and cuBLAS want 16 bytes); that is the only padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

__all__ = ["Layout", "ParameterSpec", "Run", "Slot", "lay_out"]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the plan knows of a parameter; tied parameters are one, with several names."""

    names: tuple[str, ...]  # fully qualified; the first is the canonical one
    shape: tuple[int, ...]
    dtype: str  # "float32", as torch prints it without its prefix
    itemsize: int  # bytes
    trainable: bool

    def __post_init__(self) -> None:
        assert self.names, "a parameter has a name"
        assert all(size >= 0 for size in self.shape)
        assert self.itemsize > 0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)`` of a row-major parameter; empty when they are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: elements ``[offset, offset + num_elements)`` of the flat buffer."""

    parameter: ParameterSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.parameter.num_elements


@dataclass(frozen=True)
class Layout:
    """The flat buffer of one unit and dtype over ``world_size`` ranks."""

    slots: tuple[Slot, ...]
    world_size: int
    shard_elements: int

    def __post_init__(self) -> None:
        assert self.slots
        assert self.world_size >= 1
        assert len({slot.parameter.dtype for slot in self.slots}) == 1, "one dtype a buffer"
        end = 0
        for slot in self.slots:
            assert slot.offset >= end, f"{slot.parameter.name} overlaps its predecessor"
            end = slot.stop
        assert end <= self.num_elements, "the last parameter ends inside the buffer"

    @property
    def num_elements(self) -> int:
        """Length of the flat buffer, padding included."""
        return self.world_size * self.shard_elements

    @cached_property
    def parameter_elements(self) -> int:
        return sum(slot.parameter.num_elements for slot in self.slots)

    @property
    def padding_elements(self) -> int:
        return self.num_elements - self.parameter_elements

    @property
    def dtype(self) -> str:
        return self.slots[0].parameter.dtype

    @property
    def itemsize(self) -> int:
        return self.slots[0].parameter.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_elements * self.itemsize

    def run(self, slot: Slot, rank: int) -> Run:
        """The elements of ``slot``'s parameter that ``rank`` owns."""
        size = slot.parameter.num_elements
        start = rank * self.shard_elements - slot.offset
        stop = start + self.shard_elements
        return Run(min(max(start, 0), size), min(max(stop, 0), size))

    def runs(self, slot: Slot) -> tuple[Run, ...]:
        """The runs of ``slot``'s parameter, by rank; together they are the whole parameter."""
        return tuple(self.run(slot, rank) for rank in range(self.world_size))

    def offset_in_shard(self, slot: Slot, rank: int) -> int:
        """Where ``rank``'s run of ``slot``'s parameter begins in that rank's shard."""
        return min(max(slot.offset - rank * self.shard_elements, 0), self.shard_elements)


def lay_out(
    parameters: Sequence[ParameterSpec], world_size: int, *, alignment_bytes: int = 16
) -> Layout:
    """Place ``parameters`` (of one dtype, in order) in a flat buffer over ``world_size`` ranks."""
    alignment = max(1, alignment_bytes // parameters[0].itemsize)
    slots = []
    end = 0
    for parameter in parameters:
        slots.append(Slot(parameter, offset=end))
        end = _round_up(slots[-1].stop, alignment)
    shard_elements = _round_up(-(-end // world_size), alignment)
    return Layout(tuple(slots), world_size, shard_elements)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
