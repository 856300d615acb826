"""Gathers and sums that send blockwise quantized numbers.

Every rank decodes the same bytes, also for its own slot, so replicas have the same bits. Sums are
computed in float32 (float64 for float64), in the order of the ranks. With n ranks::

    gather       own slot -> codes   all-gather   n slots of codes -> slots
    reduction    n slots -> codes    all-to-all   n slots of codes -> their sum
    all-reduce   a reduction, then a gather of the sums

A reduction over several hosts may sum within each host first, so that a host sends one sum instead
of the addends of all its ranks. Each such hop quantizes again.

Source: Wang et al., ZeRO++, 2023 (arXiv 2306.10209), where these are qwZ and qgZ.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from shardwise.blockwise import Blocks
from shardwise.comm.api import Hop, Operation, RankGroup, Reduction, Stage, Step, Work
from shardwise.comm.communicator import Collectives

__all__ = ["QuantizedSums", "quantized_gather"]


def quantized_gather(
    collectives: Collectives,
    blocks: Blocks,
    flat: Tensor,
    group: RankGroup,
    label: str,
    fill: Callable[[], None],
) -> Work:
    """As `Collectives.all_gather`; this rank's own slot is rounded too."""
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
        blocks: the quantization of addends.
        ranks_per_host: sum over this many neighbors first; None: over all ranks at once.
        error_feedback: keep the rounding error of this rank's addends, in their dtype, and add it
            to the next ones (Karimireddy et al., 2019, arXiv 1901.09847).
    """

    def __init__(self, blocks: Blocks, ranks_per_host: int | None, error_feedback: bool) -> None:
        self.blocks = blocks
        self.ranks_per_host = ranks_per_host
        self.error_feedback = error_feedback
        self.residual: Tensor | None = None  # error of the first hop, in the shape of its rows

    def reduce(self, collectives: Collectives, reduction: Reduction, label: str) -> Work:
        """As `Collectives.reduce`."""
        if all(stage.group.size == 1 for stage in reduction.stages):
            return collectives.reduce(reduction, label)
        return collectives.relay(list(_Sum(self, reduction).steps()), label)

    def compensate(self, rows: Tensor, sent: Tensor) -> None:
        """Encode ``rows`` plus the last rounding error, and keep the new one."""
        residual = torch.zeros_like(rows) if self.residual is None else self.residual
        wanted = rows + residual
        self.blocks.encode(wanted, sent)
        self.blocks.decode(sent, residual)
        # An overflow leaves no error to compensate.
        self.residual = torch.sub(wanted, residual, out=residual).nan_to_num_(0.0, 0.0, 0.0)


class _Sum:
    """One reduction: the sum so far, and its steps, all created before the first one runs."""

    def __init__(self, sums: QuantizedSums, reduction: Reduction) -> None:
        self._sums = sums
        self._blocks = sums.blocks
        self._reduction = reduction
        self._value = reduction.flat
        self._dtype = torch.promote_types(self._value.dtype, torch.float32)  # of sums
        self._size = len(reduction.flat)  # of the value, after the steps created so far
        self._is_first = True  # no addition was created

    def steps(self) -> Iterator[Step]:
        first, *rest = self._reduction.stages
        yield from self._stage(first)
        if self._reduction.carried is not None:
            yield self._add_carried
        for stage in rest:
            yield from self._stage(stage)
        yield self._finish

    def _stage(self, stage: Stage) -> Iterator[Hop]:
        group, size = stage.group, self._size
        if group.size == 1:
            return
        near = self._sums.ranks_per_host or group.size
        if near < group.size and self._is_first:  # later stages have one rank per host
            start, ranks = group.index // near * near, group.ranks
            # The i-th rank of this host sums the slots of the i-th ranks of all hosts.
            yield self._addition(group.select(*ranks[start : start + near]), group.size)
            column = group.select(*ranks[group.index % near :: near])
            yield self._addition(column, column.size)
        else:
            yield self._addition(group, group.size)
        if stage.operation is Operation.ALL_REDUCE:
            yield self._gather(group, size)

    def _addition(self, group: RankGroup, num_slots: int) -> Hop:
        """Return a hop after which this rank has the sum of every ``group.size``-th slot."""
        slot_size = -(-self._size // num_slots)
        self._size = size = slot_size * num_slots // group.size
        compensates = self._is_first and self._sums.error_feedback
        self._is_first = False

        def encode(sent: Tensor) -> None:
            missing = slot_size * num_slots - len(self._value)
            value = torch.nn.functional.pad(self._value, (0, missing)) if missing else self._value
            slots = value.view(-1, group.size, slot_size)
            rows = slots.transpose(0, 1).reshape(group.size, size)
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
        """Return a hop that gathers the values of all ranks and keeps ``whole_size`` elements."""
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
