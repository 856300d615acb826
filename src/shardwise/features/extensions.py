"""FSDP2's all-gather extensions, for parameters that are tensor subclasses.

``fsdp_pre_all_gather`` turns a rank's part of a parameter, a tensor of the class, into plain
tensors. ``fsdp_post_all_gather`` builds the parameter that modules compute with from the gathered
tensors. torchao gathers float8 weights in one byte per element this way, and NF4 in half a byte::

    local    of the class, [rows / world_size, ...]
    inputs   plain                                      <- fsdp_pre_all_gather(local)
    flat     uint8 [world_size * B], one slot per rank, with all inputs of a unit
    outputs  plain, [world_size * rows of an input, ...]
    dense    the parameter, autograd's leaf             <- fsdp_post_all_gather(outputs)

Autograd saves ``dense`` or views of it, so ``dense`` is made once and filled again in each gather:
the storages of the outputs, and of other tensors that the class returns, are resized to 0 bytes and
back. A class without these methods is gathered as a plain tensor.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.device import copy_
from shardwise.errors import PlanError
from shardwise.plan.chunks import chunk_dim, chunk_shape
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.attach import put_sharded
from shardwise.runtime.codecs import SlotCodec
from shardwise.runtime.memory import Pool, aligned
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import FlatParameters
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharding import ExtendedSharding, Sharding, local_of, sharding_of

__all__ = ["ExtensionCodec", "stored_part_of"]

_NUM_ARGUMENTS = 5  # of fsdp_pre_all_gather; with one argument, it takes only the mesh


class ExtensionCodec(SlotCodec):
    """The codec of parameters of one dtype whose classes define what is gathered.

    It is its own buffer. ``flat`` exists from `acquire` to `unpack`, which makes the dense
    parameters; these have memory until `release`. Every parameter has a shard of its own.
    """

    can_split = False
    views = ()  # the classes decide what a parameter looks like

    def __init__(
        self,
        parameters: Sequence[FSDPParameter],
        mesh: DataParallelMesh,
        pool: Pool,
        precision: MixedPrecisionPolicy,
    ) -> None:
        self._parameters = parameters
        self._mesh = mesh
        self._pool = pool
        self._precision = precision
        self.shard = torch.empty(0, device=pool.device)
        self._flat: Tensor | None = None  # uint8 [world_size * B]
        self._is_unpacked = False

    @property
    def buffer(self) -> "ExtensionCodec":  # type: ignore[override] # no cycle of references
        return self

    @cached_property
    def _extensions(self) -> "list[_Extension]":
        device = self._pool.device
        return [_Extension(one, self._mesh, self._precision, device) for one in self._parameters]

    @property
    def flat(self) -> Tensor:
        assert self._flat is not None, "not acquired"
        return self._flat

    @property
    def is_acquired(self) -> bool:
        return self._flat is not None or self._is_unpacked

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""
        flat_bytes = 0 if self._flat is None else self._flat.nbytes
        return flat_bytes + sum(storage.nbytes() for storage in self.storages)

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        """The storages of the parameters, from the first gather on."""
        return tuple(one for extension in self._extensions for one, _ in extension.storages)

    def acquire(self) -> None:
        """Have the classes make their inputs, and allocate ``flat`` for those of all ranks."""
        slot_bytes = 0
        with torch.no_grad():
            for extension in self._extensions:
                slot_bytes = extension.make_inputs(slot_bytes)
        num_bytes = self._mesh.shards.size * slot_bytes
        name = f"inputs of {self._parameters[0].name}"
        self._flat = self._pool.allocate_tensor(num_bytes, torch.uint8, name)

    def slot_of(self, rank: int) -> Tensor:
        """The part [B] of ``flat`` that ``rank`` owns."""
        return self._slots()[rank]

    def fill(self, slot: Tensor) -> Callable[[], None]:
        """Return a function that writes this rank's inputs into ``slot`` [B]."""
        return partial(_fill, slot, [one for each in self._extensions for one in each.inputs])

    def unpack(self) -> None:
        """Make the dense parameters from the gathered inputs, and free ``flat``."""
        slots = self._slots()
        with torch.no_grad():
            for extension in self._extensions:
                extension.fill(slots)
        self._free_flat()
        self._is_unpacked = True

    def release(self) -> None:
        if self._flat is not None:
            self._free_flat()
        if self._is_unpacked:
            self._is_unpacked = False
            for extension in self._extensions:
                extension.empty()

    def pack(self) -> None:
        """Does nothing: no parameter is turned into inputs again."""

    def shared_buffer(self) -> None:
        """None: the memory is private."""

    def stored(self) -> Iterator[Tensor]:
        return (parameter.local for parameter in self._parameters)

    def adopt(
        self,
        root: nn.Module,
        original: nn.Parameter,
        sharding: Sharding,
        position: int,  # noqa: ARG002
    ) -> FSDPParameter:
        """Replace ``original`` by this rank's part of it, which keeps its class."""
        stored = stored_part_of(original, sharding)
        owners, sharded = put_sharded(root, original, sharding, stored)
        dense = nn.Parameter(torch.empty(0), requires_grad=False)  # until the first gather
        return FSDPParameter(sharding, sharded, local_of(sharded), dense, owners)

    def check_unchanged(self) -> None:
        for parameter in self._parameters:
            if parameter.owners[0].get() is not parameter.dense or parameter.forget_changes():
                raise PlanError(
                    f"{parameter.name}: a {type(local_of(parameter.sharded)).__name__} cannot be "
                    "changed in sw.gathered(write_back=True); change it before fully_shard"
                )

    def _slots(self) -> Tensor:
        """``flat`` as [world_size, B]."""
        return self.flat.view(self._mesh.shards.size, -1)

    def _free_flat(self) -> None:
        self._pool.free(self.flat.untyped_storage())
        self._flat = None


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor that a rank sends; every rank sends the same number of elements."""

    tensor: Tensor  # the last chunk may be shorter than `shape` along `dim`
    shape: tuple[int, ...]  # in each rank's slot
    dim: int  # along which the inputs of all ranks are concatenated
    offset: int  # in the slot, in bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.tensor.itemsize

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype, int]:
        return self.shape, self.tensor.dtype, self.dim


class _Output:
    """The inputs of all ranks in one tensor, which has memory only while it is gathered."""

    def __init__(self, of: _Input, num_ranks: int, device: torch.device) -> None:
        shape = list(of.shape)
        shape[of.dim] *= num_ranks
        self.tensor = torch.empty(shape, dtype=of.tensor.dtype, device=device)
        self.kind = of.kind
        # `.data` has its own version counter, so autograd does not notice the refill.
        in_bytes = self.tensor.view(torch.uint8).data
        outer, (length, *inner) = in_bytes.shape[: of.dim], in_bytes.shape[of.dim :]
        parts = in_bytes.view(*outer, num_ranks, length // num_ranks, *inner)
        self._parts = parts.movedim(of.dim, 0)  # [ranks, *shape of an input in bytes]

    def fill(self, slots: Tensor, offset: int) -> None:
        """Copy from ``slots`` [ranks, B], where each rank's input begins at ``offset``."""
        num_bytes = self._parts[0].numel()
        copy_(self._parts, slots[:, offset : offset + num_bytes].view(self._parts.shape))


