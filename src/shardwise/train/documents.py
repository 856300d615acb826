"""Documents as tokens on disk: read and tokenized once, then memory-mapped."""

import fcntl
import hashlib
import inspect
import json
import reprlib
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError, PackageMissing
from shardwise.train.config import DataConfig, TokenizerConfig
from shardwise.train.plugins import resolve
from shardwise.train.tokenizer import Message, Subwords

__all__ = ["Document", "Documents", "prepare", "reader_of"]

Document = str | list[Message]  # a text, or a conversation
Reader = Callable[[Path, str], Iterator[Document]]  # (file, column) -> documents

_BATCH = 256  # documents that are tokenized at once, on all cores
_STALE_SECONDS = 86_400.0  # a process that tokenizes writes more often
_VERSION = 2  # version of the format of the files below


# -- reading --------------------------------------------------------------------------------------


def read_text(path: Path, _column: str) -> Iterator[Document]:
    yield path.read_text(encoding="utf-8", errors="replace")


def read_jsonl(path: Path, column: str) -> Iterator[Document]:
    with path.open(encoding="utf-8-sig") as lines:  # some programs write a byte order mark
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                document = json.loads(line)[column]
                if "\\ud" in line.lower():  # halves of characters, which may lack the other half
                    text = json.dumps(document, ensure_ascii=False)
                    document = json.loads(text.encode(errors="replace"))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{path}, line {number}: expected a JSON object with the key {column!r} "
                    "(data.column)"
                ) from None
            yield document


def read_parquet(path: Path, column: str) -> Iterator[Document]:
    PackageMissing.check("pyarrow", extra="hf", needed_for=str(path))
    from pyarrow import parquet  # noqa: PLC0415 (optional)

    file = parquet.ParquetFile(path)
    _check_column(path, column, file.schema_arrow.names)
    for batch in file.iter_batches(_BATCH, columns=[column]):
        yield from batch.column(0).to_pylist()


def read_arrow(path: Path, column: str) -> Iterator[Document]:
    """Read a file that ``datasets.Dataset.save_to_disk`` wrote."""
    PackageMissing.check("pyarrow", extra="hf", needed_for=str(path))
    import pyarrow as pa  # noqa: PLC0415 (optional)

    with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as batches:
        _check_column(path, column, batches.schema.names)
        for batch in batches:
            yield from batch.column(column).to_pylist()


def _check_column(path: Path, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ConfigError(
            f"data.column={column!r}: {path} has no such column; expected one of {', '.join(names)}"
        )


_READERS: Mapping[str, Reader] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "datasets": read_arrow,
}


def reader_of(format_: str) -> Reader:
    """Return the reader of ``data.format``: a name above, or the dotted name of a function."""
    reader: Reader = resolve("data.format", format_, _READERS)
    return reader


# -- preparing ------------------------------------------------------------------------------------


