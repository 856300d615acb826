"""A DTensor of which each rank stores one run of elements: a parameter, gradient or state.

Its placement is `RaggedShard`, which says the runs. ``.shape``, ``.ndim`` and ``.numel()`` describe
the whole tensor; ``to_local()`` is what this rank stores of it, 1-D. These operations are
supported, and all others raise a `ShardedTensorError`:

- *element-wise* operations, ``foreach`` and ``fused`` optimizer kernels included, work on the runs;
- *reductions* over all dimensions (norm, sum, mean, max, min, all, any) and comparisons (equal,
  allclose) combine the runs of all ranks, so every rank has to call them;
- *copies* (clone, detach, zeros_like, to, copy_, assigning ``.data``) and ``redistribute``;
- *random numbers in place* (normal_, uniform_, hence ``torch.nn.init``) equal those of one process:
  every rank draws all of them and keeps its own.
"""

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils.dlpack import from_dlpack

from shardwise._private import (
    AsyncCollectiveTensor,
    DTensorSpec,
    OpOverload,
    TensorMeta,
    accumulated_gradient_hooks,
    gradient_hooks,
    joined_mesh,
    new_dtensor,
    pytree,
    strided_shard,
    use_foreach_for,
)
from shardwise.errors import ShardedTensorError
from shardwise.plan.chunks import chunk_of, chunk_shape
from shardwise.plan.granularity import Dim
from shardwise.plan.layout import Layout, ParameterExtent, Run
from shardwise.plan.units import UnitPlan
from shardwise.runtime.distributed_checkpoint import chunks_of, items_of
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.reductions import across, combine, gather_runs, norms
from shardwise.transport.device import random_states

__all__ = [
    "STEPS_IN_BACKWARD",
    "ExtendedSharding",
    "OwnPart",
    "RaggedShard",
    "ShardedTensor",
    "Sharding",
    "apply_gradient_hooks",
    "copy_of",
    "draws",
    "is_tensor_parallel",
    "local_of",
    "mesh_of",
    "own_part_of",
    "run_accumulated_hooks",
    "sharding_for",
    "sharding_of",
    "written_tensors",
]


