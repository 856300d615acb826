"""The text and the order in which it is read: bytes, drawn by step and never by rank."""

import hashlib
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.train.config import DataConfig

__all__ = ["VOCABULARY", "Bytes", "Corpus", "Sampler", "read_corpus"]

VOCABULARY = 256  # a token is a byte
STDLIB = "stdlib"
# Tests repeat themselves, and what is installed beside the library differs between machines.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """The text that is trained on, and the text that is not."""

    name: str  # what people read
    num_files: int
    train: Bytes
    validation: Bytes

    @property
    def description(self) -> str:
        megabytes = (len(self.train) + len(self.validation)) / 1e6
        return f"{self.name}: {self.num_files} files, {megabytes:.1f} MB"

    @property
    def digest(self) -> int:
        """CRC-32 of all of it."""
        return zlib.crc32(self.validation.data, zlib.crc32(self.train.data))

    def check_holds(self, context: int) -> None:
        """Refuse a text that is shorter than one sequence.

        Raises:
            ConfigError: not even one sequence and the byte after it fit.
        """
        shorter = min(len(self.train), len(self.validation))
        if shorter <= context:
            raise ConfigError(
                f"data.path: {self.name} leaves {shorter} bytes to train or validate on, "
                f"model.context={context} needs at least {context + 1}; take more text"
            )


@dataclass(frozen=True)
class Sampler:
    """Random sequences of a text.

    The sequences of a step depend on the seed and the step alone: neither the number of ranks
    nor the micro batch can change what is learned, and a resumed run goes on with the same text.
    """

    text: Bytes
    context: int
    global_batch: int
    seed: int

    def draw(self, step: int) -> NDArray[np.int64]:
        """Where the sequences of ``step`` begin, [global_batch]."""
        generator = np.random.Generator(np.random.PCG64([self.seed, step]))
        return generator.integers(0, len(self.text) - self.context, size=self.global_batch)

    def share(self, step: int, *, rank: int, num_ranks: int) -> Tensor:
        """The part of ``step``'s sequences that ``rank`` takes.

        Returns:
            int64 [global_batch / num_ranks, context + 1]: each sequence and the byte after it.
        """
        assert self.global_batch % num_ranks == 0
        size = self.global_batch // num_ranks
        starts = self.draw(step)[rank * size : (rank + 1) * size]
        positions = starts[:, None] + np.arange(self.context + 1)
        return torch.from_numpy(self.text[positions].astype(np.int64))


def read_corpus(config: DataConfig) -> Corpus:
    """Read the standard library, a file or the files of a directory.

    Raises:
        ConfigError: there is no such text, or it cannot be read.
    """
    files = _find_files(config)
    texts = [_read(file.path) for file in files]
    name = "the Python standard library" if config.path == STDLIB else config.path
    train, validation = _split(files, texts, config.validation_share)
    return Corpus(name, len(files), np.concatenate(train), np.concatenate(validation))


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    name: str  # relative to the directory, so that it is the same on every machine

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()


def _find_files(config: DataConfig) -> list[_File]:
    if config.path == STDLIB:
        root, pattern = Path(sysconfig.get_path("stdlib")), "**/*.py"
    else:
        root, pattern = Path(config.path).expanduser(), config.glob
    if root.is_file():
        return [_File(root, root.name)]
    if not root.is_dir():
        raise ConfigError(f"data.path={config.path!r}: no such file or directory")
    try:
        found = [_File(path, path.relative_to(root).as_posix()) for path in root.glob(pattern)]
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"data.glob={pattern!r}: {error}") from None
    files = [file for file in found if file.path.is_file()]
    if config.path == STDLIB:
        files = [file for file in files if NOT_LIBRARY.isdisjoint(file.name.split("/"))]
    if not files:
        raise ConfigError(f"data.path={config.path!r}: no file matches data.glob={pattern!r}")
    return sorted(files, key=lambda file: file.name)


def _read(path: Path) -> Bytes:
    try:
        return np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read: {error.strerror}") from None


def _split(
    files: Sequence[_File], texts: Sequence[Bytes], share: float
) -> tuple[list[Bytes], list[Bytes]]:
    """Whole files go one way or the other, so that no validation text was half seen in training.

    They are taken in the order of their names' digests, which has no pattern and is the same on
    every machine, as long as they fit. Where none fits (one file, or a few), the end of the text
    is the validation text.
    """
    wanted = round(share * sum(len(text) for text in texts))
    room = wanted
    chosen: set[int] = set()
    for index in sorted(range(len(files)), key=lambda index: files[index].digest):
        if 0 < len(texts[index]) <= room:
            chosen.add(index)
            room -= len(texts[index])
    if not chosen:
        text = np.concatenate(texts)
        return [text[: len(text) - wanted]], [text[len(text) - wanted :]]
    train = [text for index, text in enumerate(texts) if index not in chosen]
    return train, [texts[index] for index in sorted(chosen)]