def prepare(
    files: Mapping[str, Path],
    validation: Mapping[str, Path],
    data: DataConfig,
    tokenizer: TokenizerConfig,
) -> tuple[Path, Subwords | None]:
    """Tokenize the documents of ``files``, unless this is done already.

    Return their directory, and the tokenizer of ``tokenizer.path`` if it is set.

    Files are given by names that are the same on every machine. One process of a host tokenizes;
    the others wait. Without files for ``validation``, the digest of a document decides whether it
    is used for validation, so equal documents are on one side.
    """
    opened = Subwords.open(Path(tokenizer.path).expanduser()) if tokenizer.path else None
    cache = Path(data.cache or "~/.cache/shardwise").expanduser()
    directory = cache / f"tokens-{_key(files, validation, data, tokenizer, opened)}"
    with _locked(directory.with_suffix(".lock")):
        if not directory.exists():
            # By host, because on some network file systems a lock does not exclude other hosts.
            partial = directory.with_suffix(f".{socket.gethostname()}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            used = opened or Subwords.train(_texts_of(files.values(), data), tokenizer.vocabulary)
            _write(partial, files.values(), validation.values(), data, used)
            with _in_cache(directory):
                _publish(partial, directory)
            _remove_stale(cache)
    return directory, opened


def _key(
    files: Mapping[str, Path],
    validation: Mapping[str, Path],
    data: DataConfig,
    tokenizer: TokenizerConfig,
    opened: Subwords | None,
) -> str:
    """A digest of everything that determines the tokens."""
    status = [
        [(name, (s := path.stat()).st_size, s.st_mtime_ns) for name, path in paths.items()]
        for paths in (files, validation)
    ]
    options = [data.format, data.column, data.validation_share, tokenizer.vocabulary]
    digest = hashlib.sha256(json.dumps([_VERSION, status, options]).encode())
    if data.format not in _READERS:
        module: Any = inspect.getmodule(reader_of(data.format))
        with suppress(OSError, TypeError):  # it has no source
            digest.update(inspect.getsource(module).encode())
    if opened is not None:
        digest.update(opened.description.encode())  # not its files, whose names differ
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with ExitStack() as held:
        with _in_cache(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


@contextmanager
def _in_cache(path: Path) -> Iterator[None]:
    """Turn an OSError of a file of the cache into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.cache: {error.filename or path} cannot be written: {error.strerror}; set "
            "data.cache to a writable directory with enough space"
        ) from None


def _publish(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError:
        if not directory.exists():  # else another host has been faster
            raise
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(cache: Path) -> None:
    """Remove what processes that were killed have left in ``cache``."""
    for partial in cache.glob("tokens-*.partial"):
        with suppress(OSError):
            written = max(path.stat().st_mtime for path in (partial, *partial.rglob("*")))
            if written < time.time() - _STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _write(
    directory: Path,
    files: Collection[Path],
    validation: Collection[Path],
    data: DataConfig,
    tokenizer: Subwords,
) -> None:
    with _in_cache(directory):
        tokenizer.save(directory / "tokenizer")
    writers = {name: _Writer(directory / name, tokenizer) for name in ("train", "validation")}
    share = 0.0 if validation else data.validation_share
    for document in _documents(files, data):
        is_held_out = zlib.crc32(_text_of(document).encode()) < share * 2**32
        writers["validation" if is_held_out else "train"].add(document)
    for document in _documents(validation, data):
        writers["validation"].add(document)
    for name, writer in writers.items():
        if not writer.close():
            raise ConfigError(
                f"data.path={data.path!r}: no documents for {name}; use more documents, or set "
                "data.validation to another path"
            )


def _texts_of(paths: Iterable[Path], data: DataConfig) -> Iterator[str]:
    return (_text_of(document) for document in _documents(paths, data))


def _documents(paths: Iterable[Path], data: DataConfig) -> Iterator[Document]:
    return (document for path in paths for document in _read(path, data))


def _read(path: Path, data: DataConfig) -> Iterator[Document]:
    """The non-empty documents of a file; a ConfigError names a file that cannot be read."""
    try:
        for document in reader_of(data.format)(path, data.column):
            if document:
                _check(document, path, data.column)
                yield document
    except (ValueError, OSError) as error:  # raised by pyarrow and codecs
        if isinstance(error, ConfigError) or data.format not in _READERS:
            raise
        raise ConfigError(
            f"{path}: cannot be read as data.format={data.format!r}: {error}"
        ) from None


def _check(document: object, path: Path, column: str) -> None:
    if isinstance(document, str):
        return
    messages = document if isinstance(document, list) else [None]
    if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise ConfigError(
            f"{path}: data.column={column!r}: expected a text, or a list of messages "
            f'{{"role": ..., "content": ...}}, got {reprlib.repr(document)}'
        )


def _text_of(document: Document) -> str:
    return document if isinstance(document, str) else json.dumps(document)


class _Writer:
    """Appends documents to the files that `Documents` reads."""

    def __init__(self, directory: Path, tokenizer: Subwords) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32)
        with _in_cache(directory):
            directory.mkdir(parents=True)
            self._files: dict[str, BinaryIO] = {
                name: (directory / f"{name}.bin").open("wb")
                for name in ("tokens", "counted", "ends")
            }
        self._pending: list[Document] = []
        self._size = self._digest = 0
        self._has_answers = False

    def add(self, document: Document) -> None:
        self._pending.append(document)
        if len(self._pending) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        texts = [document for document in self._pending if isinstance(document, str)]
        encoded = iter(self._tokenizer.encode_texts(texts) if texts else ())
        for document in self._pending:
            if isinstance(document, str):
                tokens = next(encoded)
                counted = np.ones(len(tokens), bool)
            else:
                tokens, counted = self._tokenizer.encode_chat(document)
                self._has_answers = True
            self._append(np.array(tokens, self._dtype), counted)
        self._pending.clear()

    def _append(self, tokens: NDArray[Any], counted: NDArray[np.bool_]) -> None:
        self._size += len(tokens)
        values = {"tokens": tokens, "counted": counted, "ends": np.array([self._size], np.int64)}
        for name, array in values.items():
            with _in_cache(self._directory):
                self._files[name].write(array.tobytes())
            self._digest = zlib.crc32(array.tobytes(), self._digest)

    def close(self) -> int:
        """Write what is pending, close the files and return the number of tokens."""
        self._flush()
        facts = {
            "dtype": self._dtype.name,
            "digest": self._digest,
            "has_answers": self._has_answers,
        }
        with _in_cache(self._directory):
            for file in self._files.values():
                file.close()
            (self._directory / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        return self._size


# -- using ----------------------------------------------------------------------------------------


class Truncated(NamedTuple):
    """Conversations that are longer than a sequence."""

    conversations: int
    share: float  # of all tokens that are left out


@dataclass(frozen=True)
class Documents:
    """The concatenated tokens of many documents, in memory-mapped files.

    Attributes:
        directory: contains ``tokens.bin``; ``counted.bin``, which says for each token whether it
            counts in the loss; and ``ends.bin``, the end of each document.
    """

    directory: Path

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = json.loads((self.directory / "facts.json").read_text("utf-8"))
        return facts

    @cached_property
    def tokens(self) -> NDArray[Any]:
        return np.memmap(self.directory / "tokens.bin", self.facts["dtype"], "r")

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        return np.memmap(self.directory / "counted.bin", np.bool_, "r")

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        return np.memmap(self.directory / "ends.bin", np.int64, "r")

    def __len__(self) -> int:
        return len(self.tokens)

    def check_answers(self, context: int) -> None:
        """Raise a ConfigError if no token of any window would count in the loss."""
        if not self.facts["has_answers"]:
            return
        windows = self.windows(context).tolist()
        if not any(self.counted[start + 1 : stop].any() for start, stop in windows):
            raise ConfigError(
                f"model.context={context}: no answer of the conversations for "
                f"{self.directory.name} begins within this many tokens; set a larger context, and "
                'give answers the role "assistant"'
            )

    def windows(self, context: int) -> NDArray[np.int64]:
        """The starts and stops of windows of at most ``context`` + 1 tokens, int64 [windows, 2].

        Texts are cut at the end of each window. The last token of a window is only a target, and
        is also the first token of the next window. Conversations are not cut: a window contains
        as many as fit, and a conversation that is longer than a window is truncated. Among
        conversations, a text is cut only if it is longer than a window.
        """
        if not self.facts["has_answers"]:
            starts = np.arange(0, max(len(self) - 1, 1), context, dtype=np.int64)
            return np.stack([starts, np.minimum(starts + context + 1, len(self))], axis=1)
        windows: list[tuple[int, int]] = []
        start, stop = 0, 0
        for end in self.ends.tolist():
            if end - start > context + 1 and stop > start:
                windows.append((start, min(stop, start + context + 1)))
                start = stop
            stop = end
            if stop - start > context + 1 and self._is_text(start, stop):
                cuts = range(start, stop - 1, context)
                windows += [(cut, cut + context + 1) for cut in cuts[:-1]]
                start = cuts[-1]
        if stop > start or not windows:  # else the last documents are empty
            windows.append((start, min(stop, start + context + 1)))
        return np.array(windows, np.int64)

    def truncated(self, context: int) -> Truncated:
        """What `windows` leaves out."""
        if not self.facts["has_answers"]:
            return Truncated(0, 0.0)
        sizes = np.diff(self.ends, prepend=0)
        longer = np.flatnonzero(sizes > context + 1)
        lost = [
            size - (context + 1)
            for size, end in zip(sizes[longer].tolist(), self.ends[longer].tolist(), strict=True)
            if not self._is_text(end - size, end)
        ]
        return Truncated(len(lost), sum(lost) / len(self))

    def _is_text(self, start: int, stop: int) -> bool:
        """Whether a document is a text, all tokens of which count."""
        return bool(self.counted[start:stop].all())