class _Extension:
    """One parameter: its inputs and outputs, and the tensors that its class makes from them."""

    def __init__(
        self,
        parameter: FSDPParameter,
        mesh: DataParallelMesh,
        precision: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self.parameter = parameter
        self._mesh = mesh
        self._precision = precision
        self._device = device
        layout, spec = parameter.sharding.layout, parameter.sharding.extent.parameter
        self._dim = chunk_dim(spec)
        self._size = torch.Size(spec.shape)
        self._stride = torch.empty(self._size, device="meta").stride()
        self._chunk_shape = chunk_shape(spec, mesh.size, 0)
        self._dtype: torch.dtype = getattr(torch, layout.cast.compute_dtype)
        self.inputs: list[_Input] = []  # the tensors that this rank sends, until `fill`
        self._metadata: Any = None
        self._outputs: list[_Output] = []
        # Storages of the outputs and of other tensors that the class made, with their full sizes.
        self.storages: list[tuple[torch.UntypedStorage, int]] = []

    def make_inputs(self, offset: int) -> int:
        """Make ``inputs``, which begin at ``offset`` in a slot. Returns where they end.

        Raises:
            PlanError: the class returns other inputs than for the first gather.
        """
        self.inputs = []
        for tensor in self._before_gather():
            self.inputs.append(self._as_input(tensor, offset))
            offset += aligned(self.inputs[-1].num_bytes)
        found, first = ([one.kind for one in each] for each in (self.inputs, self._outputs))
        if self.storages and found != first:
            raise PlanError(
                f"{self.parameter.name}: fsdp_pre_all_gather of a {type(self._local).__name__} "
                f"returned (shape, dtype, dim) {found}, and for the first gather {first}; it has "
                "to return tensors of the same shapes and dtypes for every gather"
            )
        return offset

    def fill(self, slots: Tensor) -> None:
        """Make the dense parameter from the gathered inputs, ``slots`` [ranks, B]."""
        is_first = not self.storages
        if is_first:
            num_ranks = self._mesh.shards.size
            self._outputs = [_Output(one, num_ranks, self._device) for one in self.inputs]
        for storage, num_bytes in self.storages:
            storage.resize_(num_bytes)
        for one, output in zip(self.inputs, self._outputs, strict=True):
            output.fill(slots, one.offset)
        outputs = tuple(output.tensor for output in self._outputs)
        after_gather = getattr(self._local, "fsdp_post_all_gather", None)
        if is_first:
            self._make_dense(outputs, after_gather)
        elif after_gather is not None:
            after_gather(outputs, self._metadata, self._dtype, out=self.parameter.dense)
        self._metadata, self.inputs = None, []
        self.parameter.forget_changes()

    def empty(self) -> None:
        """Free the memory of the dense parameter."""
        for storage, _ in self.storages:
            storage.resize_(0)

    def _make_dense(self, outputs: Sequence[Tensor], after_gather: Any) -> None:
        if after_gather is None:
            made, others = outputs[0], ()
        else:
            made, others = after_gather(tuple(outputs), self._metadata, self._dtype)
        storages = [one.untyped_storage() for one in (*outputs, *others)]
        by_address = {storage.data_ptr(): storage for storage in storages}
        self.storages = [(one, one.nbytes()) for one in by_address.values()]
        whole = torch.as_strided(made, self._size, self._stride, storage_offset=0)
        dense = self.parameter.sharding.dense(whole)
        trainable = self.parameter.sharding.extent.parameter.trainable
        self.parameter.dense = nn.Parameter(dense, requires_grad=trainable)
        self.parameter.watch_gradient()

    def _before_gather(self) -> Sequence[Tensor]:
        local = self._local
        if local.device != self._device:  # offloaded
            local = local.to(self._device)
        before_gather = getattr(local, "fsdp_pre_all_gather", None)
        if (before_gather is None) != (getattr(local, "fsdp_post_all_gather", None) is None):
            raise PlanError(
                f"{self.parameter.name}: a {type(local).__name__} has one of fsdp_pre_all_gather "
                "and fsdp_post_all_gather; expected both, or neither"
            )
        if before_gather is None:
            return [local.to(self._dtype)]
        arguments: tuple[Any, ...] = (self._shard_mesh,)
        if len(inspect.signature(before_gather).parameters) == _NUM_ARGUMENTS:
            module = self.parameter.owners[0].module
            arguments += (self._size, self._stride, module, self._precision)
        inputs, self._metadata = before_gather(*arguments)
        return list(inputs)

    def _as_input(self, tensor: Tensor, offset: int) -> _Input:
        shape = tuple(tensor.shape) or (1,)
        if shape == tuple(self._local.shape):
            return _Input(tensor, self._chunk_shape, self._dim, offset)
        return _Input(tensor, shape, self._dim if shape == self._chunk_shape else 0, offset)

    @property
    def _local(self) -> Tensor:
        return local_of(self.parameter.sharded)

    @property
    def _shard_mesh(self) -> Any:
        mesh = self._mesh.device_mesh(self._device.type, has_groups=True)
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names is None:
            raise PlanError(
                f"{self.parameter.name}: fsdp_pre_all_gather gets the mesh of the shards, and the "
                "dims of this mesh have no names; pass mesh_dim_names to init_device_mesh"
            )
        return mesh[mesh.mesh_dim_names[-1]]


def stored_part_of(original: nn.Parameter, sharding: Sharding) -> DTensor:
    """This rank's part of ``original``, whose class defines all-gather extensions."""
    assert isinstance(sharding, ExtendedSharding)
    before = sharding_of(original)
    if before is None:
        return sharding.stored_part_of(local_of(original))
    assert before.has_same_cuts(sharding)
    return sharding.wrap(local_of(original))


def _fill(own: Tensor, inputs: Sequence[_Input]) -> None:
    """Write this rank's inputs into its slot [B]."""
    with torch.no_grad():
        for one in inputs:
            slot = own[one.offset : one.offset + one.num_bytes]
            tensor = one.tensor if one.tensor.dim() else one.tensor.view(1)
            part = slot.view(tensor.dtype).view(one.shape)
            part.narrow(one.dim, 0, tensor.shape[one.dim]).copy_(tensor)


FlatParameters.extension_codec = ExtensionCodec
