"""Writing to a store that takes whole objects: each file is sent by one rank.

Files are dealt to ranks. In rounds, every rank sends the next bytes of its file, all at once; those
that lie on other ranks come from there just before. So what a rank takes is a few megabytes for
the round and what fsspec keeps of an upload, however large the file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.crc import BLOCK_BYTES, Part, blocks, crc32
from shardwise.checkpoint.files import File
from shardwise.checkpoint.manifest import Component, tensor_ids
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.remote import Remote, Upload
from shardwise.checkpoint.shares import Share, bytes_of
from shardwise.errors import StepError

__all__ = ["deal", "upload"]

# Of a round, over all files; a rank may have to hold all of it, twice.
ROUND_BYTES = 4 << 20
_MIN_BYTES = 1 << 16  # of a round and a file

_Numbered = tuple[File, Sequence[int]]  # with the numbers of its tensors


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes ``[start, stop)`` of a tensor, all in one block and on one rank."""

    file: File
    tensor: int  # its number in the checkpoint
    start: int
    stop: int
    rank: int


def upload(
    folder: Remote,
    components: Mapping[str, Component],
    shares: Mapping[str, Mapping[str, Share]],
    others: Mapping[str, bytes],
    peers: Peers,
) -> list[Part]:
    """Send all files but the manifest; the checksums of this rank's bytes.

    Args:
        folder: where to.
        components: what files there are.
        shares: what is here of them, by component and tensor. Together the ranks have all, once.
        others: whole files.
        peers: the ranks; all call this.

    Raises:
        CheckpointError: on all ranks; no upload goes on.
    """
    numbered = tensor_ids(components)
    own = {numbered[name, key]: x for name, by_key in shares.items() for key, x in by_key.items()}
    holders = _holders(own, peers)
    tensors = {
        file.name: [numbered[name, spec.name] for spec in file.specs]
        for name, component in components.items()
        for file in component.files
    }
    dealt = deal([file for part in components.values() for file in part.files], peers.size)
    max_bytes = _round_bytes(sum(map(bool, dealt)))
    streams = [
        _batches(
            _pieces([(file, tensors[file.name]) for file in files], holders, max_bytes), max_bytes
        )
        for files in dealt
    ]
    uploads = _Uploads(folder, dealt[peers.rank])
    try:
        return _send(zip_longest(*streams, fillvalue=()), own, uploads, others, peers)
    except BaseException as error:
        uploads.discard()
        if isinstance(error, Exception) and not isinstance(error, StepError):  # no rank is gone
            peers.exchange(b"")  # none comes to be after what is there is removed
        raise


def deal(files: Sequence[File], num_ranks: int) -> list[list[File]]:
    """The files of each rank: large ones first, to whoever has least."""
    dealt: list[list[File]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda file: (-file.num_bytes, file.name)):
        rank = loads.index(min(loads))
        dealt[rank].append(file)
        loads[rank] += file.num_bytes
    return dealt


