"""The data of a run, read from files in an order that depends only on the seed and the step."""

import json
import signal
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardwise.errors import ConfigError
from shardwise.launch.stop_signal import STOP_SIGNALS
from shardwise.train.config import Config, DataConfig, TokenizerConfig
from shardwise.train.documents import Documents, prepare, reader_of
from shardwise.train.text import STDLIB, Text, find_files, split_files
from shardwise.train.tokenizer import Bytes, Subwords, Tokenizer

__all__ = ["IGNORED", "VOCABULARY", "Batch", "Corpus", "Packed", "Sequences", "open_corpus"]

VOCABULARY = Bytes.vocabulary
IGNORED = -100  # a target that does not count
CHUNK_BYTES = 1 << 24
# Endings of files that "auto" would take for text, though their bytes are not what they contain.
_NOT_TEXT = (
    *(".json", ".arrow"),
    *(".bz2", ".gz", ".lz4", ".tar", ".tgz", ".xz", ".zip", ".zst"),
)


@dataclass(frozen=True)
class Corpus:
    """The training and validation data: bytes of files, or documents of tokens."""

    name: str
    num_files: int
    train: Text | Documents
    validation: Text | Documents
    tokenizer: Tokenizer

    def __str__(self) -> str:
        size = len(self.train) + len(self.validation)
        measured = f"{size / 1e6:.1f} M{'B' if self.unit == 'byte' else ' tokens'}"
        return f"{self.name}: {self.num_files} files, {measured}"

    @property
    def unit(self) -> str:
        """The name of a token's unit, "byte" or "token"."""
        return "byte" if isinstance(self.tokenizer, Bytes) else "token"

    @cached_property
    def digest(self) -> int:
        """CRC-32 of all bytes, which reads all files, or of all tokens, which is stored."""
        digest = 0
        for data in (self.train, self.validation):
            if isinstance(data, Documents):
                digest = zlib.crc32(str(data.facts["digest"]).encode(), digest)
                continue
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data.read(start, min(CHUNK_BYTES, len(data) - start))
                digest = zlib.crc32(chunk.data, digest)
        return digest

    @property
    def outline(self) -> list[int]:
        """Numbers that differ between most texts, without reading all of them."""
        sides = self.train, self.validation
        digests = [data.facts["digest"] for data in sides if isinstance(data, Documents)]
        return [*map(len, sides), *digests]

    def truncations(self, context: int) -> Iterator[str]:
        """Say how many conversations are truncated to a sequence, and what that loses."""
        for name, data in (("training", self.train), ("validation", self.validation)):
            if isinstance(data, Documents) and (found := data.truncated(context)).conversations:
                yield (
                    f"{found.conversations} of {len(data.ends)} documents for {name} are "
                    f"conversations longer than model.context={context}; their ends are not used, "
                    f"{found.share:.1%} of the tokens"
                )

    def check_length(self, context: int) -> None:
        """Raise a ConfigError if a text is shorter than one sequence and the byte after it."""
        shorter = min(len(self.train), len(self.validation))
        if self.unit == "byte" and shorter <= context:
            raise ConfigError(
                f"data.path: {self.name} leaves {shorter} bytes to train or validate on, "
                f"model.context={context} needs at least {context + 1}; use more text"
            )


