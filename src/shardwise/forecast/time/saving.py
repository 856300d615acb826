"""Plans checkpoints: the bytes that each rank writes and reads, for any number of ranks.

`shardwise.save` and `load` derive every byte range from the layout, so ranks need not know each
other's ranges, and one process can plan for thousands of ranks in seconds without a process group.
Each rank writes its own ranges of files that depend only on the model and the optimizer::

    model-00001-of-00002.safetensors   | head | a: rank 0 | a: rank 1 | b: rank 1 | b: rank 2 | ...
                                         rank 0

A load on another number of ranks reads the same files. Plan it with the `Plan` of those ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.checksums import BLOCK_BYTES
from shardwise.checkpoint.collect import collect
from shardwise.checkpoint.format import MAX_FILE_BYTES, Spec, index_of
from shardwise.checkpoint.manifest import MANIFEST, Component, Manifest, tensor_ids
from shardwise.errors import PlanError
from shardwise.forecast.trace.blocks import on_meta
from shardwise.plan.chunks import ChunkedLayout
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.plan.plan import Plan

__all__ = ["CheckpointPlan", "FileRange", "Storage", "Traffic", "save_plan"]

_Integers = NDArray[np.int64]  # [ranks]
_Place = tuple[Layout, ParameterExtent]  # where the parameter is that a tensor is sharded like
_SUM_BYTES = 32  # per checksum that ranks exchange after a save; see `checksums.BlockPart`


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bytes per second of a shared file system; None: unlimited."""

    per_rank: float | None = None
    per_node: float | None = None
    total: float | None = None
    ranks_per_node: int = 8


@dataclass(frozen=True, slots=True)
class FileRange:
    """Consecutive bytes of one tensor in a file."""

    file: str
    offset: int
    num_bytes: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes, ranges and files that each rank writes or reads."""

    tensor_bytes: _Integers
    other_bytes: _Integers  # headers, indices and manifest
    num_ranges: _Integers
    num_files: _Integers  # files that a rank opens
    num_blocks: _Integers  # checksum blocks that a rank has bytes of
    ranks_per_file: int  # maximum

    @property
    def num_bytes(self) -> _Integers:
        return self.tensor_bytes + self.other_bytes

    def seconds(self, storage: Storage) -> float:
        """Return how long ``storage`` takes if all ranks begin at once."""
        by_rank = self.num_bytes
        nodes = np.add.reduceat(by_rank, np.arange(0, len(by_rank), storage.ranks_per_node))
        limits = (
            (by_rank.max(), storage.per_rank),
            (nodes.max(), storage.per_node),
            (by_rank.sum(), storage.total),
        )
        return max((float(size / rate) for size, rate in limits if rate), default=0.0)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the checkpoint: its place in a file, and the elements of each rank."""

    spec: Spec
    number: int
    file: int
    offset: int
    place: _Place | None  # None: every rank has all elements

    @property
    def is_run(self) -> bool:
        """Whether a rank's elements are contiguous; otherwise a save gathers the tensor."""
        if self.place is None or not isinstance(self.place[0], ChunkedLayout):
            return True
        granularity = self.place[1].parameter.granularity
        return granularity.dim == 0  # type: ignore[union-attr] # a `Dim` in a chunked layout