def _round_bytes(num_files: int) -> int:
    """Of each of so many files: a power of two."""
    return max(_MIN_BYTES, 1 << (ROUND_BYTES // max(1, num_files)).bit_length() - 1)


class _Uploads:
    """The files that this rank sends, one after the other."""

    def __init__(self, folder: Remote, files: Iterable[File]) -> None:
        self._folder = folder
        self._files = iter(files)
        self._file: File | None = None
        self._current: Upload | None = None

    def write(self, contents: Iterable[tuple[File, memoryview]]) -> None:
        """Append to files; those before one are complete."""
        for file, content in contents:
            while self._file is not file:
                self._next()
            assert self._current is not None
            self._current.write(content)

    def put(self, others: Mapping[str, bytes]) -> None:
        for name, content in others.items():
            self._folder.put(name, content)

    def finish(self) -> None:
        """Complete the rest, of which there may be more: tensors can have no elements."""
        self._next()
        while self._file is not None:
            self._next()

    def discard(self) -> None:
        if self._current is not None:
            self._current.discard()

    def _next(self) -> None:
        if self._current is not None:
            self._current.close()
        self._current = None
        self._file = next(self._files, None)
        if self._file is not None:
            self._current = Upload(self._folder, self._file.name, self._file.num_bytes)
            self._current.write(self._file.head)


def _send(
    rounds: Iterable[Sequence[Sequence[_Piece]]],
    own: Mapping[int, Share],
    uploads: _Uploads,
    others: Mapping[str, bytes],
    peers: Peers,
) -> list[Part]:
    """In a round, each rank sends the pieces at its place to the store."""
    parts: list[Part] = []
    ready: Iterable[tuple[File, memoryview]] = ()
    for batches in rounds:
        with peers.together("upload"):
            uploads.write(ready)
            here = [_contents(batch, own, peers.rank, parts) for batch in batches]
            sent = {r: _joined(row) for r, row in enumerate(here) if row and r != peers.rank}
        batch = batches[peers.rank]
        received = peers.swap(sent, _sizes(batch, peers.rank))
        ready = _in_order(batch, peers.rank, here[peers.rank], received)
    with peers.together("upload"):
        uploads.write(ready)
        uploads.finish()
        if peers.rank == 0:
            uploads.put(others)
    return parts


def _contents(
    batch: Sequence[_Piece], own: Mapping[int, Share], rank: int, parts: list[Part]
) -> list[memoryview]:
    """What is here of a batch; the checksums are added to ``parts``."""
    found = []
    for piece in batch:
        if piece.rank != rank:
            continue
        share = own[piece.tensor]
        size, first = share.elements.itemsize, share.start_byte
        content = bytes_of(
            share.elements[(piece.start - first) // size : (piece.stop - first) // size]
        )
        parts.append(Part(piece.tensor, piece.start, piece.stop, crc32(content)))
        found.append(content)
    return found


def _joined(contents: Sequence[memoryview]) -> Tensor:
    return torch.frombuffer(bytearray().join(contents), dtype=torch.uint8)


def _sizes(batch: Sequence[_Piece], own_rank: int) -> dict[int, int]:
    """How many bytes of a batch come from which of the other ranks."""
    sizes: dict[int, int] = {}
    for piece in batch:
        if piece.rank != own_rank:
            sizes[piece.rank] = sizes.get(piece.rank, 0) + piece.stop - piece.start
    return sizes


def _in_order(
    batch: Sequence[_Piece],
    own_rank: int,
    own: Iterable[memoryview],
    received: Mapping[int, Tensor],
) -> Iterator[tuple[File, memoryview]]:
    """The contents of a batch, from here and from elsewhere."""
    own = iter(own)
    rest = {rank: bytes_of(content) for rank, content in received.items()}
    for piece in batch:
        if piece.rank == own_rank:
            yield piece.file, next(own)
        else:
            size = piece.stop - piece.start
            yield piece.file, rest[piece.rank][:size]
            rest[piece.rank] = rest[piece.rank][size:]


def _holders(own: Mapping[int, Share], peers: Peers) -> dict[int, list[tuple[int, int, int]]]:
    """By tensor: the bytes that ranks hold, ``(start, stop, rank)``, in ascending order."""
    rows = [(number, share.start_byte, share.stop_byte) for number, share in own.items()]
    holders: dict[int, list[tuple[int, int, int]]] = {}
    for rank, told in enumerate(peers.exchange(np.array(rows, dtype=np.int64).tobytes())):
        for number, start, stop in np.frombuffer(told, dtype=np.int64).reshape(-1, 3).tolist():
            if start < stop:
                holders.setdefault(number, []).append((start, stop, rank))
    return {number: sorted(found) for number, found in holders.items()}


def _pieces(
    files: Iterable[_Numbered],
    holders: Mapping[int, Sequence[tuple[int, int, int]]],
    max_bytes: int,
) -> Iterator[_Piece]:
    """All of some files but their heads, in the order of the bytes."""
    size = min(max_bytes, BLOCK_BYTES)  # a power of two divides a block
    for file, tensors in files:
        for number in tensors:
            for start, stop, rank in holders.get(number, ()):
                for begin, end in blocks(start, stop, size):
                    yield _Piece(file, number, begin, end, rank)


def _batches(pieces: Iterable[_Piece], max_bytes: int) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    room = max_bytes
    for piece in pieces:
        size = piece.stop - piece.start
        if size > room:
            yield batch
            batch, room = [], max_bytes
        batch.append(piece)
        room -= size
    if batch:
        yield batch
