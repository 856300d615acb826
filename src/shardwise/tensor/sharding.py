"""How a parameter is distributed: which rank stores which elements, in which kind of DTensor."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwise._private import (
    AsyncCollectiveTensor,
    DTensorSpec,
    TensorMeta,
    joined_mesh,
    new_dtensor,
    set_versions,
    strided_shard,
    use_foreach_for,
)
from shardwise.errors import ShardedTensorError
from shardwise.plan.chunks import chunk_dim, chunk_of, chunk_shape
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.tensor.mesh import DataParallelMesh

__all__ = [
    "BEFORE_USE",
    "AssignableDTensor",
    "ChunkSharding",
    "ExtendedSharding",
    "Sharding",
    "dense_form_of",
    "is_tensor_parallel",
    "local_of",
    "mark_as_local",
    "mesh_of",
    "sharding_of",
]

_SHARDING = "_sharding"  # a parameter's attribute
_LOCAL = "_shardwise_local"  # an attribute: see `mark_as_local`
# On a local tensor: what `local_of` calls first. Not on the DTensor, whose attributes are carried.
BEFORE_USE = "_shardwise_before_use"
_ALIASES = "_shardwise_aliases"  # an attribute: weak references to local tensors of `detach()`
_GRADIENT: Any = torch.Tensor.grad  # a descriptor


class AssignableDTensor(DTensor):
    """A DTensor to whose ``.data`` and ``.grad`` a program may assign.

    ``.data = value`` copies the value. Tensors that ``.data`` or a parameter's ``.detach()``
    returned before keep the old values; tensors that were made of these follow. On a plain DTensor
    it has no effect, as everything uses the local tensor. Parameters and gradients that are cut
    into chunks have this class; other operations return plain DTensors.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient. It may be on the device while this is in host memory, and the reverse."""
        gradient: Tensor | None = _GRADIENT.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if isinstance(value, DTensor) and value.device != self.device:
            value = self._as_its_gradient(value)
        _GRADIENT.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRADIENT.__set__(self, None)

    def _as_its_gradient(self, gradient: DTensor) -> Tensor:
        """``gradient`` as a tensor that reports the device of this one, which torch requires.

        Only its local tensor tells where it is.

        Raises:
            ShardedTensorError: it is cut differently.
        """
        sharding = sharding_of(self)
        if sharding is None:
            return gradient
        expected, got = (  # their meshes may be of different devices
            (x._local_tensor.numel(), tuple(x.shape), x.placements) for x in (self, gradient)
        )
        if got != expected:
            raise ShardedTensorError(
                f"{sharding.name}.grad: expected a gradient that is cut as the parameter, with "
                f"{expected[0]:,} elements of {expected[1]} on this rank, got {got[0]:,} of "
                f"{got[1]}, cut in another way; compute it from the gradient that was there"
            )
        local = local_of(gradient)
        one = torch.empty(1, dtype=local.dtype, device=self.device)
        reported = sharding.wrap_gradient(one.expand(local.numel()))
        reported._local_tensor = local
        return reported

    @property
    def data(self) -> Tensor:
        """The tensor without autograd history. Assigning a sharded or whole tensor copies it.

        Writes to it count as changes of this tensor, unlike those of plain tensors: gathered copies
        of a parameter do not show them.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._remembered(torch.Tensor.data.__get__(self))  # type: ignore[attr-defined]
        detached = cast("DTensor", self.detach())
        return detached if isinstance(self, nn.Parameter) else self._remembered(detached)

    @data.setter
    def data(self, value: Tensor) -> None:
        expected, got = ((x.dtype, tuple(x.shape)) for x in (self, value))
        if got != expected:
            sharding = sharding_of(self)
            raise ShardedTensorError(
                f"{'gradient' if sharding is None else sharding.name}.data: expected a tensor of "
                f"{expected[0]} {expected[1]}, got {got[0]} {got[1]}; convert the model before "
                "fully_shard"
            )
        is_whole = not isinstance(value, DTensor)
        with torch.no_grad():
            for alias in vars(self).pop(_ALIASES, ()):
                if (local := alias()) is not None:
                    local.data = local.clone()
            super().detach().copy_(self._distributed_as_this(value) if is_whole else value)

    def _refuse_memory(self, *_args: object, **_kwargs: object) -> NoReturn:
        sharding = sharding_of(self)
        raise ShardedTensorError(
            f"{'a shard' if sharding is None else sharding.name}: only the local tensor has "
            "memory; pass .to_local(), or .full_tensor() for the whole tensor"
        )

    # In a DTensor, torch would read at address 0.
    __dlpack__ = __dlpack_device__ = share_memory_ = _refuse_memory

    def _distributed_as_this(self, whole: Tensor) -> Tensor:
        mesh, placements = self.device_mesh, self.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    def detach(self) -> Tensor:
        """A tensor of the same class, which `nn.Parameter` requires."""
        detached: Any = super().detach()
        if type(detached) is DTensor:
            detached.__class__ = AssignableDTensor
        return self._remembered(detached) if isinstance(self, nn.Parameter) else detached

    def _remembered(self, alias: DTensor) -> DTensor:
        """``alias``, which keeps its values when ``.data`` is assigned, as with plain tensors."""
        local = alias._local_tensor
        if not torch.compiler.is_compiling() and type(local) is Tensor:
            given = vars(self).setdefault(_ALIASES, [])
            given.append(weakref.ref(local))
            if len(given).bit_count() == 1:  # seldom, as there may be many
                given[:] = [one for one in given if one() is not None]
        return alias

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> "AssignableDTensor":
        """A tensor of the same class, which torch.compile requires."""
        unflattened: Any = DTensor.__tensor_unflatten__(*parts)  # type: ignore[no-untyped-call]
        unflattened.__class__ = AssignableDTensor
        return cast("AssignableDTensor", unflattened)

    def as_plain(self, *, keeps_local: bool = False) -> DTensor:
        """A plain DTensor with the same memory and attributes."""
        plain = super().detach().requires_grad_(self.requires_grad)
        vars(plain).update(vars(self))
        vars(plain).pop(_ALIASES, None)
        assert isinstance(plain, DTensor)
        if keeps_local:  # which a parameter may remember
            plain._local_tensor = self._local_tensor
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain DTensor."""
        return self.as_plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if type(self) is not AssignableDTensor:
            copied: Tensor = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
            return copied
        if id(self) not in memo:
            copied = copy.deepcopy(self.as_plain(), memo)
            copied.__class__ = AssignableDTensor
            copied.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return cast("Tensor", memo[id(self)])


AssignableDTensor.__name__ = "DTensor"  # by which programs recognize parameters to gather
use_foreach_for(AssignableDTensor)


@dataclass(frozen=True, eq=False)
class Sharding(ABC):
    """How a parameter, its gradient and its optimizer state are distributed over ranks.

    `RunSharding` distributes runs of elements, `ChunkSharding` chunks of a dim, and
    `ExtendedSharding` chunks of tensor classes that define their own gather.
    """

    layout: Layout
    extent: ParameterExtent
    mesh: DataParallelMesh
    label: str  # the same on all ranks, even if they name the parameter differently
    unit: str  # the label of its unit
    dense_spec: DTensorSpec | None = None  # set if the parameter was already a DTensor
    module: Callable[[], nn.Module | None] | None = None  # a weak reference to the unit
    local_gradients: tuple[Placement, ...] | None = None  # see `mark_as_local`
    _specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)

    carries_attributes: ClassVar[bool] = True  # those of the sharded and dense parameter are equal
    _uses_groups: ClassVar[bool]  # whether torch's operators run collectives on these tensors

    @abstractmethod
    def wrap(self, local: Tensor) -> DTensor:
        """Make the distributed tensor of which this rank stores ``local``, 1-D."""

    @abstractmethod
    def part_of(self, whole: Tensor, shard: int) -> Tensor:
        """The part of ``whole`` that the rank of ``shard`` stores."""

    @abstractmethod
    def has_same_cuts(self, other: "Sharding") -> bool:
        """Whether every shard holds the same elements in both."""

    @abstractmethod
    def describes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is distributed in this way."""

    @property
    @abstractmethod
    def _inner_placement(self) -> Placement:
        """The placement on the mesh dimension over which parameters are sharded."""

    @property
    def name(self) -> str:
        return self.extent.parameter.name

    def own_part_of(self, whole: Tensor) -> Tensor:
        """The part of ``whole`` that this rank stores."""
        return self.part_of(whole, self.mesh.rank)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.extent.parameter.shape)

    @cached_property
    def tensor_parallel(self) -> DTensorSpec | None:
        """``dense_spec`` without the dims that ``mesh`` covers; None if no dim is left."""
        spec, taken = self.dense_spec, self.mesh.dims
        if spec is None or not taken:
            return spec
        dims = zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=True)
        kept = {name: placement for name, placement in dims if name not in taken}
        if not kept:
            return None
        mesh = spec.mesh[tuple(kept)]
        return DTensorSpec(mesh, tuple(kept.values()), tensor_meta=spec.tensor_meta)

    def attach_to(self, parameter: Tensor) -> None:
        """Make `sharding_of` return this object for ``parameter``."""
        vars(parameter)[_SHARDING] = self
        if type(parameter) is DTensor:
            parameter.__class__ = AssignableDTensor

    def wrap_gradient(self, local: Tensor) -> DTensor:
        """Make the distributed gradient of which this rank stores ``local``, 1-D."""
        gradient = self.wrap(local)
        if type(gradient) is DTensor:
            gradient.__class__ = AssignableDTensor
        return gradient

    def attach_if_described(self, parameter: Tensor) -> None:
        """Attach to ``parameter`` if it has no sharding and is distributed in this way."""
        if sharding_of(parameter) is None and self.describes(parameter):
            self.attach_to(parameter)

    def empty(self, dtype: torch.dtype, device: torch.device) -> DTensor:
        """A tensor with undefined values."""
        num_owned = self.layout.num_owned(self.extent, self.mesh.rank)
        return self.wrap(torch.empty(num_owned, dtype=dtype, device=device))

    def take_over(self, replacement: Tensor, local: Tensor) -> Tensor:
        """Return the local tensor of a parameter that replaces the one with ``local``.

        It has the memory of ``local``, which then has its values in memory of its own: other code
        may hold it, for example in a parameter that was exchanged with one of another model.
        """
        assert isinstance(replacement, DTensor)
        before = local_of(replacement)
        assert (before.shape, before.dtype) == (local.shape, local.dtype)
        if before.data_ptr() == local.data_ptr():  # `Module.to` that changes nothing
            replacement._local_tensor = local
            return local
        if BEFORE_USE in vars(local):
            vars(local).pop(BEFORE_USE)()
        with torch.inference_mode(mode=False), torch.no_grad():
            own = local.data
            set_versions([own], [local._version])
            local.data = local.clone()
            own.copy_(before)
        replacement._local_tensor = own
        return own

    def matches(self, other: "Sharding") -> bool:
        """Whether the same ranks store the same elements in both."""
        return self is other or (
            self.mesh.has_same_shards(other.mesh)
            and self.shape == other.shape
            and self.has_same_cuts(other)
        )

    def copy_of(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """A deep copy of ``tensor``, for `copy.deepcopy`."""
        if id(tensor) not in memo:
            new: Tensor = self.wrap(self.copy_of_local(tensor))
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                self.attach_to(new)
            memo[id(tensor)] = new
        known: Tensor = memo[id(tensor)]
        return known

    def copy_of_local(self, tensor: Tensor) -> Tensor:
        """A copy of this rank's part of ``tensor``, to pass to `wrap`."""
        return local_of(tensor).detach().clone().reshape(-1)

    def dense(self, local: Tensor) -> Tensor:
        """The parameter that modules compute with, in the memory of ``local``."""
        return local

    def local_of_dense(self, dense: Tensor) -> Tensor:
        """The local tensor of a dense parameter or gradient, the inverse of `dense`."""
        return dense

    def local_of_gradient(self, gradient: Tensor) -> Tensor:
        """The local tensor of a gradient of the dense parameter."""
        return self.local_of_dense(gradient)

    def spec(self, local: Tensor) -> DTensorSpec:
        """The DTensorSpec of a tensor of which this rank stores ``local``."""
        known = self._specs.get(local.dtype)
        if known is None:
            known = self._specs[local.dtype] = self._new_spec(local)
        return known

    def _new_spec(self, local: Tensor) -> DTensorSpec:
        strides = torch.empty(self.shape, device="meta").stride()
        meta = TensorMeta(self.shape, strides, local.dtype)
        mesh = self.mesh.device_mesh(local.device.type, has_groups=self._uses_groups)
        return DTensorSpec(mesh, self._placements(mesh.ndim), tensor_meta=meta)

    def _placements(self, num_dims: int) -> tuple[Placement, ...]:
        is_cut = self.mesh.size > 1 or self.mesh.num_ranks == 1
        inner: Placement = self._inner_placement if is_cut else Replicate()
        outer = inner if self.mesh.is_two_level else Replicate()
        return (outer, inner)[-num_dims:]

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Sharding":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, because process groups cannot be pickled: a loaded parameter has none."""
        return type(None), ()


class ChunkSharding(Sharding):
    """Distributes a parameter by chunks of a dim, in torch's own DTensors, as FSDP2 does.

    With tensor parallelism, ``extent`` describes this rank's tensor-parallel part.
    """

    _uses_groups = True

    @property
    def shape(self) -> torch.Size:
        return super().shape if self.tensor_parallel is None else self.tensor_parallel.shape

    def _new_spec(self, local: Tensor) -> DTensorSpec:
        inner = self.tensor_parallel
        if inner is None:
            return super()._new_spec(local)
        outer = self.mesh.device_mesh(local.device.type, has_groups=True)
        num_inner = prod(
            inner.mesh.size(i)
            for i, placement in enumerate(inner.placements)
            if isinstance(placement, Shard) and placement.dim == self._dim
        )
        placements = [
            strided_shard(self._dim, num_inner) if num_inner > 1 and each.is_shard() else each
            for each in self._placements(outer.ndim)
        ]
        meta = TensorMeta(self.shape, inner.stride, local.dtype)
        mesh = joined_mesh(outer, inner.mesh)
        return DTensorSpec(mesh, (*placements, *inner.placements), tensor_meta=meta)

    def dense(self, local: Tensor) -> Tensor:
        before = self.dense_spec
        if before is None or self.local_gradients is not None:
            return local
        meta = TensorMeta(self.shape, before.stride, local.dtype)
        spec = DTensorSpec(before.mesh, before.placements, tensor_meta=meta)
        return new_dtensor(DTensor, local, spec)

    def local_of_dense(self, dense: Tensor) -> Tensor:
        spec = self.dense_spec
        if spec is None or not isinstance(dense, DTensor):
            return dense
        taken, names = self.mesh.dims, spec.mesh.mesh_dim_names or ()
        # A gradient may consist of partial sums. Partial sums over the ranks of `mesh` are kept
        # here, because they are reduced with the shards.
        wanted = tuple(
            dense.placements[dim] if taken and names[dim] in taken else placement
            for dim, placement in enumerate(spec.placements)
        )
        if dense.placements != wanted:
            reduce_dtype = getattr(torch, self.layout.cast.reduce_dtype)
            dense = cast("DTensor", dense.to(reduce_dtype)).redistribute(spec.mesh, wanted)
        local = dense._local_tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def local_of_gradient(self, gradient: Tensor) -> Tensor:
        if self.local_gradients is not None:
            assert self.dense_spec is not None
            mesh = self.dense_spec.mesh
            gradient = DTensor.from_local(gradient, mesh, self.local_gradients, run_check=False)
        return self.local_of_dense(gradient)

    def wrap(self, local: Tensor) -> DTensor:
        if local.storage_offset():
            local = _with_own_storage(local)
        chunk = local.view(self._own_shape)
        return new_dtensor(DTensor, chunk, self.spec(chunk))

    @cached_property
    def _own_shape(self) -> tuple[int, ...]:
        return chunk_shape(self.extent.parameter, self.mesh.size, self.mesh.rank)

    def part_of(self, whole: Tensor, shard: int) -> Tensor:
        run = chunk_of(whole.shape[self._dim], self.mesh.size, shard)
        return whole.narrow(self._dim, run.start, len(run))

    def has_same_cuts(self, other: Sharding) -> bool:
        same_size = self.mesh.size == other.mesh.size
        return isinstance(other, ChunkSharding) and self._dim == other._dim and same_size

    def describes(self, tensor: Tensor) -> bool:
        spec = next(iter(self._specs.values()))
        return isinstance(tensor, DTensor) and (
            (tensor.shape, tensor.device_mesh, tensor.placements)
            == (self.shape, spec.mesh, spec.placements)
        )

    @property
    def _dim(self) -> int:
        return chunk_dim(self.extent.parameter)

    @property
    def _inner_placement(self) -> Placement:
        return Shard(self._dim)


class ExtendedSharding(ChunkSharding):
    """Distributes chunks of the parameter's own class; gradients and states are plain tensors."""

    carries_attributes = False  # those of these classes are their tensors

    def wrap(self, local: Tensor) -> DTensor:
        if type(local) is Tensor:
            return super().wrap(local)
        return new_dtensor(DTensor, local, self.spec(local))

    def stored_part_of(self, whole: Tensor) -> DTensor:
        """This rank's part of ``whole``, cut with the operations that FSDP2 requires of a class."""
        size, rank = self.mesh.size, self.mesh.rank
        chunks = torch.chunk(whole.detach(), size, dim=self._dim)
        local = whole.new_zeros(chunks[0].shape)
        length = chunks[rank].shape[self._dim] if rank < len(chunks) else 0
        if length:
            local.narrow(self._dim, 0, length).copy_(chunks[rank])
        return self.wrap(local.narrow(self._dim, 0, length))

    def take_over(self, replacement: Tensor, local: Tensor) -> Tensor:  # noqa: ARG002
        return local_of(replacement)

    def copy_of_local(self, tensor: Tensor) -> Tensor:
        return copy.deepcopy(local_of(tensor).detach())


def _with_own_storage(flat: Tensor) -> Tensor:
    """View the same memory through a separate Storage: DTensors with an offset cannot be pickled.

    A slice of a Storage is a Storage that begins at that offset and keeps the whole one alive.
    """
    if flat.is_meta or not flat.numel():
        return flat.new_empty(flat.shape)
    start = flat.storage_offset() * flat.itemsize
    part: Any = flat.untyped_storage()[start : start + flat.nbytes]
    return flat.new_empty(0).set_(part, 0, flat.shape, (1,))


def is_tensor_parallel(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a DTensor that `fully_shard` has not sharded."""
    return isinstance(parameter, DTensor) and sharding_of(parameter) is None


def mark_as_local(parameter: Tensor, gradients: Sequence[Placement]) -> None:
    """Let modules compute with the local tensor of a DTensor, whose gradient is a plain tensor.

    ``gradients`` are the placements of that gradient on the mesh of ``parameter``.
    """
    vars(parameter)[_LOCAL] = tuple(gradients)


def dense_form_of(parameter: DTensor) -> tuple[DTensorSpec, tuple[Placement, ...] | None]:
    """The spec of a DTensor that is not sharded yet, and what `mark_as_local` has noted."""
    return parameter._spec, vars(parameter).get(_LOCAL)


def sharding_of(parameter: Tensor) -> Sharding | None:
    """How `fully_shard` has sharded ``parameter``; None if it has not."""
    found = vars(parameter).get(_SHARDING)
    assert found is None or isinstance(found, Sharding)
    return found


def mesh_of(parameters: Iterable[Tensor]) -> DataParallelMesh | None:
    """The largest mesh that shards any of ``parameters``; None if none is sharded.

    Experts have smaller meshes than the model around them.
    """
    found = (sharding_of(parameter) for parameter in parameters)
    meshes = (sharding.mesh for sharding in found if sharding is not None)
    return max(meshes, key=lambda mesh: mesh.num_ranks, default=None)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor object of a DTensor; ``to_local()`` may return a view of it.

    It first calls what the attribute `BEFORE_USE` holds, once: with ``step="device"`` of
    `CPUOffloadPolicy`, the host waits for a copy. Other tensors are returned as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    if BEFORE_USE in vars(local):
        vars(local).pop(BEFORE_USE)()
    return local