class Batch(NamedTuple):
    """Sequences of one rank or one micro-batch; all tensors are int64 [sequences, context]."""

    inputs: Tensor
    targets: Tensor  # the token after each input, or IGNORED
    positions: Tensor | None = None  # in the document; None if documents are not separated


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequences(Dataset[Batch]):
    """The batches of one rank, by step.

    Sequences start at random positions of the text, which are drawn for the global batch from the
    seed and the step alone. The order of the data therefore does not depend on the number of ranks,
    the micro-batch or the workers of a DataLoader, and a resumed run only starts at another step.
    """

    text: Any  # a Text, or Documents in `Packed`
    context: int
    global_batch: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def draw(self, step: int) -> NDArray[np.int64]:
        """The start positions of the sequences of the global batch, [global_batch]."""
        generator = np.random.Generator(np.random.PCG64([self.seed, step]))
        return generator.integers(0, len(self.text) - self.context, size=self.global_batch)

    def own(self, step: int) -> NDArray[np.int64]:
        """This rank's part of `draw`."""
        size = self.global_batch // self.world_size
        return self.draw(step)[self.rank * size :][:size]

    def __getitem__(self, step: int) -> Batch:
        """This rank's sequences, [global_batch / world_size, context]."""
        sequences = [self.text.read(int(start), self.context + 1) for start in self.own(step)]
        tokens = torch.from_numpy(np.stack(sequences).astype(np.int64))
        return Batch(tokens[:, :-1], tokens[:, 1:])

    @property
    def num_windows(self) -> int:
        """The windows of `in_order`."""
        return -(-(len(self.text) - 1) // self.context)

    @property
    def num_batches(self) -> int:
        """The global batches of `in_order`."""
        return -(-self.num_windows // self.global_batch)

    def in_order(self, number: int) -> Batch:
        """This rank's part of a batch that covers the data once, as ``number`` counts up.

        Sequences after the last one have no targets that count.
        """
        size = self.global_batch // self.world_size
        first = number * self.global_batch + self.rank * size
        return self._batch_of(list(range(first, first + size)))

    def _batch_of(self, numbers: list[int]) -> Batch:
        """The windows of these numbers, which begin at multiples of the context."""
        last = len(self.text) - self.context - 1
        starts = [min(number * self.context, last) for number in numbers]
        tokens = np.stack([self.text.read(start, self.context + 1) for start in starts])
        inputs, targets = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        for row, start, number in zip(targets, starts, numbers, strict=True):
            row[: number * self.context - start] = IGNORED
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def loader(self, steps: range, workers: int, *, pin_memory: bool) -> DataLoader[Batch]:
        """A loader that reads ahead in ``workers`` processes, or on demand if there are none."""
        return DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # the default one belongs to the model
            worker_init_fn=_ignore_stop_signals,
        )


def _ignore_stop_signals(_worker: int) -> None:
    """Leave signals to the rank, which needs its workers until it has saved a checkpoint.

    Schedulers send them to all processes of a job. A worker ends when its rank does.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed(Sequences):
    """Windows of documents, each used once per epoch, in a new random order for each epoch."""

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        windows: NDArray[np.int64] = self.text.windows(self.context)
        return windows

    def draw(self, step: int) -> NDArray[np.int64]:
        """The windows of the global batch of ``step``, which counts from 1, [global_batch]."""
        numbers = np.arange(self.global_batch) + (step - 1) * self.global_batch
        count = len(self.windows)
        epochs, places = np.divmod(numbers, count)
        orders = {epoch: _shuffled(self.seed, epoch, count) for epoch in np.unique(epochs).tolist()}
        return np.array([orders[e][p] for e, p in zip(epochs.tolist(), places, strict=True)])

    @property
    def num_windows(self) -> int:
        return len(self.windows)

    def __getitem__(self, step: int) -> Batch:
        return self._batch_of(self.own(step).tolist())

    def _batch_of(self, numbers: list[int]) -> Batch:
        empty = (0, 1)  # a token without a target
        count = len(self.windows)
        windows = [self.windows[n].tolist() if n < count else empty for n in numbers]
        rows = [self._row(*window) for window in windows]
        inputs, targets, positions = (
            torch.from_numpy(np.stack(x)) for x in zip(*rows, strict=True)
        )
        return Batch(inputs, targets, positions)

    def _row(self, start: int, stop: int) -> tuple[NDArray[np.int64], ...]:
        """The inputs, targets and positions of a window, int64 [context] each.

        The padding at the end is a separate document whose targets are ignored.
        """
        documents, size = self.text, stop - start
        tokens = np.zeros(self.context + 1, np.int64)
        tokens[:size] = documents.tokens[start:stop]
        number = np.searchsorted(documents.ends, np.arange(start, stop), side="right")  # [size]
        counts = np.zeros(self.context, bool)
        counts[: size - 1] = documents.counted[start + 1 : stop] & (number[1:] == number[:-1])
        firsts = np.where(number > 0, documents.ends[number - 1], 0)
        positions = np.arange(-size, self.context + 1 - size)
        positions[:size] = np.arange(start, stop) - np.maximum(firsts, start)
        return tokens[:-1], np.where(counts, tokens[1:], IGNORED), positions[:-1]


@lru_cache(maxsize=4)  # a batch may be in two epochs, of training and of validation
def _shuffled(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of ``count`` windows in an epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def open_corpus(config: Config) -> Corpus:
    """Open the standard library, the files of a directory, or a single file.

    The first run that uses a set of documents tokenizes them. Raise a ConfigError if there is no
    such text, or if none of its tokens would count in the loss.
    """
    data = config.data
    tokenizer = config.tokenizer
    if not (tokenizer.path or tokenizer.vocabulary) and config.model.path:
        tokenizer = TokenizerConfig(path=config.model.path)
    format_ = _format_of(data)
    files = find_files(data, data.path, format_)
    held_out = find_files(data, data.validation, format_) if data.validation else {}
    files = _without(files, held_out)
    num_files = len(files) + len(held_out)
    name = "the Python standard library" if data.path == STDLIB else data.path
    if not (tokenizer.path or tokenizer.vocabulary):
        if format_ != "text":
            raise ConfigError(
                f"data.format={format_!r} needs a tokenizer; set tokenizer.vocabulary=8192 to "
                "train one, or tokenizer.path"
            )
        if held_out:
            train, validation = (Text(list(found.values())) for found in (files, held_out))
        else:
            train, validation = split_files(files, data.validation_share)
        return Corpus(name, num_files, train, validation, Bytes())
    data = data.model_copy(update={"format": format_})
    directory, opened = prepare(files, held_out, data, tokenizer)
    sides = Documents(directory / "train"), Documents(directory / "validation")
    for side in sides:
        side.check_answers(config.model.context)
    return Corpus(name, num_files, *sides, opened or Subwords.open(directory / "tokenizer"))


def _format_of(data: DataConfig) -> str:
    """``data.format``; for "auto", the format that the file names suggest."""
    if data.format != "auto":
        reader_of(data.format)
        return data.format
    path = Path(data.path).expanduser()
    if (path / "state.json").exists():
        return "datasets"
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(json.loads((path / "dataset_dict.json").read_text())["splits"])
        raise ConfigError(
            f"data.path={data.path!r} has the splits {splits}; set data.path to the directory of "
            "one of them, and data.validation to that of another"
        )
    name = data.glob or path.name
    if path.is_dir() and not data.glob:
        return _format_in(path)
    if name.endswith(_NOT_TEXT):
        raise ConfigError(
            f"data.format='auto': cannot tell what {name!r} contains; unpack it if it is packed, "
            'or set data.format, such as "jsonl" for one JSON object per line'
        )
    return next((f for f in ("jsonl", "parquet") if name.endswith("." + f)), "text")


def _format_in(directory: Path) -> str:
    """The format of the files in a directory; those in folders decide if there is no text."""
    formats = ("jsonl", "parquet")
    found = next((f for f in formats if any(directory.glob(f"*.{f}"))), "")
    if found or any(directory.glob("**/*.py")):
        return found or "text"

    def has(format_: str) -> bool:
        names = (file.relative_to(directory).parts for file in directory.glob(f"**/*.{format_}"))
        return any(not any(part.startswith(".") for part in parts) for parts in names)

    return next((f for f in formats if has(f)), "text")


def _without(files: dict[str, Path], held_out: Mapping[str, Path]) -> dict[str, Path]:
    """``files`` without those of ``data.validation``, unless it has all of them."""
    if not held_out:
        return files
    excluded = {file.resolve() for file in held_out.values()}
    left = {name: file for name, file in files.items() if file.resolve() not in excluded}
    return left or files