class RaggedShard(Placement):
    """Each rank of a mesh dimension stores a run of the row-major elements, which may cut rows."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__()
        self.runs = tuple(runs)  # by shard

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"RaggedShard({', '.join(f'{run.start}:{run.stop}' for run in self.runs)})"

    __str__ = __repr__


@dataclass(frozen=True, eq=False)
class Sharding:
    """Where the elements of one parameter are; shared by its gradient and its optimizer states.

    This one is of runs; `ChunkSharding` is of chunks of a dim, and `ExtendedSharding` of chunks of
    classes that say themselves what is gathered of them.
    """

    layout: Layout
    extent: ParameterExtent
    mesh: DataParallelMesh
    label: str  # the same on ranks that give the parameter other names
    tensor_parallel: DTensorSpec | None = None  # of a parameter that was a DTensor before
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.extent.parameter.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.extent.parameter.shape)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The elements that each rank stores."""
        return self.layout.runs(self.extent)

    @property
    def run(self) -> Run:
        """The elements that this rank stores."""
        return self.layout.run(self.extent, self.mesh.rank)

    def wrap(self, local: Tensor) -> DTensor:
        """The tensor of which this rank stores ``local``, 1-D."""
        return ShardedTensor(local, self)

    def own_part_of(self, whole: Tensor) -> Tensor:
        """What this rank stores of ``whole``."""
        return whole.reshape(-1)[self.run.start : self.run.stop]

    def mark(self, parameter: Tensor) -> None:
        """Have `sharding_of` find this; a `ShardedTensor` knows it."""

    def empty(self, dtype: torch.dtype, device: torch.device) -> DTensor:
        """A tensor with undefined values."""
        num_owned = self.layout.num_owned(self.extent, self.mesh.rank)
        return self.wrap(torch.empty(num_owned, dtype=dtype, device=device))

    def rebind(self, tensor: Tensor, local: Tensor) -> None:
        """Have ``tensor`` store its elements in ``local``, of the same shape and dtype."""
        assert isinstance(tensor, DTensor)
        assert (local.shape, local.dtype) == (
            tensor._local_tensor.shape,
            tensor._local_tensor.dtype,
        )
        tensor._local_tensor = local

    def is_cut_as(self, other: "Sharding") -> bool:
        """Whether tensors of both have the same elements in the shards of the same number."""
        return type(self) is type(other) and self.runs == other.runs

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Sharding":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A parameter that was pickled is on its own; process groups cannot be pickled."""
        return type(None), ()

    def copy_of_local(self, tensor: Tensor) -> Tensor:
        """A copy of what this rank stores of ``tensor``, for `wrap`."""
        return local_of(tensor).detach().clone().reshape(-1)

    def dense(self, local: Tensor) -> Tensor:
        """The parameter that modules compute with, of which ``local`` is the memory."""
        return local

    def local_of_dense(self, dense: Tensor) -> Tensor:
        """The reverse, also for gradients."""
        return dense

    def matches(self, other: "Sharding") -> bool:
        """Whether tensors of both have the same elements on the same ranks."""
        return self is other or (
            self.mesh.is_same(other.mesh) and self.shape == other.shape and self.is_cut_as(other)
        )

    def mark_if_described(self, parameter: Tensor) -> None:
        """Have `sharding_of` find this again, if ``parameter`` is distributed in this way."""
        if sharding_of(parameter) is None and self.describes(parameter):
            self.mark(parameter)

    def describes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is distributed in this way."""
        return isinstance(tensor, ShardedTensor) and tensor.sharding.matches(self)

    def spec(self, local: Tensor) -> DTensorSpec:
        """What torch's DTensor knows of a tensor of which this rank stores ``local``."""
        known = self._specs.get(local.dtype)
        if known is None:
            strides = torch.empty(self.shape, device="meta").stride()
            meta = TensorMeta(self.shape, strides, local.dtype)
            mesh = self.mesh.device_mesh(local.device.type, has_groups=self._uses_groups)
            known = DTensorSpec(mesh, self._placements(mesh.ndim), tensor_meta=meta)
            self._specs[local.dtype] = known
        return known

    _uses_groups: ClassVar[bool] = False

    def _placements(self, num_dims: int) -> tuple[Placement, ...]:
        is_cut = self.mesh.size > 1 or self.mesh.num_ranks == 1
        inner: Placement = self._inner_placement if is_cut else Replicate()
        outer = inner if self.mesh.size == self.mesh.num_ranks else Replicate()
        return (outer, inner)[-num_dims:]

    @property
    def _inner_placement(self) -> Placement:
        return RaggedShard(self.runs)