class CheckpointPlan:
    """The files of a checkpoint, and what each rank of a plan writes to them and reads from them.

    Attributes:
        files: the safetensors files in order.
        other_files: sizes of the other files: the manifest, and indices of split components.
        num_ranks: number of ranks of the plan.
    """

    def __init__(
        self, components: Mapping[str, Component], owners: Mapping[tuple[str, str], str], plan: Plan
    ) -> None:
        """``owners`` maps (component, tensor) to the parameter that the tensor is sharded like."""
        self.num_ranks = plan.num_ranks
        self.files = [file for part in components.values() for file in part.files]
        self.other_files = _other_files(components)
        self._ranks = _Ranks(plan)
        extents, ids = _extents_of(plan), tensor_ids(components)
        self._entries = [
            _Entry(
                spec=spec,
                number=ids[name, spec.name],
                file=self.files.index(file),
                offset=file.offsets[spec.name],
                place=extents.get(owners.get((name, spec.name), "")),
            )
            for name, component in components.items()
            for file in component.files
            for spec in file.specs
        ]

    @property
    def tensor_bytes(self) -> int:
        return sum(entry.spec.num_bytes for entry in self._entries)

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files) + sum(self.other_files.values())

    @property
    def gathered(self) -> list[str]:
        """Tensors that a save gathers, because a rank's elements are not contiguous."""
        return [entry.spec.name for entry in self._entries if not entry.is_run]

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of checksums that each rank receives at the end of a save.

        No other exchange of a save grows with the checkpoint.
        """
        return int(self.save.num_blocks.max()) * _SUM_BYTES * self.num_ranks

    @cached_property
    def save(self) -> Traffic:
        """Writes. Replicas divide shards, and rank 0 writes all bytes that are not tensors."""
        others = np.zeros(self.num_ranks, np.int64)
        others[0] = self.num_bytes - self.tensor_bytes
        return self._traffic(self._written, others)

    @cached_property
    def load(self) -> Traffic:
        """Reads. Each rank reads its own elements, and all bytes that are not tensors."""
        others = np.full(self.num_ranks, self.num_bytes - self.tensor_bytes)
        return self._traffic(self._read, others)

    def writes(self, rank: int) -> list[FileRange]:
        """Return the ranges of tensors that ``rank`` writes."""
        found = []
        for entry in self._entries:
            first, length = (int(n[rank]) * entry.spec.itemsize for n in self._written(entry))
            if length:
                file = self.files[entry.file].name
                found.append(FileRange(file, entry.offset + first, length, entry.spec.name))
        return found

    # -- elements --------------------------------------------------------------------------------

    def _written(self, entry: _Entry) -> tuple[_Integers, _Integers]:
        """Return the first element that each rank writes, and the number of elements.

        This is `checkpoint.slices.slice_to_write`, vectorized over ranks.
        """
        start, length = self._read(entry)
        if entry.place is None:
            return start, np.where(np.arange(self.num_ranks) == 0, length, 0)
        copies, replica = self._ranks.num_replicas, self._ranks.replica
        if copies == 1 or not entry.is_run:
            return start, length
        is_small = length * entry.spec.itemsize < BLOCK_BYTES
        whole = np.where(entry.number % copies == replica, length, 0)
        first, stop = length * replica // copies, length * (replica + 1) // copies
        return start + np.where(is_small, 0, first), np.where(is_small, whole, stop - first)

    def _read(self, entry: _Entry) -> tuple[_Integers, _Integers]:
        """Return the first element that each rank has, and the number of elements."""
        num_elements = entry.spec.num_elements
        if entry.place is None:
            return np.zeros(self.num_ranks, np.int64), np.full(self.num_ranks, num_elements)
        starts = self._ranks.starts(entry)
        shard = self._ranks.shard if entry.is_run else np.arange(self.num_ranks)
        return starts[shard], np.diff(starts, append=num_elements)[shard]

    # -- sums ------------------------------------------------------------------------------------

    def _traffic(
        self, part: Callable[[_Entry], tuple[_Integers, _Integers]], others: _Integers
    ) -> Traffic:
        tensor_bytes, num_ranges, num_blocks = np.zeros((3, self.num_ranks), np.int64)
        opened = np.zeros((len(self.files), self.num_ranks), bool)
        for entry in self._entries:
            first, length = (n * entry.spec.itemsize for n in part(entry))
            tensor_bytes += length
            num_ranges += length > 0
            blocks = (first + length - 1) // BLOCK_BYTES - first // BLOCK_BYTES + 1
            num_blocks += np.where(length > 0, blocks, 0)
            opened[entry.file] |= length > 0
        by_file = opened.sum(axis=1)
        return Traffic(
            tensor_bytes,
            others,
            num_ranges,
            opened.sum(axis=0),
            num_blocks,
            max(by_file, default=0),
        )


class _Ranks:
    """The shard and the replica of each rank, as `tensor.mesh.DataParallelMesh` numbers them."""

    def __init__(self, plan: Plan) -> None:
        self.num_shards = plan.world_size
        self.num_replicas = plan.num_ranks // plan.world_size
        number = np.arange(plan.num_ranks)
        if plan.strategy.is_two_level:  # the ranks of a column have neighboring shards
            row = plan.world_size // plan.replicas
            self.shard = number % row * plan.replicas + number // row
        else:
            self.shard = number % plan.world_size
        self.replica = number // plan.world_size

    def starts(self, entry: _Entry) -> _Integers:
        """Return the first element of each shard, or of each rank's part of a gathered tensor."""
        assert entry.place is not None
        layout, extent = entry.place
        shape, size = extent.parameter.shape, extent.parameter.num_elements
        if not entry.is_run:
            return self._even_starts(size)
        if isinstance(layout, ChunkedLayout):
            return _starts_of_chunks(shape[0], self.num_shards) * prod(shape[1:])
        # As `Layout.run` for every shard.
        return (np.arange(self.num_shards) * layout.shard_elements - extent.offset).clip(0, size)

    def _even_starts(self, num_elements: int) -> _Integers:
        """Return the first element that each rank writes of a gathered tensor."""
        outer = _starts_of_chunks(num_elements, self.num_replicas)
        lengths = np.diff(outer, append=num_elements)
        inner = [_starts_of_chunks(int(length), self.num_shards) for length in lengths]
        return np.concatenate([o + i for o, i in zip(outer, inner, strict=True)])


