"""Checkpoints that others wrote: Hugging Face's, and two of torch's.

Directories of `torch.distributed.checkpoint` and files of `torch.save` have parts by name
(``model``, ``optim``, ...), or are a model's state dict and nothing else. An optimizer's states are
known by the names of parameters, as torch's ``get_state_dict`` gives them, nested or flattened (as
torchtitan has them).
"""

import contextlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwise.checkpoint import tree
from shardwise.checkpoint.crc import BLOCK_BYTES
from shardwise.checkpoint.files import Spec, spec_of
from shardwise.checkpoint.opening import Opened, Part
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.shares import Share, bytes_of
from shardwise.checkpoint.sources import open_hf
from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = ["open_foreign"]

_METADATA = ".metadata"
_OPTIMIZERS = ("optimizer", "optim", "optimizers")  # the first is what `load` calls it


class _Specs:
    """A source that its reader does not read byte by byte."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = specs

    read_bytes = BLOCK_BYTES

    def read(self, name: str, start: int, into: memoryview) -> None:
        raise NotImplementedError(name)


def open_foreign(place: str, source: str, cleanup: contextlib.ExitStack) -> Opened:
    """Open what is at ``place``; files stay open until ``cleanup`` ends.

    Raises:
        CheckpointError: it is no such thing.
    """
    match source:
        case "hf":
            folder = folder_at(place)
            places = cleanup.enter_context(contextlib.closing(open_hf(folder)))
            parts = {"model": Part("module", Reader(places))}
            return Opened(parts, num_readers=folder.num_readers)
        case "dcp" | "torch" if "://" in place:
            raise CheckpointError(f"{place}: source={source!r} reads files of this machine alone")
        case "dcp":
            return Opened(_open_dcp(Path(place)))
        case "torch":
            return Opened(_open_torch(Path(place)))
    raise CheckpointError(f"source={source!r}: expected 'shardwise', 'hf', 'dcp' or 'torch'")


# -- torch.distributed.checkpoint ----------------------------------------------------------------


def _open_dcp(path: Path) -> dict[str, Part]:
    """The parts of a directory that `torch.distributed.checkpoint` wrote, from any sharding.

    Raises:
        CheckpointError: ``path`` is none.
    """
    if not (path / _METADATA).is_file():
        raise CheckpointError(
            f"{path}: no checkpoint of torch.distributed.checkpoint: {_METADATA} is missing"
        )
    files = FileSystemReader(path)
    metadata = files.read_metadata()
    files.set_up_storage_reader(metadata, is_coordinator=False)
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    nested: dict[str, dict[tuple[Any, ...], str]] = {}
    for key in metadata.state_dict_metadata:
        first, *rest = paths.get(key, (key,))
        name, inner = (first, tuple(rest)) if rest else ("model", (first,))
        nested.setdefault(_own_name(name), {})[inner] = key
    return {name: _part(name, inner, files, metadata) for name, inner in nested.items()}


def _part(
    name: str, keys: Mapping[tuple[Any, ...], str], files: FileSystemReader, metadata: Metadata
) -> Part:
    """A part of a checkpoint, whose entries have ``keys`` there."""
    stored, specs = {}, {}
    whole: dict[Any, Any] = {}
    for path, key in keys.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, BytesStorageMetadata):
            value = _read_bytes(key, files)
        else:
            inner = ".".join(map(str, path))
            like = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            stored[inner], specs[inner] = (key, entry), spec_of(inner, like)
            value = {"$tensor": inner}
        _put(whole, path, value)
    reader = _DistributedReader(files, stored, specs)
    if name == _OPTIMIZERS[0]:
        return Part("optimizer", reader, _named(_with_lists(whole)))
    if len(specs) == len(keys):
        return Part("module", reader)
    return Part("object", reader, _with_lists(whole))


class _DistributedReader(Reader):
    """Reads the rows of a tensor in which a run lies, whichever ranks wrote them."""

    def __init__(
        self,
        files: FileSystemReader,
        stored: Mapping[str, tuple[str, TensorStorageMetadata]],
        specs: Mapping[str, Spec],
    ) -> None:
        """``stored`` are the keys and descriptions of tensors by their names."""
        super().__init__(_Specs(specs))
        self._files = files
        self._stored = stored

    def read(self, name: str, into: Share) -> None:
        if not len(into.elements):
            return
        key, stored = self._stored[name]
        stop = into.start + len(into.elements)
        row = prod(stored.size[1:])
        first, last = into.start // row, -(-stop // row)
        size = torch.Size((last - first, *stored.size[1:])) if stored.size else stored.size
        rows = torch.empty(size, dtype=stored.properties.dtype)
        at = torch.Size((first, *(0 for _ in size[1:]))) if size else size
        items = create_read_items_for_chunk_list(key, stored, [ChunkStorageMetadata(at, size)])
        if sum(prod(item.lengths) for item in items) != rows.numel():
            raise CheckpointDamaged(f"{name}: parts of it are in no file")
        _read(self._files, items, _Rows(rows), name)
        into.elements.copy_(rows.view(-1)[into.start - first * row : stop - first * row])
        self.bytes_read += len(into.elements) * rows.itemsize


class _Rows(DefaultLoadPlanner):
    """Puts what is read into ``rows``."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = self._rows
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            place = place.narrow(axis, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Value(DefaultLoadPlanner):
    """Keeps what is read."""

    value: Any = None

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # noqa: ARG002 - there is one
        self.value = torch.load(value, weights_only=True)


def _read_bytes(key: str, files: FileSystemReader) -> Any:
    index, nothing = MetadataIndex(key), torch.Size((0,))
    item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    planner = _Value()
    _read(files, [item], planner, key)
    return planner.value


def _read(
    files: FileSystemReader, items: list[ReadItem], planner: DefaultLoadPlanner, name: str
) -> None:
    try:
        files.read_data(LoadPlan(items), planner).wait()
    except Exception as error:  # torch says of damage what its unpickler met
        raise CheckpointDamaged(f"{name}: cannot be read: {error}") from error


# -- torch.save ----------------------------------------------------------------------------------


def _open_torch(path: Path) -> dict[str, Part]:
    """The parts of a file of `torch.save`; its tensors are not read before they are needed.

    Raises:
        CheckpointError: ``path`` is none, or has more in it than tensors and plain data.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch says of damage what its unpickler met
        raise CheckpointError(f"{path}: no state dict of torch.save: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dict, got a {type(content).__name__}")
    if any(isinstance(value, Tensor) for value in content.values()):
        content = {"model": content}
    return {_own_name(name): _part_of(_own_name(name), value) for name, value in content.items()}


def _part_of(name: str, value: Any) -> Part:
    tensors: dict[str, Tensor] = {}
    if isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
        return Part("module", Reader(_Tensors(value)))
    encoded = tree.encode(value, tensors)
    reader = Reader(_Tensors(tensors))
    if name == _OPTIMIZERS[0]:
        return Part("optimizer", reader, _named(encoded))
    return Part("object" if isinstance(value, dict) else "data", reader, encoded)


class _Tensors:
    """A source of tensors that are there, in memory or in a file that is mapped into it."""

    read_bytes = BLOCK_BYTES

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.specs: Mapping[str, Spec] = {name: spec_of(name, t) for name, t in tensors.items()}
        self._flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}

    def read(self, name: str, start: int, into: memoryview) -> None:
        into[:] = bytes_of(self._flat[name])[start : start + into.nbytes]


# -- what is in them -----------------------------------------------------------------------------


def _own_name(name: str) -> str:
    return _OPTIMIZERS[0] if name in _OPTIMIZERS else name


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _with_lists(nested: Any) -> Any:
    """Dicts whose keys are positions become lists."""
    if not isinstance(nested, dict):
        return nested
    inner = {key: _with_lists(value) for key, value in nested.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _named(states: Any) -> Any:
    """An optimizer's states by the names of parameters, however they were flattened.

    Raises:
        CheckpointError: they are by number.
    """
    if not isinstance(states.get("state", {}), dict) or "param_groups" not in states:
        states = _unflattened(states)
    if any(name == "$dict" or name.isdigit() for name in states.get("state", {})):
        raise CheckpointError(
            "the optimizer's states are known by number; save what torch's get_state_dict returns, "
            "which knows them by the names of parameters"
        )
    return {"state": {}, "param_groups": [], **states}


def _unflattened(states: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``state.PARAMETER.KEY`` and ``param_groups.PARAMETER.OPTION``."""
    by_kind: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for path, value in states.items():
        kind, _, rest = path.partition(".")
        parameter, _, key = rest.rpartition(".")
        by_kind.setdefault(kind, {}).setdefault(parameter, {})[key] = value
    groups: list[dict[str, Any]] = []
    for parameter, options in by_kind["param_groups"].items():
        same = [g for g in groups if {k: v for k, v in g.items() if k != "params"} == options]
        if same:
            same[0]["params"].append(parameter)
        else:
            groups.append({**options, "params": [parameter]})
    return {"state": by_kind["state"], "param_groups": groups}