class ChunkSharding(Sharding):
    """Chunks of a dim, in torch's own DTensors: those of FSDP2.

    With tensor parallelism, ``extent`` is of this rank's part of the parameter.
    """

    _uses_groups = True  # torch's operators run collectives

    @property
    def shape(self) -> torch.Size:
        return super().shape if self.tensor_parallel is None else self.tensor_parallel.shape

    def spec(self, local: Tensor) -> DTensorSpec:
        inner = self.tensor_parallel
        if inner is None:
            return super().spec(local)
        known = self._specs.get(local.dtype)
        if known is None:
            outer = self.mesh.device_mesh(local.device.type, has_groups=True)
            num_inner = prod(
                inner.mesh.size(i)
                for i, placement in enumerate(inner.placements)
                if isinstance(placement, Shard) and placement.dim == self._dim
            )
            placements = [
                strided_shard(self._dim, num_inner) if num_inner > 1 and one.is_shard() else one
                for one in self._placements(outer.ndim)
            ]
            meta = TensorMeta(self.shape, inner.stride, local.dtype)
            mesh = joined_mesh(outer, inner.mesh)
            known = DTensorSpec(mesh, (*placements, *inner.placements), tensor_meta=meta)
            self._specs[local.dtype] = known
        return known

    def dense(self, local: Tensor) -> Tensor:
        inner = self.tensor_parallel
        if inner is None:
            return local
        meta = TensorMeta(self.shape, inner.stride, local.dtype)
        spec = DTensorSpec(inner.mesh, inner.placements, tensor_meta=meta)
        dense: DTensor = new_dtensor(DTensor, local, spec, requires_grad=False)
        return dense

    def local_of_dense(self, dense: Tensor) -> Tensor:
        inner = self.tensor_parallel
        if inner is None or not isinstance(dense, DTensor):
            return dense
        if dense.placements != inner.placements:  # partial sums, as those of a gradient may be
            dense = dense.redistribute(inner.mesh, inner.placements)
        local = dense._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def wrap(self, local: Tensor) -> DTensor:
        if local.storage_offset():
            local = _with_own_storage(local)
        chunk = local.view(chunk_shape(self.extent.parameter, self.mesh.size, self.mesh.rank))
        wrapped: DTensor = new_dtensor(DTensor, chunk, self.spec(chunk), requires_grad=False)
        return wrapped

    def own_part_of(self, whole: Tensor) -> Tensor:
        run = chunk_of(whole.shape[self._dim], self.mesh.size, self.mesh.rank)
        return whole.narrow(self._dim, run.start, len(run))

    def mark(self, parameter: Tensor) -> None:
        vars(parameter)[_SHARDING] = self

    def is_cut_as(self, other: Sharding) -> bool:
        sizes = self.mesh.size, other.mesh.size
        return isinstance(other, ChunkSharding) and self._dim == other._dim and len(set(sizes)) == 1

    def describes(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor) and (
            (tensor.shape, tensor.device_mesh, tensor.placements) == (self.shape, *self._described)
        )

    @property
    def _described(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        spec = next(iter(self._specs.values()))
        return spec.mesh, spec.placements

    @property
    def _dim(self) -> int:
        granularity = self.extent.parameter.granularity
        assert isinstance(granularity, Dim)
        return granularity.dim

    @property
    def _inner_placement(self) -> Placement:
        return Shard(self._dim)


class ExtendedSharding(ChunkSharding):
    """Chunks that are tensors of the parameter's own class; its gradient and states are plain."""

    def wrap(self, local: Tensor) -> DTensor:
        if type(local) is Tensor:
            return super().wrap(local)
        wrapped: DTensor = new_dtensor(DTensor, local, self.spec(local), requires_grad=False)
        return wrapped

    def stored_part_of(self, whole: Tensor) -> DTensor:
        """What this rank stores of ``whole``, by the operations that FSDP2 asks of such a class."""
        size, rank = self.mesh.size, self.mesh.rank
        chunks = torch.chunk(whole.detach(), size, dim=self._dim)
        local = whole.new_zeros(chunks[0].shape)
        length = chunks[rank].shape[self._dim] if rank < len(chunks) else 0
        if length:
            local.narrow(self._dim, 0, length).copy_(chunks[rank])
        return self.wrap(local.narrow(self._dim, 0, length))

    def copy_of_local(self, tensor: Tensor) -> Tensor:
        return copy.deepcopy(local_of(tensor).detach())


def _with_own_storage(flat: Tensor) -> Tensor:
    """The same memory from the beginning of a Storage; with an offset, DTensors cannot be pickled.

    DLPack is the public way to such a Storage, which keeps the other alive.
    """
    if flat.is_meta or not flat.numel():
        return flat.new_empty(flat.shape)
    return from_dlpack(flat.detach().view(torch.uint8)).view(flat.dtype)


_SHARDING = "_sharding"
STEPS_IN_BACKWARD = "_shardwise_steps_in_backward"  # of a parameter whose gradient is dropped there


def sharding_for(
    unit: UnitPlan,
    layout: Layout,
    extent: ParameterExtent,
    mesh: DataParallelMesh,
    original: Tensor,
) -> Sharding:
    """How the parameter of ``extent`` is distributed, which is ``original`` now."""
    place = f"elements {extent.offset}:{extent.stop} of buffer {unit.layouts.index(layout)}"
    label = f"{place} of {unit.label}"
    in_chunks = isinstance(extent.parameter.granularity, Dim)
    before = sharding_of(original)
    if before is not None:
        inner = before.tensor_parallel
    else:
        inner = original._spec if isinstance(original, DTensor) else None
    kind = ExtendedSharding if extent.parameter.is_extended else ChunkSharding
    return (kind if in_chunks else Sharding)(layout, extent, mesh, label, inner)


def is_tensor_parallel(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a DTensor that `fully_shard` has not distributed."""
    return isinstance(parameter, DTensor) and sharding_of(parameter) is None


def sharding_of(parameter: Tensor) -> Sharding | None:
    """How `fully_shard` distributed ``parameter``; None if it did not."""
    found = vars(parameter).get(_SHARDING)
    assert found is None or isinstance(found, Sharding)
    return found


def mesh_of(parameters: Iterable[Tensor]) -> DataParallelMesh | None:
    """The ranks that share a model with ``parameters``, experts among them; None: not sharded."""
    found = (sharding_of(parameter) for parameter in parameters)
    meshes = (one.mesh for one in found if one is not None)
    return max(meshes, key=lambda mesh: mesh.num_ranks, default=None)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """The elements of a tensor that this rank stores, as do ``num_replicas - 1`` other ranks."""

    run: Run
    replica: int
    num_replicas: int


def own_part_of(tensor: Tensor) -> OwnPart | None:
    """What is here of ``tensor``; None if it is no DTensor, or if its elements here are no run."""
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


def local_of(tensor: Tensor) -> Tensor:
    """What this rank stores of a DTensor, itself; its ``to_local()`` may be a view of it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


class ShardedTensor(DTensor):
    """A tensor of ``sharding.shape`` of which this rank stores ``local`` [run].

    Made by `shardwise.fully_shard`. ``requires_grad``, names and ``.grad`` are as for any tensor.
    """

    _sharding: Sharding

    @staticmethod
    def __new__(
        cls: "type[ShardedTensor]",
        local: Tensor,
        sharding: Sharding,
        *,
        requires_grad: bool = False,
    ) -> "ShardedTensor":
        assert local.shape == (len(sharding.run),), f"{sharding.name}: {tuple(local.shape)}"
        self: ShardedTensor = new_dtensor(cls, local, sharding.spec(local), requires_grad)
        self._sharding = sharding
        return self

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Everything is done by ``__new__``; DTensor's own takes long."""

    def to_local(self, *, grad_placements: object = None) -> Tensor:  # noqa: ARG002
        """This rank's elements, 1-D: a run of the row-major tensor, sharing its memory."""
        return self._local_tensor

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:  # noqa: ARG002
        """Gather the whole tensor; every rank has to call this."""
        with torch.no_grad():
            runs, mesh = self._sharding.runs, self._sharding.mesh
            local = self._local_tensor.detach()
            if len(runs) == 1:
                return local.clone().view(self._sharding.shape)
            padded = gather_runs(local, runs, mesh, self._sharding.label)
            pieces = [row[: len(run)] for row, run in zip(padded, runs, strict=True)]
            return torch.cat(pieces).view(self._sharding.shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **_options: object,
    ) -> DTensor:
        """A DTensor with other ``placements`` on ``device_mesh``; every rank has to call this."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        wanted = [Replicate()] * mesh.ndim if placements is None else list(placements)
        if mesh == self.device_mesh and tuple(wanted) == self.placements:
            return self
        return distribute_tensor(self.full_tensor(), mesh, wanted, src_data_rank=None)

    @property
    def sharding(self) -> Sharding:
        """Which elements are on which rank."""
        return self._sharding

    @property
    def data(self) -> Tensor:
        """The tensor without its history; assigning a sharded or a whole tensor copies it."""
        data: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy instead of taking the memory of ``value``, for the shard is a view of a buffer."""
        expected, got = ((x.dtype, tuple(x.shape)) for x in (self, value))
        if got != expected:
            raise ShardedTensorError(
                f"{self._sharding.name}.data: expected a tensor of {expected[0]} {expected[1]}, "
                f"got {got[0]} {got[1]}; convert the model before fully_shard"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    def _refuse_memory(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise ShardedTensorError(
            f"{self._sharding.name}: this rank has no memory of the whole tensor; call "
            ".full_tensor() first, or save the model inside `with sw.gathered(model):`, or with "
            "sw.save, which gathers nothing"
        )

    # Libraries that save or share tensors, such as safetensors and transformers, ask for these.
    untyped_storage = storage = numpy = tolist = __array__ = __reduce_ex__ = _refuse_memory

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        run, mesh = self._sharding.run, self._sharding.mesh
        return (
            f"ShardedTensor({self._sharding.name}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, elements {run.start}:{run.stop} on rank {mesh.rank} of "
            f"{mesh.size})"
        )

    # The protocol of `torch.distributed.checkpoint` for tensors that are on several ranks.

    def __create_write_items__(self, fqn: str, object: Any) -> list[object]:  # noqa: A002
        return items_of(fqn, self.shape, self._sharding.run, self._local_tensor)

    def __create_chunk_list__(self) -> list[object]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return next(part for chunk, part in self._chunks() if chunk.offsets == index.offset)

    def _chunks(self) -> list[tuple[Any, Tensor]]:
        return chunks_of(self.shape, self._sharding.run, self._local_tensor.detach())

    def __tensor_flatten__(self) -> tuple[list[str], Sharding]:
        return ["_local_tensor"], self._sharding

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        sharding: Sharding,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> "ShardedTensor":
        return ShardedTensor(inner["_local_tensor"], sharding)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy_of(self, self._sharding, memo)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _handler_of(func)(func, args, kwargs or {})


use_foreach_for(ShardedTensor)


def copy_of(tensor: Tensor, sharding: Sharding, memo: dict[int, Any]) -> Tensor:
    """What `copy.deepcopy` makes of ``tensor``."""
    if id(tensor) in memo:
        known: Tensor = memo[id(tensor)]
        return known
    twin: Tensor = sharding.wrap(sharding.copy_of_local(tensor))
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        sharding.mark(twin)
    memo[id(tensor)] = twin
    return twin


def apply_gradient_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Apply the hooks that the user registered on ``parameter`` to its gradient."""
    for hook in gradient_hooks(parameter):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def run_accumulated_hooks(parameter: Tensor) -> None:
    """Call the user's hooks for a gradient that has been accumulated."""
    for hook in accumulated_gradient_hooks(parameter):
        hook(parameter)


def draws(func: OpOverload) -> bool:
    """Whether ``func`` fills a tensor with random numbers."""
    return func.overloadpacket.__name__ in _RANDOM


def written_tensors(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that ``func`` changes."""
    changed = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in _written_arguments(func)
    ]
    return [x for x in pytree.tree_leaves(changed) if isinstance(x, Tensor)]


# -- dispatch ------------------------------------------------------------------------------------

Handler = Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]


@cache
def _handler_of(func: OpOverload) -> Handler:
    name = func.overloadpacket.__name__
    if name in _HANDLERS:
        return _HANDLERS[name]
    if name.startswith(("_foreach_", "_fused_ada", "_fused_sgd")):
        return _on_lists
    return _on_runs if torch.Tag.pointwise in func.tags else _refuse


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _refuse(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    leaves = pytree.tree_leaves((args, kwargs))
    raise _refusal(func, next(x for x in leaves if isinstance(x, ShardedTensor)))


def _refusal(
    func: OpOverload, x: ShardedTensor, why: str = "needs more than the shard of this rank"
) -> ShardedTensorError:
    return ShardedTensorError(
        f"{func} of {x._sharding.name} {tuple(x.shape)} {why}; use .full_tensor() for the whole, "
        ".to_local() for this rank's elements, or `sw.gathered(model)`; if it was raised in a "
        "forward, the module was not called through its unit"
    )


# -- element by element --------------------------------------------------------------------------


def _on_runs(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` on the runs of its arguments, which have to be cut in the same way."""
    leaves, tree = [*args, *kwargs.values()], None
    if any(isinstance(x, (list, tuple, dict)) for x in leaves):
        leaves, tree = pytree.tree_flatten((list(args), dict(kwargs)))
    first = next(x for x in leaves if isinstance(x, ShardedTensor))
    written = written_tensors(func, args, kwargs) if func._schema.is_mutable else []
    if not all(isinstance(x, ShardedTensor) for x in written):
        raise _refusal(func, first, "would write a shard into a tensor that is not sharded")
    local = [_to_run(func, x, first) for x in leaves]
    if tree is None:  # as in every step of an optimizer: trees take as long as the rest
        local_args = local[: len(args)]
        local_kwargs = dict(zip(kwargs, local[len(args) :], strict=True))
    else:
        local_args, local_kwargs = tree.unflatten(local)
    result = func(*local_args, **local_kwargs)
    for x in written:
        torch.autograd.graph.increment_version(x)
    if written:
        return written[0]
    if isinstance(result, Tensor):
        return ShardedTensor(result, first._sharding)
    return pytree.tree_map_only(Tensor, lambda t: ShardedTensor(t, first._sharding), result)


def _to_run(func: OpOverload, x: Any, first: ShardedTensor) -> Any:
    """The elements of ``x`` that meet this rank's run of ``first``."""
    if isinstance(x, ShardedTensor):
        _check_matches(func, first, x)
        return x._local_tensor
    if isinstance(x, DTensor):
        if x.numel() != 1:
            raise _refusal(func, first, f"with a DTensor of {x.placements}")
        x = x.full_tensor()
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x
    shape, run = first._sharding.shape, first._sharding.run
    trailing = shape[len(shape) - x.ndim :]
    broadcasts = x.ndim <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(x.shape, trailing, strict=True)
    )
    if not broadcasts:
        raise _refusal(func, first, f"with a tensor of shape {tuple(x.shape)}")
    if x.numel() == 1:
        return x.reshape(1)
    return x.expand(shape).reshape(-1)[run.start : run.stop]


def _alias(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> ShardedTensor:
    """As `_on_runs`, which is slower: every `nn.Parameter` and every optimizer step calls this."""
    return ShardedTensor(func(args[0]._local_tensor), args[0]._sharding)


def _on_lists(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`foreach` and `fused` kernels: entry i of every list belongs to the same parameter."""
    _check_lists(func, args)
    result = func(*map(_locals_of, args), **{key: _locals_of(x) for key, x in kwargs.items()})
    if func._schema.is_mutable:
        for x in written_tensors(func, args, kwargs):
            if isinstance(x, ShardedTensor):
                torch.autograd.graph.increment_version(x)
        return None
    for local, x in zip(result, args[0], strict=True):
        if isinstance(x, ShardedTensor) and local.shape != x._local_tensor.shape:
            raise _refusal(func, x)
    return [_wrap_as(local, x) for local, x in zip(result, args[0], strict=True)]


def _wrap_as(local: Tensor, x: Tensor) -> Tensor:
    """What a function of ``x`` made of the elements of ``x`` that are here."""
    if isinstance(x, ShardedTensor):
        return ShardedTensor(local, x._sharding)
    if isinstance(x, DTensor):
        return DTensor.from_local(
            local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
        )
    return local


def _locals_of(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_locals_of(y) for y in x]
    return x._local_tensor if isinstance(x, DTensor) else x


def _check_lists(func: OpOverload, args: Sequence[Any]) -> None:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(args[0])]
    for entries in zip(*lists, strict=True):
        first = next((x for x in entries if isinstance(x, ShardedTensor)), None)
        if first is None:
            continue
        for x in entries:
            if isinstance(x, ShardedTensor):
                _check_matches(func, first, x)
            elif isinstance(x, Tensor) and (x.numel() != 1 or x is entries[0]):
                raise _refusal(func, first, f"with an unsharded tensor of shape {tuple(x.shape)}")


def _check_matches(func: OpOverload, one: ShardedTensor, other: ShardedTensor) -> None:
    if not one._sharding.matches(other._sharding):
        name, shape = other._sharding.name, tuple(other.shape)
        raise _refusal(func, one, f"with {name} {shape}, which is cut differently")


def _view(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    x, shape = args[:2]
    if tuple(shape) != tuple(x.shape):
        raise _refusal(func, x)
    if x.requires_grad and torch.is_grad_enabled():
        # It would reveal the AccumulateGrad node, which never runs. Zero-bubble pipeline schedules
        # and others find it through a view of the parameter's own shape.
        raise ShardedTensorError(
            f"{x._sharding.name}: autograd would record a view of a sharded parameter, which gets "
            "its gradient from its unit and not from autograd. Take the view under "
            "torch.no_grad(); register hooks with register_post_accumulate_grad_hook; for "
            "zero-bubble and ZBV pipeline schedules use shardwise.pipeline.PipelineStage"
        )
    alias: Tensor = torch.ops.aten.alias(x)
    return alias


def _index_put(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``x[mask] = number``, with a mask that is cut as ``x`` is."""
    indices, value = args[1:3]
    is_mask = all(isinstance(x, ShardedTensor) and x.dtype is torch.bool for x in indices)
    if len(indices) != 1 or not is_mask or value.numel() != 1:
        _refuse(func, args, kwargs)
    return _on_runs(func, args, kwargs)


def _draw(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedTensor:
    """Fill a tensor with the random numbers that one process would draw.

    Raises:
        ShardedTensorError: the generators of ranks differ, so that each would draw something else.
    """
    x: ShardedTensor = args[0]
    mesh, run = x._sharding.mesh, x._sharding.run
    generator = kwargs.get("generator")
    state = random_states(x.device)[-1] if generator is None else generator.get_state()
    digest = torch.tensor(zlib.crc32(bytes(state.tolist())))
    digests = across([digest], mesh, mesh.world).view(-1).tolist()
    if mesh.backend("cpu") != "fake" and len(set(digests)) > 1:
        raise ShardedTensorError(
            f"{x._sharding.name}: {func} expects random generators in the same state on all ranks; "
            "call torch.manual_seed with one seed on every rank before"
        )
    whole = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    func(whole, *args[1:], **kwargs)
    x._local_tensor.copy_(whole.view(-1)[run.start : run.stop])
    torch.autograd.graph.increment_version(x)
    return x


# -- reductions ----------------------------------------------------------------------------------

_REDUCTIONS = {
    "linalg_vector_norm": "norm", "norm": "norm", "sum": "sum", "mean": "mean", "max": "max",
    "amax": "max", "min": "min", "amin": "min", "all": "all", "any": "any",
}  # fmt: skip


def _reduce(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """A reduction over all dimensions; one over some of them or with an index is refused."""
    x: ShardedTensor = args[0]
    kind, mesh = _REDUCTIONS[func.overloadpacket.__name__], x._sharding.mesh
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.ndim)
    if len(func._schema.returns) > 1 or len({dim % max(1, x.ndim) for dim in dims}) < x.ndim:
        raise _refusal(func, x)
    dtype, order = given.get("dtype"), given.get("ord", given.get("p", 2.0))
    run = x._local_tensor if dtype is None else x._local_tensor.to(dtype)
    if kind == "norm":
        result = norms([run], mesh, 2.0 if order is None else float(order))[0]
    else:
        result = combine(kind, run, x.numel(), mesh)
    return result.view([1] * x.ndim) if given.get("keepdim") else result


def _compare(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether two tensors are equal, or close, on all ranks."""
    first = next(x for x in args[:2] if isinstance(x, ShardedTensor))
    if func.overloadpacket.__name__ == "equal" and args[0].shape != args[1].shape:
        return False
    # A tensor of one element meets every element, of which this rank may have none.
    one, other = (_to_run(func, x, first).expand(len(first._sharding.run)) for x in args[:2])
    answer = torch.tensor(int(func(one, other, *args[2:], **kwargs)))
    return bool(across([answer], first._sharding.mesh).all())


def _foreach_norm(
    _func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The global norm of every tensor, in one exchange for each mesh and dtype."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2.0
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")  # noqa: PLR2004
    results: dict[int, Tensor] = {}
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor):
            groups.setdefault((id(x._sharding.mesh), x.dtype), []).append(i)
        else:
            norm = torch.linalg.vector_norm(x, order, dtype=dtype)
            results[i] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    for members in groups.values():
        runs = [tensors[i]._local_tensor.to(dtype or tensors[i].dtype) for i in members]
        found = norms(runs, tensors[members[0]]._sharding.mesh, order)
        results.update(zip(members, found, strict=True))
    return [results[i] for i in range(len(tensors))]


def _foreach_max(_func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Any:
    return [x.max() for x in args[0]]


def _unscale(func: OpOverload, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
    """GradScaler's kernel: a non-finite gradient on any rank skips the step on every rank."""
    grads, found_inf, inverse_scale = args
    meshes = {id(x._sharding.mesh): x._sharding.mesh for x in grads if isinstance(x, ShardedTensor)}
    func(_locals_of(grads), found_inf, inverse_scale)
    for mesh in meshes.values():
        found_inf.copy_(across([found_inf.reshape(())], mesh).amax())


_RANDOM = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip

# torch tags these as pointwise, but each rank would draw other numbers.
_DRAWN_BY_RANK = {"bernoulli", "dropout", "native_dropout", "rand_like"}

# torch does not tag these as pointwise, but they are, or they make a tensor of the same shape.
_LIKE_POINTWISE = {
    "_to_copy", "clone", "copy_", "detach_", "empty_like", "fill_", "full_like",
    "lift_fresh", "masked_fill", "masked_fill_", "ones_like", "zero_", "zeros_like",
}  # fmt: skip

# Handlers by the name of the operator; what is not here is decided in `_handler_of`.
_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_DRAWN_BY_RANK, _refuse),
    **dict.fromkeys(_LIKE_POINTWISE, _on_runs),
    **dict.fromkeys(("alias", "detach"), _alias),
    **dict.fromkeys(_RANDOM, _draw),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("allclose", "equal"), _compare),
    **dict.fromkeys(("view", "_unsafe_view", "expand"), _view),
    **dict.fromkeys(("index_put", "index_put_"), _index_put),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_max": _foreach_max,
    "_foreach_norm": _foreach_norm,
}