def _starts_of_chunks(size: int, num_chunks: int) -> _Integers:
    """Return the first row of each chunk, as `plan.chunks.chunk_of` does for one chunk."""
    return np.minimum(np.arange(num_chunks) * -(-size // num_chunks), size)


def _extents_of(plan: Plan) -> dict[str, _Place]:
    """Map every name of a parameter to its layout and extent.

    Raises:
        PlanError: a unit is not sharded over the same ranks as the model.
    """
    found: dict[str, _Place] = {}
    for unit in plan.units:
        if unit.has_own_ranks:
            raise PlanError(
                f"{unit.label} has other ranks than the model; checkpoints can be planned only for "
                "models with one mesh"
            )
        for layout in unit.layouts:
            for extent in layout.extents:
                found |= dict.fromkeys(extent.parameter.names, (layout, extent))
    return found


def _other_files(components: Mapping[str, Component]) -> dict[str, int]:
    """Return the sizes of the manifest and the indices."""
    indices = {
        f"{name}.safetensors.index.json": len(index_of(part.files))
        for name, part in components.items()
        if len(part.files) > 1
    }
    sums = {  # as many checksums as a save computes
        name: {key: [0] * -(-spec.num_bytes // BLOCK_BYTES) for key, spec in part.specs.items()}
        for name, part in components.items()
    }
    manifest = Manifest(components, sums, {name: (size, 0) for name, size in indices.items()})
    return {**indices, MANIFEST: len(manifest.render())}


# -- from a model --------------------------------------------------------------------------------


def save_plan(
    module: nn.Module,
    plan: Plan,
    *,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> CheckpointPlan:
    """Plan ``shardwise.save(path, model=..., optimizer=...)`` and the corresponding load.

    Args:
        module: the planned module, not sharded, on any device, such as meta. It is not changed.
        plan: the result of `make_plan`, for any number of ranks.
        optimizer: builds the optimizer of a module, as in
            ``lambda module: torch.optim.AdamW(module.parameters())``. It takes a step on the meta
            device to create its states. None: only the model is saved.
        max_file_bytes: as in `shardwise.save`.

    Raises:
        CheckpointError: a tensor cannot be saved.
        PlanError: the optimizer cannot take a step on the meta device, or a unit has a mesh of its
            own.
    """
    extents = _extents_of(plan)
    model = on_meta(module, {name: layout.dtype for name, (layout, _) in extents.items()})
    values: dict[str, Any] = {"model": model}
    if optimizer is not None:
        values["optimizer"] = _stepped(optimizer(model), model)
    components: dict[str, Component] = {}
    owners: dict[tuple[str, str], str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if optimizer is not None:
        names |= _states_like_parameters(values["optimizer"], names)
    for name, value in sorted(values.items()):
        components[name], tensors = collect(name, value, model, max_file_bytes, is_plan=True)
        for key, tensor in tensors.items():
            if id(tensor) in names:
                owners[name, key] = names[id(tensor)]
    return CheckpointPlan(components, owners, plan)


def _stepped(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except RuntimeError as error:
        raise PlanError(
            f"{type(optimizer).__name__} cannot take a step on the meta device, so its states are "
            f"unknown ({error}); pass optimizer=None to plan only the model"
        ) from error
    return optimizer


def _states_like_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """Map the id of a state to the parameter that it is sharded like; "step" is never sharded."""
    return {
        id(value): names[id(parameter)]
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step" and value.shape == parameter.shape
    }
