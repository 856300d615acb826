"""Gathers and sums whose bytes on the way are quantized, block by block.

Every rank decodes the same bytes, those of its own slot too, so replicas have the same bits. Sums
are taken in single precision (float64 in double), in the order of the ranks. Among n ranks::

    gather       own slot -> codes   all-gather   n slots of codes -> slots
    reduction    n slots -> codes    all-to-all   n slots of codes -> their sum
    all-reduce   a reduction, and a gather of its sums

A reduction among ranks of several hosts may add up within each host first, so that a host sends one
sum, and not an addend of each of its ranks. What is sent is quantized anew in every such hop.

Source: Wang et al., ZeRO++, 2023 (arXiv 2306.10209), where these are qwZ and qgZ.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from shardwise.blockwise import Blocks
from shardwise.transport.api import Hop, Operation, RankGroup, Reduction, Stage, Work
from shardwise.transport.communicator import Collectives

__all__ = ["QuantizedSums", "quantized_gather"]

_Arrange = Callable[[Tensor], Tensor]


def quantized_gather(
    collectives: Collectives,
    blocks: Blocks,
    flat: Tensor,
    group: RankGroup,
    label: str,
    fill: Callable[[], None],
) -> Work:
    """As `ProcessGroupCollectives.all_gather`; this rank's slot is rounded as the others are."""
    slots = flat.view(group.size, -1)

    def encode(row: Tensor) -> None:
        fill()
        blocks.encode(slots[group.index], row)

    row_bytes = blocks.num_bytes(slots.shape[1])
    decode = partial(blocks.decode, numbers=slots)
    return collectives.relay([Hop(group, row_bytes, encode, decode, gathers=True)], label)


class QuantizedSums:
    """The reductions of one buffer.

    Args:
        blocks: how addends are quantized.
        ranks_per_host: neighbors that add up before others get their sum; None: all at once.
        error_feedback: keep what rounding takes from this rank's addends, in their dtype, and add
            it to the next ones (Karimireddy et al., 2019, arXiv 1901.09847).
    """

    def __init__(self, blocks: Blocks, ranks_per_host: int | None, error_feedback: bool) -> None:
        self.blocks = blocks
        self.ranks_per_host = ranks_per_host
        self.error_feedback = error_feedback
        self.residual: Tensor | None = None  # of the first hop, in the shape of its rows

    def reduce(self, collectives: Collectives, reduction: Reduction, label: str) -> Work:
        """As `ProcessGroupCollectives.reduce`."""
        if all(stage.group.size == 1 for stage in reduction.stages):
            return collectives.reduce(reduction, label)
        return collectives.relay(list(_Sum(self, reduction).steps()), label)

    def compensate(self, rows: Tensor, sent: Tensor) -> None:
        """Encode ``rows`` with what rounding took from the last ones, and keep what it takes."""
        residual = torch.zeros_like(rows) if self.residual is None else self.residual
        wanted = rows + residual
        self.blocks.encode(wanted, sent)
        self.blocks.decode(sent, residual)
        # After an overflow there is nothing to make up for.
        self.residual = torch.sub(wanted, residual, out=residual).nan_to_num_(0.0, 0.0, 0.0)


class _Sum:
    """One reduction: the sum so far, and the steps that are left, made before any of them runs."""

    def __init__(self, sums: QuantizedSums, reduction: Reduction) -> None:
        self._sums = sums
        self._blocks = sums.blocks
        self._reduction = reduction
        self._value = reduction.flat
        self._dtype = torch.promote_types(self._value.dtype, torch.float32)  # of sums
        self._size = len(reduction.flat)  # of the value after the steps made so far
        self._compensates = sums.error_feedback

    def steps(self) -> Iterator[Hop | Callable[[], None]]:
        first, *rest = self._reduction.stages
        yield from self._stage(first)
        if self._reduction.carried is not None:
            yield self._add_carried
        for stage in rest:
            yield from self._stage(stage)
        yield self._finish

    def _stage(self, stage: Stage) -> Iterator[Hop]:
        group, size = stage.group, self._size
        if group.size > 1:
            yield from self._scatter(group)
            if stage.operation is Operation.ALL_REDUCE:
                yield self._gather(group, size)

    def _scatter(self, group: RankGroup) -> Iterator[Hop]:
        near, ranks = self._sums.ranks_per_host or group.size, group.ranks
        # The ranks of a second stage are on hosts of their own.
        is_first = self._size == len(self._reduction.flat)
        if near >= group.size or not is_first:
            yield self._addition(group, lambda slots: slots)
            return
        first = group.index // near * near
        # A rank of this host gets the slots of all ranks that have its place in their hosts.
        yield self._addition(
            group.select(*ranks[first : first + near]),
            lambda slots: slots.view(-1, near, slots.shape[1]).transpose(0, 1),
            group.size,
        )
        yield self._addition(group.select(*ranks[group.index % near :: near]), lambda slots: slots)

    def _addition(self, group: RankGroup, arrange: _Arrange, num_slots: int | None = None) -> Hop:
        """Leave the sum of this rank's row of all ranks' rows."""
        num_slots = num_slots or group.size
        slot_size = -(-self._size // num_slots)
        self._size = size = slot_size * num_slots // group.size
        compensates, self._compensates = self._compensates, False

        def encode(sent: Tensor) -> None:
            missing = slot_size * num_slots - len(self._value)
            value = torch.nn.functional.pad(self._value, (0, missing)) if missing else self._value
            rows = arrange(value.view(num_slots, slot_size)).reshape(group.size, size)
            encode_rows = self._sums.compensate if compensates else self._blocks.encode
            encode_rows(rows, sent)

        def decode(received: Tensor) -> None:
            self._value, addend = received.new_empty((2, size), dtype=self._dtype)
            self._blocks.decode(received[0], self._value)
            for row in received[1:]:
                self._blocks.decode(row, addend)
                self._value += addend

        return Hop(group, self._blocks.num_bytes(size), encode, decode)

    def _gather(self, group: RankGroup, whole_size: int) -> Hop:
        """Leave the first ``whole_size`` of all ranks' values on each of them."""
        size = self._size
        self._size = whole_size

        def encode(row: Tensor) -> None:
            self._blocks.encode(self._value, row)

        def decode(rows: Tensor) -> None:
            values = rows.new_empty((group.size, size), dtype=self._dtype)
            self._blocks.decode(rows, values)
            self._value = values.view(-1)[:whole_size]

        return Hop(group, self._blocks.num_bytes(size), encode, decode, gathers=True)

    def _add_carried(self) -> None:
        assert self._reduction.carried is not None
        self._value = self._value + self._reduction.carried

    def _finish(self) -> None:
        out = self._reduction.out
        if out is None:
            self._reduction.inner.copy_(self._value)
        else:
            out.copy_(self._value.mul_(self._reduction.scale))
