"""Checksums of a tensor's blocks, independent of which ranks wrote or read them.

The bytes of a tensor are divided into blocks of ``BLOCK_BYTES``, and each block has a CRC-32. Where
a boundary between ranks falls inside a block, each rank computes the checksum of its part, and the
two are combined. zlib-ng is sixteen times as fast as zlib, which would take a third of a load.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32, crc32_combine

__all__ = [
    "BLOCK_BYTES",
    "BlockPart",
    "block_parts",
    "block_sums",
    "by_tensor",
    "combine",
    "crc32",
    "split_at_blocks",
]

BLOCK_BYTES = 1 << 20  # a multiple of every dtype's size


class BlockPart(NamedTuple):
    """The checksum of bytes ``[start, stop)`` of a tensor, all in one block."""

    tensor: int  # number of the tensor in the checkpoint
    start: int
    stop: int
    crc: int

    @property
    def block(self) -> int:
        return self.start // BLOCK_BYTES


def split_at_blocks(start: int, stop: int, size: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Divide bytes ``[start, stop)`` of a tensor at multiples of ``size``."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


def block_parts(tensor: int, start: int, content: memoryview) -> list[BlockPart]:
    """The checksum of each block's part of ``content``, a tensor's bytes from ``start`` on."""
    return [
        BlockPart(tensor, begin, end, crc32(content[begin - start : end - start]))
        for begin, end in split_at_blocks(start, start + content.nbytes)
    ]


def by_tensor(parts: Iterable[BlockPart]) -> dict[int, list[BlockPart]]:
    found: dict[int, list[BlockPart]] = {}
    for part in parts:
        found.setdefault(part.tensor, []).append(part)
    return found


def block_sums(parts: Iterable[BlockPart], num_bytes: int) -> list[int | None]:
    """The checksum of each block of a tensor of ``num_bytes``, from those of its ``parts``.

    Replicas may report the same part twice. A block's checksum is None if a part is missing or if
    replicas disagree about one.
    """
    by_block: dict[int, list[BlockPart]] = {}
    for part in sorted(set(parts)):
        by_block.setdefault(part.block, []).append(part)
    return [
        combine(by_block.get(number, ()), start, stop)
        for number, (start, stop) in enumerate(split_at_blocks(0, num_bytes))
    ]


def combine(parts: Iterable[BlockPart], start: int, stop: int) -> int | None:
    """The checksum of ``[start, stop)`` from those of its sorted parts; None if one is missing."""
    crc, end = crc32(b""), start
    for part in parts:
        if part.start != end:
            return None
        crc = crc32_combine(crc, part.crc, part.stop - part.start)
        end = part.stop
    return crc if end == stop else None
