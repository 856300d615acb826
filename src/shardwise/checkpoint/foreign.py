"""Read checkpoints of other programs: Hugging Face's, and two formats of torch.

Directories of `torch.distributed.checkpoint` and files of `torch.save` contain components by name
(``model``, ``optim``, ...), or the state dict of a model. Optimizer states must have parameter
names as keys, nested or flattened (as in torchtitan); torch's ``get_state_dict`` returns them so.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
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
from shardwise.checkpoint.checksums import BLOCK_BYTES
from shardwise.checkpoint.format import Spec, spec_of
from shardwise.checkpoint.read import OpenCheckpoint, OpenComponent, Reader, open_hf
from shardwise.checkpoint.slices import bytes_of
from shardwise.checkpoint.stores import Folder, LocalFolder
from shardwise.checkpoint.unpickling import METADATA, DataReader
from shardwise.errors import CheckpointDamaged, CheckpointError

__all__ = ["open_foreign"]

_OPTIMIZERS = ("optimizer", "optim", "optimizers")  # names of the component; `load` uses the first
_STATES = {"state", "param_groups", "other"}  # what the state dict of an optimizer contains
_IS_OPTIMIZER = re.compile(rf"{_OPTIMIZERS[0]}(_\d+)?")  # the integrations number them


def open_foreign(folder: Folder, source: str, cleanup: contextlib.ExitStack) -> OpenCheckpoint:
    """Open a checkpoint of another program; its files stay open until ``cleanup`` ends."""
    if source == "hf":
        tensors = cleanup.enter_context(contextlib.closing(open_hf(folder)))
        model = OpenComponent("module", Reader(tensors))
        return OpenCheckpoint({"model": model}, num_readers=folder.num_readers)
    if source not in ("dcp", "torch"):
        raise CheckpointError(f"source={source!r}: expected 'shardwise', 'hf', 'dcp' or 'torch'")
    if not isinstance(folder, LocalFolder):
        raise CheckpointError(f"{folder}: source={source!r} reads local files only")
    components = _open_dcp(folder.target) if source == "dcp" else _open_torch(folder.target)
    return OpenCheckpoint(components)


# -- torch.distributed.checkpoint ----------------------------------------------------------------


def _open_dcp(path: Path) -> dict[str, OpenComponent]:
    """The components of a directory of `torch.distributed.checkpoint`, with any sharding."""
    if not (path / METADATA).is_file():
        raise CheckpointError(
            f"{path}: not a checkpoint of torch.distributed.checkpoint: {METADATA} is missing"
        )
    files = DataReader(path)
    metadata = files.read_metadata()
    files.set_up_storage_reader(metadata, is_coordinator=False)
    given: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    paths = {key: given.get(key, (key,)) for key in metadata.state_dict_metadata}
    # Without a component "model", entries at the top are its tensors, as torchtitan writes them.
    has_model = any(first == "model" and inner for first, *inner in paths.values())
    nested: dict[str, dict[tuple[Any, ...], str]] = {}
    for key, whole in paths.items():
        name, *inner = whole if has_model or len(whole) > 1 else ("model", *whole)
        nested.setdefault(_own_name(name), {})[tuple(inner)] = key
    origin = str(path / METADATA)
    return {
        name: replace(_dcp_component(name, inner, files, metadata), origin=origin)
        for name, inner in nested.items()
    }


def _dcp_component(
    name: str, keys: Mapping[tuple[Any, ...], str], files: DataReader, metadata: Metadata
) -> OpenComponent:
    """The component ``name``, whose entries are stored under ``keys``, which maps paths to keys."""
    stored, specs = {}, {}
    whole: dict[Any, Any] = {}
    for path, key in keys.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, BytesStorageMetadata):
            value = _read_bytes(key, files)
        else:
            inner = ".".join(map(str, path)) or name
            like = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            stored[inner], specs[inner] = (key, entry), spec_of(inner, like)
            value = {"$tensor": inner}
        _put(whole, (name, *path), value)
    whole = whole[name]
    reader = Reader(_DistributedSource(files, stored, specs))
    if () in keys:
        return OpenComponent("data", reader, whole)
    value = _with_lists(whole)
    if _is_optimizer(value) or (_IS_OPTIMIZER.fullmatch(name) and isinstance(value, dict)):
        return _optimizer(reader, value)
    if len(specs) == len(keys):
        return OpenComponent("module", reader)
    return OpenComponent("object", reader, value)


@dataclass
class _DistributedSource:
    """A source of tensors whose rows are spread over the files of any number of ranks."""

    # Read whole slices: torch reads all that a rank wrote of a tensor, however little is needed.
    read_bytes = 1 << 62

    files: DataReader
    stored: Mapping[str, tuple[str, TensorStorageMetadata]]  # key and description, by name
    specs: Mapping[str, Spec]

    def read(self, name: str, start: int, content: memoryview) -> None:
        """Fill ``content`` as `Source` specifies; whole rows are read."""
        key, stored = self.stored[name]
        row_bytes = prod(stored.size[1:]) * self.specs[name].itemsize
        first, last = start // row_bytes, -(-(start + content.nbytes) // row_bytes)
        size = torch.Size((last - first, *stored.size[1:])) if stored.size else stored.size
        rows = torch.empty(size, dtype=stored.properties.dtype, device="cpu")
        at = torch.Size((first, *(0 for _ in size[1:]))) if size else size
        items = create_read_items_for_chunk_list(key, stored, [ChunkStorageMetadata(at, size)])
        if sum(prod(item.lengths) for item in items) != rows.numel():
            raise CheckpointDamaged(f"{name}: no file contains all of it")
        _read(self.files, items, _Rows(rows), name)
        begin = start - first * row_bytes
        content[:] = bytes_of(rows.view(-1))[begin : begin + content.nbytes]


class _Rows(DefaultLoadPlanner):
    """A load planner that reads into ``rows``."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:  # noqa: ARG002 - there is only one
        return self._rows


