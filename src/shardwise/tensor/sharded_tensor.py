"""`ShardedTensor`: a parameter, gradient or state of which each rank stores one run of elements.

Its placement, `RaggedShard`, gives the runs. ``.shape``, ``.ndim`` and ``.numel()`` describe the
whole tensor; ``to_local()`` returns this rank's elements, 1-D. `tensor.operations` defines the
supported operations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwise._private import OpOverload, new_dtensor, use_foreach_for, use_own_operators
from shardwise.errors import ShardedTensorError
from shardwise.plan.chunks import chunk_of
from shardwise.plan.granularity import Block, Dim, WholeBlocks
from shardwise.plan.layout import Cast, Layout, ParameterExtent, ParameterSpec, Run
from shardwise.plan.units import UnitPlan
from shardwise.tensor.distributed_checkpoint import chunks_of, items_of
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.reductions import gather_runs
from shardwise.tensor.sharding import (
    AssignableDTensor,
    ChunkSharding,
    ExtendedSharding,
    Sharding,
    dense_form_of,
    local_of,
    sharding_of,
)

__all__ = [
    "Handler",
    "OwnPart",
    "RaggedShard",
    "RunSharding",
    "ShardedTensor",
    "own_part_of",
    "sharding_for",
]

Handler = Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]


class RaggedShard(Placement):
    """Each rank of a mesh dim stores one run of the row-major elements, which may cut rows."""

    def __init__(self, layout: Layout, extent: ParameterExtent) -> None:
        super().__init__()
        self._layout = layout
        self._extent = extent

    @property
    def runs(self) -> tuple[Run, ...]:
        """The run of each shard. There may be thousands."""
        return self._layout.runs(self._extent)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RaggedShard) and self.runs == other.runs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "RaggedShard":
        return self

    def __hash__(self) -> int:
        return hash((self._layout.world_size, self._extent.parameter.num_elements))

    def __repr__(self) -> str:
        return f"RaggedShard({', '.join(f'{run.start}:{run.stop}' for run in self.runs)})"

    __str__ = __repr__


class RunSharding(Sharding):
    """Distributes a parameter by runs of elements, as `ShardedTensor`s."""

    _uses_groups = False

    @property
    def runs(self) -> tuple[Run, ...]:
        """The elements that each rank stores."""
        return self.layout.runs(self.extent)

    @cached_property
    def cuts(self) -> tuple[Run, ...]:
        """``runs``, kept for the norms of a reproducible model; other models need none."""
        return self.runs if self.mesh.leaves is not None else ()

    @cached_property
    def run(self) -> Run:
        """The elements that this rank stores."""
        return self.layout.run(self.extent, self.mesh.rank)

    def wrap(self, local: Tensor) -> DTensor:
        return ShardedTensor(local, self)

    def part_of(self, whole: Tensor, shard: int) -> Tensor:
        run = self.layout.run(self.extent, shard)
        return whole.reshape(-1)[run.start : run.stop]

    def has_same_cuts(self, other: Sharding) -> bool:
        return isinstance(other, RunSharding) and self.runs == other.runs

    def describes(self, tensor: Tensor) -> bool:
        return isinstance(tensor, ShardedTensor) and tensor.sharding.matches(self)

    @cached_property
    def as_pairs(self) -> "RunSharding":
        """Complex numbers as pairs of real ones, [..., 2]: the same numbers on every rank."""
        return self.with_shape((*self.shape, 2), lambda elements: 2 * elements)

    @cached_property
    def as_numbers(self) -> "RunSharding":
        """Pairs, [..., 2], as complex numbers. Cuts are between pairs, as they are aligned."""
        return self.with_shape(self.shape[:-1], lambda elements: elements // 2)

    def with_shape(
        self, shape: tuple[int, ...], scale: Callable[[int], int] = lambda elements: elements
    ) -> "RunSharding":
        """The same runs of a tensor of another shape; ``scale`` counts its elements."""
        parameter = replace(self.extent.parameter, shape=tuple(shape))
        extent = ParameterExtent(parameter, scale(self.extent.offset))
        size = scale(self.layout.shard_elements)
        layout = Layout((extent,), self.layout.world_size, size)
        return RunSharding(layout, extent, self.mesh, self.label, self.unit)

    @property
    def _inner_placement(self) -> Placement:
        return RaggedShard(self.layout, self.extent)


class ShardedTensor(AssignableDTensor):
    """A tensor of ``sharding.shape`` of which this rank stores ``local`` [run].

    `shardwise.fully_shard` creates it. ``requires_grad``, names and ``.grad`` work as for any
    tensor.
    """

    _sharding: RunSharding
    # Set by `tensor.operations`, which needs this class.
    handler_of: ClassVar[Callable[[OpOverload], Handler]]

    @staticmethod
    def __new__(
        cls: "type[ShardedTensor]",
        local: Tensor,
        sharding: RunSharding,
        *,
        requires_grad: bool = False,
    ) -> "ShardedTensor":
        assert local.shape == (len(sharding.run),), f"{sharding.name}: {tuple(local.shape)}"
        self = new_dtensor(cls, local, sharding.spec(local), requires_grad=requires_grad)
        self._sharding = sharding
        return self

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass  # `__new__` does everything; DTensor's own `__init__` is slow

    def to_local(self, *, grad_placements: object = None) -> Tensor:  # noqa: ARG002
        """This rank's elements, 1-D: a run of the row-major tensor. They share its memory."""
        return local_of(self)

    def _distributed_as_this(self, whole: Tensor) -> Tensor:
        return whole  # `copy_` takes this rank's elements

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:  # noqa: ARG002
        """Gather the whole tensor; every rank must call this."""
        with torch.no_grad():
            runs, mesh = self._sharding.runs, self._sharding.mesh
            local = local_of(self).detach()
            if len(runs) == 1:
                return local.clone().view(self._sharding.shape)
            padded = gather_runs(local, max(map(len, runs)), mesh, self._sharding.label)
            pieces = [row[: len(run)] for row, run in zip(padded, runs, strict=True)]
            return torch.cat(pieces).view(self._sharding.shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **_options: object,
    ) -> DTensor:
        """A DTensor with ``placements`` on ``device_mesh``; every rank must call this."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        wanted = [Replicate()] * mesh.ndim if placements is None else list(placements)
        # A replica is also 1-D, and torch's state dicts contain the local tensor of the result.
        is_whole = all(placement.is_replicate() for placement in wanted)
        if mesh == self.device_mesh and tuple(wanted) == self.placements and not is_whole:
            return self
        return distribute_tensor(self.full_tensor(), mesh, wanted, src_data_rank=None)

    @property
    def sharding(self) -> RunSharding:
        """How the elements are distributed over the ranks."""
        return self._sharding

    def _refuse_memory(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ShardedTensorError(
            f"{self._sharding.name}: this rank does not store the whole tensor; call "
            ".full_tensor() first, save the model inside `with sw.gathered(model):`, or use "
            "sw.save, which gathers nothing. torch.compile of optimizer.step needs "
            'granularity="dim"'
        )

    def data_ptr(self) -> int:
        """0, as of other DTensors: only the local tensor has memory."""
        return 0

    # Libraries that save or share tensors, such as safetensors and transformers, use these.
    untyped_storage = storage = numpy = tolist = __array__ = _refuse_memory
    __dlpack__ = __dlpack_device__ = share_memory_ = _refuse_memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's elements, for ranks of an equal mesh that store the same ones."""
        own = self._sharding
        parts = own.layout, own.extent, own.mesh, own.label, own.unit
        return _unpickled, (local_of(self).detach(), parts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        run, mesh = self._sharding.run, self._sharding.mesh
        return (
            f"ShardedTensor({self._sharding.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, elements {run.start}:{run.stop} on rank {mesh.rank} of "
            f"{mesh.size})"
        )

    # The protocol of `torch.distributed.checkpoint` for distributed tensors.

    def __create_write_items__(self, fqn: str, object: Any) -> list[object]:  # noqa: A002
        return items_of(fqn, self.shape, self._sharding.run, local_of(self))

    def __create_chunk_list__(self) -> list[object]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(part for chunk, part in self._chunks() if chunk.offsets == index.offset)

    def _chunks(self) -> list[tuple[Any, Tensor]]:
        return chunks_of(self.shape, self._sharding.run, local_of(self).detach())

    def __tensor_flatten__(self) -> tuple[list[str], RunSharding]:
        return ["_local_tensor"], self._sharding

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        sharding: RunSharding,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> "ShardedTensor":
        return ShardedTensor(inner["_local_tensor"], sharding)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._sharding.copy_of(self, memo)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return cls.handler_of(func)(func, args, kwargs or {})


use_foreach_for(ShardedTensor)
use_own_operators(ShardedTensor)


def _unpickled(local: Tensor, parts: tuple[Any, ...]) -> Tensor:
    layout, extent, mesh, *labels = parts
    sharding = RunSharding(layout, extent, mesh.on_this_rank(), *labels)
    if mesh.group is not None or mesh.num_ranks == 1:
        return ShardedTensor(local, sharding)
    if len(sharding.runs) > 1:
        raise ShardedTensorError(
            f"{sharding.name}: the file has shard {mesh.rank} of {mesh.size}, and this process has "
            "no process group of their ranks. Read it on the rank that wrote it, or save the whole "
            "model: with sw.save, or with torch.save inside `with sw.gathered(model):`"
        )
    return local.view(sharding.shape)


# What a pickled `ShardedTensor` consists of: `torch.load` refuses other classes by default.
torch.serialization.add_safe_globals(
    [_unpickled, DataParallelMesh, Layout, ParameterExtent, ParameterSpec, Cast, Block, WholeBlocks]
)


def sharding_for(
    unit: UnitPlan,
    layout: Layout,
    extent: ParameterExtent,
    mesh: DataParallelMesh,
    original: Tensor,
    module: Callable[[], nn.Module | None] | None = None,
) -> Sharding:
    """The Sharding of the parameter at ``extent``.

    ``original`` is the parameter before, and ``module`` a weak reference to the unit.
    """
    position = f"elements {extent.offset}:{extent.stop} of buffer {unit.layouts.index(layout)}"
    label = f"{position} of {unit.label}"
    in_chunks = isinstance(extent.parameter.granularity, Dim)
    before = sharding_of(original)
    if before is not None:
        inner, local = before.dense_spec, before.local_gradients
    else:
        inner, local = dense_form_of(original) if isinstance(original, DTensor) else (None, None)
    kind = ExtendedSharding if extent.parameter.is_extended else ChunkSharding
    made = kind if in_chunks else RunSharding
    return made(layout, extent, mesh, label, unit.label, inner, module, local)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """The elements of a tensor that this rank and ``num_replicas - 1`` other ranks store."""

    run: Run
    replica: int
    num_replicas: int


def own_part_of(tensor: Tensor) -> OwnPart | None:
    """This rank's part of ``tensor``; None if it is not a DTensor or its elements are not a run."""
    if isinstance(tensor, ShardedTensor):
        mesh = tensor.sharding.mesh
        num_replicas = mesh.num_ranks // mesh.size
        replica = mesh.column.index if num_replicas > 1 else 0
        return OwnPart(tensor.sharding.run, replica, num_replicas)
    coordinate = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else None
    if coordinate is None or not isinstance(tensor, DTensor):
        return None
    run, replica, num_replicas = Run(0, tensor.numel()), 0, 1
    for placement, size, index in zip(
        tensor.placements, tensor.device_mesh.shape, coordinate, strict=True
    ):
        if placement.is_replicate():
            replica, num_replicas = replica * size + index, num_replicas * size
        elif placement == Shard(0) and run == Run(0, tensor.numel()):
            rows, row = chunk_of(tensor.shape[0], size, index), prod(tensor.shape[1:])
            run = Run(rows.start * row, rows.stop * row)
        else:
            return None
    return OwnPart(run, replica, num_replicas)
