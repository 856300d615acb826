"""The layout of safetensors files: which file contains a tensor, and where. Handles no tensors.

A file is 8 bytes with the length of the header, the header (JSON, padded with spaces) and the
tensors, row-major and without gaps::

    | length | {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | a | b | ...
    0        8                                                                   data_start

A rank's slice of a parameter is one range of bytes in the file, which the rank can write and read
on its own. The format is defined at https://huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch

from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = [
    "DTYPES",
    "File",
    "Spec",
    "in_groups",
    "index_of",
    "is_plain_file_name",
    "pack",
    "parse_header",
    "parse_json",
    "spec_of",
]

MAX_FILE_BYTES = 5 * 10**9  # the default of Hugging Face
# dtypes by their safetensors names.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 64  # alignment of the first tensor; the format requires 8

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    """The Spec of ``tensor``, with its global shape; a CheckpointError if its dtype has no name."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError(
            f"{name}: safetensors has no {tensor.dtype}; convert it, for example with "
            "torch.view_as_real"
        )
    return Spec(name, _NAMES[tensor.dtype], tuple(tensor.shape))


@dataclass(frozen=True)
class File:
    """One safetensors file, with its tensors in the order of ``specs``."""

    name: str
    specs: tuple[Spec, ...]

    @cached_property
    def head(self) -> bytes:
        """Everything before the first tensor."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by transformers
        stop = 0
        for spec in self.specs:
            start, stop = stop, stop + spec.num_bytes
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [start, stop],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @cached_property
    def offsets(self) -> dict[str, int]:
        starts = accumulate((spec.num_bytes for spec in self.specs), initial=len(self.head))
        return {spec.name: start for spec, start in zip(self.specs, starts, strict=False)}

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(spec.num_bytes for spec in self.specs)


def in_groups(
    items: Iterable[_Item], bytes_of: Callable[[_Item], int], max_bytes: int
) -> Iterator[list[_Item]]:
    """``items`` in order, in groups of at most ``max_bytes`` or of a single item."""
    group: list[_Item] = []
    room = max_bytes
    for item in items:
        if group and bytes_of(item) > room:
            yield group
            group, room = [], max_bytes
        group.append(item)
        room -= bytes_of(item)
    if group:
        yield group


def pack(component: str, specs: Iterable[Spec], max_bytes: int) -> list[File]:
    """The files of a component, each with at most ``max_bytes`` of tensors or a single tensor.

    Tensors are assigned to files by name. Within a file, wider dtypes come first, so that all are
    aligned. The result depends only on names, shapes and dtypes.
    """
    by_name = sorted(specs, key=lambda spec: spec.name)
    groups = list(in_groups(by_name, lambda spec: spec.num_bytes, max_bytes))
    total = len(groups)
    files = []
    for number, group in enumerate(groups, start=1):
        part = f"-{number:05}-of-{total:05}" if total > 1 else ""
        group.sort(key=lambda spec: (-spec.itemsize, spec.name))
        files.append(File(f"{component}{part}.safetensors", tuple(group)))
    return files


def is_plain_file_name(name: str) -> bool:
    """Whether ``name`` names a file in the directory itself and is not a path out of it."""
    return "\0" not in name and name not in ("", ".", "..") and name == PurePosixPath(name).name


def index_of(files: Sequence[File]) -> bytes:
    """The JSON file that maps tensors to files, as Hugging Face writes it."""
    where = {spec.name: file.name for file in files for spec in file.specs}
    total = sum(spec.num_bytes for file in files for spec in file.specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def parse_header(file: str, header: bytes, data_bytes: int) -> dict[str, tuple[Spec, int]]:
    """The tensors of a file by name, with their offsets after the header.

    They must fill ``data_bytes``, the rest of the file, without overlaps. Otherwise, a
    CheckpointDamaged names the tensor.
    """
    found: dict[str, tuple[Spec, tuple[int, int]]] = {}
    try:
        for key, entry in parse_json(header).items():
            if key != "__metadata__":
                found[key] = _parse_entry(key, entry)
        for key, (spec, _) in found.items():
            if spec.dtype not in DTYPES:
                raise CheckpointError(f"{file}: {key} has the unknown dtype {spec.dtype}")
        _check_ranges(found, data_bytes)
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{file}: not a safetensors header: {error}") from error
    return {key: (spec, offsets[0]) for key, (spec, offsets) in found.items()}


def parse_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8; a ValueError also if an object has a key twice."""
    return json.loads(content.decode(), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is listed twice")
        found[key] = value
    return found


def _parse_entry(key: str, entry: Any) -> tuple[Spec, tuple[int, int]]:
    """The Spec that an entry of a header describes, and the offsets of its bytes."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
            # A bool is an int, too.
            if all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
                return Spec(key, dtype, tuple(shape)), (start, stop)
    raise ValueError(
        f"{key}: expected a dtype, and a shape and two data_offsets of integers from 0 on, found "
        f"{entry!r:.200}"
    )


def _check_ranges(found: Mapping[str, tuple[Spec, tuple[int, int]]], data_bytes: int) -> None:
    """Raise a ValueError unless the tensors fill the file from the first to the last byte."""
    position, last = 0, "the header"
    for key, (spec, (start, stop)) in sorted(found.items(), key=lambda item: item[1][1]):
        if stop - start != spec.num_bytes:
            raise ValueError(f"{key} has data_offsets that do not match its shape")
        if start != position:
            raise ValueError(f"{key} begins at byte {start}, but {last} ends at byte {position}")
        position, last = stop, key
    if position > data_bytes:
        raise ValueError(f"the file ends at byte {data_bytes}, before {last} does")
    if position < data_bytes:
        raise ValueError(f"no tensor contains the bytes from {position} to {data_bytes}")