class _Value(DefaultLoadPlanner):
    """A load planner that keeps the one value that is read."""

    value: Any = None

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # noqa: ARG002 - there is only one
        self.value = torch.load(value, weights_only=True)


def _read_bytes(key: str, files: DataReader) -> Any:
    index, nothing = MetadataIndex(key), torch.Size((0,))
    item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
    planner = _Value()
    _read(files, [item], planner, key)
    return planner.value


def _read(files: DataReader, items: list[ReadItem], planner: DefaultLoadPlanner, name: str) -> None:
    try:
        files.read_data(LoadPlan(items), planner).wait()
    except Exception as error:  # torch raises whatever its unpickler does
        raise CheckpointDamaged(f"{name}: cannot be read: {error}") from error


# -- torch.save ----------------------------------------------------------------------------------


def _open_torch(path: Path) -> dict[str, OpenComponent]:
    """The components of a file of `torch.save`, whose tensors are mapped into memory."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler does
        raise CheckpointError(f"{path}: not a state dict of torch.save: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dict, got a {type(content).__name__}")
    if any(isinstance(value, Tensor) for value in content.values()):
        content = {"model": content}
    named = {_own_name(name): value for name, value in content.items()}
    return {
        name: replace(_component_of(name, value), origin=str(path)) for name, value in named.items()
    }


def _component_of(name: str, value: Any) -> OpenComponent:
    if isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
        return OpenComponent("module", Reader(_Tensors(value)))
    tensors: dict[str, Tensor] = {}
    encoded = tree.encode(value, tensors)
    reader = Reader(_Tensors(tensors))
    if _is_optimizer(value) or (name == _OPTIMIZERS[0] and isinstance(value, dict)):
        return _optimizer(reader, encoded)
    return OpenComponent("object" if isinstance(value, dict) else "data", reader, encoded)


class _Tensors:
    """A source of tensors in memory or in a memory-mapped file."""

    read_bytes = BLOCK_BYTES

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.specs: Mapping[str, Spec] = {name: spec_of(name, t) for name, t in tensors.items()}
        self._flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}

    def read(self, name: str, start: int, content: memoryview) -> None:
        content[:] = bytes_of(self._flat[name])[start : start + content.nbytes]


# -- names and structure --------------------------------------------------------------------------


def _own_name(name: str) -> str:
    return _OPTIMIZERS[0] if name in _OPTIMIZERS else name


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        nested = nested.setdefault(key, {})
    nested[path[-1]] = value


def _with_lists(nested: Any) -> Any:
    """Turn dicts whose keys are positions into lists."""
    if not isinstance(nested, dict):
        return nested
    inner = {key: _with_lists(value) for key, value in nested.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _is_optimizer(value: Any) -> bool:
    """Whether ``value`` is the state dict of an optimizer, under whatever name."""
    return isinstance(value, dict) and {"param_groups"} <= value.keys() <= _STATES


def _optimizer(reader: Reader, states: Any) -> OpenComponent:
    """The component of an optimizer, whose states are nested or flattened."""
    is_nested = isinstance(states.get("state", {}), dict | list) and "param_groups" in states
    if not is_nested:
        states = _unflattened(states)
    inner = states.get("state", {})
    if isinstance(inner, list) or any(name == "$dict" or name.isdigit() for name in inner):
        problem = (
            "the optimizer's states have numbers as keys, expected parameter names; save the "
            "result of torch's get_state_dict, which has them"
        )
        return OpenComponent("optimizer", reader, problem=problem)
    return OpenComponent("optimizer", reader, {"state": {}, "param_groups": [], **states})


def _unflattened(states: Mapping[str, Any]) -> dict[str, Any]:
    """Nest ``state.PARAMETER.KEY`` and ``param_groups.PARAMETER.OPTION``."""
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
