"""The text of a run, streamed from its files in an order that depends on seed and step alone."""

import hashlib
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardwise.errors import ConfigError
from shardwise.train.config import DataConfig

__all__ = ["VOCABULARY", "Corpus", "FileRange", "Sequences", "Text", "open_corpus"]

VOCABULARY = 256  # a token is a byte
STDLIB = "stdlib"
# Tests repeat themselves, and installed packages differ between machines.
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
CHUNK_BYTES = 1 << 24

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes of a file."""

    path: Path
    offset: int
    size: int


class Text:
    """Pieces of files as one sequence of bytes; nothing is kept in memory."""

    def __init__(self, pieces: Sequence[FileRange]) -> None:
        self.pieces = [piece for piece in pieces if piece.size]
        self._starts = [0, *accumulate(piece.size for piece in self.pieces)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, size: int) -> Bytes:
        """Bytes from ``start`` on, uint8 [size].

        Raises:
            ConfigError: a file cannot be read, or has become shorter.
        """
        parts = [np.empty(0, np.uint8)]
        index = bisect_right(self._starts, start) - 1
        while size:
            piece, skipped = self.pieces[index], start - self._starts[index]
            length = min(size, piece.size - skipped)
            try:
                part = np.fromfile(piece.path, np.uint8, length, offset=piece.offset + skipped)
            except OSError as error:
                reason = f"cannot be read: {error.strerror}"
                raise ConfigError(f"data.path: {piece.path} {reason}") from None
            if len(part) != length:
                raise ConfigError(f"data.path: {piece.path} has changed during the run")
            parts.append(part)
            start, size, index = start + length, size - length, index + 1
        return np.concatenate(parts)

    def split(self, at: int) -> tuple["Text", "Text"]:
        """The first ``at`` bytes, and the others."""
        first, second = [], []
        for piece, start in zip(self.pieces, self._starts, strict=False):
            size = min(max(at - start, 0), piece.size)
            first.append(FileRange(piece.path, piece.offset, size))
            second.append(FileRange(piece.path, piece.offset + size, piece.size - size))
        return Text(first), Text(second)


@dataclass(frozen=True)
class Corpus:
    """The text to train on and the text to validate on."""

    name: str
    num_files: int
    train: Text
    validation: Text

    def __str__(self) -> str:
        megabytes = (len(self.train) + len(self.validation)) / 1e6
        return f"{self.name}: {self.num_files} files, {megabytes:.1f} MB"

    @cached_property
    def digest(self) -> int:
        """CRC-32 of all bytes; reads them all."""
        digest = 0
        for text in (self.train, self.validation):
            for start in range(0, len(text), CHUNK_BYTES):
                chunk = text.read(start, min(CHUNK_BYTES, len(text) - start))
                digest = zlib.crc32(chunk.data, digest)
        return digest

    def check_holds(self, context: int) -> None:
        """Raise a ConfigError if a text is shorter than one sequence and the byte after it."""
        shorter = min(len(self.train), len(self.validation))
        if shorter <= context:
            raise ConfigError(
                f"data.path: {self.name} leaves {shorter} bytes to train or validate on, "
                f"model.context={context} needs at least {context + 1}; use more text"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequences(Dataset[Tensor]):
    """The batches of one rank, by step.

    Sequences start at random places of the text, drawn for the global batch from the seed and the
    step alone. So neither the number of ranks, the micro batch, nor the workers of a DataLoader
    changes the order of the data, and resuming is starting at another step.
    """

    text: Text
    context: int
    global_batch: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def draw(self, step: int) -> NDArray[np.int64]:
        """Where the sequences of the global batch start, [global_batch]."""
        generator = np.random.Generator(np.random.PCG64([self.seed, step]))
        return generator.integers(0, len(self.text) - self.context, size=self.global_batch)

    def __getitem__(self, step: int) -> Tensor:
        """This rank's sequences and the byte after each.

        Returns:
            int64 [global_batch / world_size, context + 1].
        """
        size = self.global_batch // self.world_size
        starts = self.draw(step)[self.rank * size :][:size]
        sequences = [self.text.read(int(start), self.context + 1) for start in starts]
        return torch.from_numpy(np.stack(sequences).astype(np.int64))

    def loader(self, steps: range, workers: int, *, pin_memory: bool) -> DataLoader[Tensor]:
        """Reads the batches ahead in ``workers`` processes, or on demand if there are none."""
        return DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # the default one belongs to the model
        )


def open_corpus(config: DataConfig) -> Corpus:
    """Find the files of the standard library or of a directory, or take a file.

    Raises:
        ConfigError: there is no such text.
    """
    files = _find_files(config)
    name = "the Python standard library" if config.path == STDLIB else config.path
    train, validation = _split(files, config.validation_share)
    return Corpus(name, len(files), train, validation)


def _find_files(config: DataConfig) -> dict[str, Path]:
    """By their names relative to the directory, which are the same on every machine; sorted."""
    if config.path == STDLIB:
        root, pattern = Path(sysconfig.get_path("stdlib")), "**/*.py"
    else:
        root, pattern = Path(config.path).expanduser(), config.glob
    if root.is_file():
        return {root.name: root}
    if not root.is_dir():
        raise ConfigError(f"data.path={config.path!r}: no such file or directory")
    try:
        found = {path.relative_to(root).as_posix(): path for path in root.glob(pattern)}
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"data.glob={pattern!r}: {error}") from None
    excluded = NOT_STDLIB if config.path == STDLIB else set()
    files = {
        name: path
        for name, path in sorted(found.items())
        if path.is_file() and excluded.isdisjoint(name.split("/"))
    }
    if not files:
        raise ConfigError(f"data.path={config.path!r}: no file matches data.glob={pattern!r}")
    return files


def _split(files: dict[str, Path], share: float) -> tuple[Text, Text]:
    """Split by whole files, so that no validation text was partly seen in training.

    Files go to validation in the order of their names' digests, which has no pattern and is the
    same on every machine, as long as they fit. If none fits, the end of the text is for validation.
    """
    pieces = {name: FileRange(path, 0, path.stat().st_size) for name, path in files.items()}
    text = Text(list(pieces.values()))
    wanted = left = round(share * len(text))
    chosen = set()
    for name in sorted(pieces, key=_digest):
        if 0 < pieces[name].size <= left:
            chosen.add(name)
            left -= pieces[name].size
    if not chosen:
        return text.split(len(text) - wanted)
    train = [piece for name, piece in pieces.items() if name not in chosen]
    return Text(train), Text([piece for name, piece in pieces.items() if name in chosen])


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
