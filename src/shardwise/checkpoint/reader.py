"""Reading tensors, with every byte checked on the way into its place."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.checkpoint.crc import BLOCK_BYTES, Part, blocks, crc32, join
from shardwise.checkpoint.shares import Share, bytes_of
from shardwise.checkpoint.sources import Source
from shardwise.errors import CheckpointDamaged

__all__ = ["Reader", "check_parts"]


class Reader:
    """Reads from ``source``, piece by piece, and compares with the blocks' checksums.

    A block of which this rank reads only a part can be checked with the other ranks alone:
    its checksums gather in ``parts``, for `check_parts`.
    """

    def __init__(
        self,
        source: Source,
        sums: Mapping[str, Sequence[int]] | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """Without ``sums`` there is nothing to compare with; ``numbers`` are those of parts."""
        self.source = source
        self._sums = sums
        self._numbers = numbers or {}
        self.parts: list[Part] = []
        self.bytes_read = 0
        self._lock = threading.Lock()

    def read(self, name: str, into: Share) -> None:
        """Fill ``into`` with elements of a tensor, converted to its dtype.

        Raises:
            CheckpointDamaged: names the tensor.
        """
        spec = self.source.specs[name]
        start, stop = (n * spec.itemsize for n in (into.start, into.start + len(into.elements)))
        fits = into.elements.dtype is spec.torch_dtype and into.elements.device.type == "cpu"
        here = bytes_of(into.elements) if fits else memoryview(b"")
        crc, since = 0, start  # of what is read of a block so far
        for begin, end in blocks(start, stop, self.source.read_bytes):
            content = here[begin - start : end - start]
            if not fits:
                landing = torch.empty((end - begin) // spec.itemsize, dtype=spec.torch_dtype)
                content = bytes_of(landing)
            self.source.read(name, begin, content)
            for first, last in blocks(begin, end):
                if self._sums is not None:
                    crc = crc32(content[first - begin : last - begin], crc)
                    if last == stop or last % BLOCK_BYTES == 0:
                        self._check(name, since, last, crc)
                        crc, since = 0, last
            if not fits:
                place = (begin - start) // spec.itemsize
                into.elements[place : place + len(landing)].copy_(landing)
        with self._lock:
            self.bytes_read += stop - start

    def read_whole(self, name: str) -> Tensor:
        """A tensor of its own, on the CPU."""
        spec = self.source.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.torch_dtype)
        self.read(name, Share(0, whole.view(-1)))
        return whole

    def _check(self, name: str, start: int, stop: int, crc: int) -> None:
        assert self._sums is not None
        number = start // BLOCK_BYTES
        size = self.source.specs[name].num_bytes
        if start % BLOCK_BYTES or stop < min(size, (number + 1) * BLOCK_BYTES):
            self.parts.append(Part(self._numbers[name], start, stop, crc))
        elif crc != self._sums[name][number]:
            raise damaged(name, number)


def check_parts(
    parts: Sequence[Part], tensors: Mapping[int, tuple[str, int, Sequence[int]]]
) -> None:
    """Check the blocks that ranks have read between them.

    Args:
        parts: of all ranks; replicas read the same ones.
        tensors: name, bytes and checksums of the blocks, by number.

    Raises:
        CheckpointDamaged: names the tensor.
    """
    by_block: dict[tuple[int, int], set[Part]] = {}
    for part in parts:
        by_block.setdefault((part.tensor, part.block), set()).add(part)
    for (tensor, block), found in sorted(by_block.items()):
        name, num_bytes, sums = tensors[tensor]
        start, stop = block * BLOCK_BYTES, min(num_bytes, (block + 1) * BLOCK_BYTES)
        if join(sorted(found), start, stop) != sums[block]:
            raise damaged(name, block)


def damaged(name: str, block: int) -> CheckpointDamaged:
    start = block * BLOCK_BYTES
    return CheckpointDamaged(
        f"{name}: among its bytes {start} to {start + BLOCK_BYTES} are some that were not saved "
        "so; `shardwise doctor` lists all damage; load an earlier checkpoint"
    )
