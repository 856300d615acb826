"""FSDP2's all-gather extensions, of parameters that are tensor subclasses.

``fsdp_pre_all_gather`` makes plain tensors of what a rank stores, a tensor of such a class, and
``fsdp_post_all_gather`` builds the parameter that modules compute with from the gathered ones. So
torchao gathers float8 weights in a byte for each element, and NF4 ones in half a byte::

    local    of the class, [rows / world_size, ...]
    inputs   plain                                      <- fsdp_pre_all_gather(local)
    flat     uint8 [world_size * B], one slot for each rank, with all inputs of a unit
    outputs  plain, [world_size * rows of an input, ...]
    dense    the parameter, autograd's leaf             <- fsdp_post_all_gather(outputs)

Autograd saves ``dense`` or views of it, so it is made once and filled again: the storages of the
outputs, and of other tensors that the class names, are emptied and get memory again.
A class without these methods is gathered as a plain tensor.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.plan.chunks import chunk_dim, chunk_shape
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime import hooks
from shardwise.runtime.memory import aligned
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import FlatParameters
from shardwise.schedule.events import EventKind
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharding import local_of
from shardwise.transport.api import Work
from shardwise.transport.communicator import Collectives
from shardwise.transport.device import copy_

__all__ = ["ExtendedParameters"]

_NUM_ARGUMENTS = 5  # of fsdp_pre_all_gather; with one, it takes the mesh alone


class ExtendedParameters(FlatParameters):
    """Parameters of one dtype whose classes define what is gathered."""

    def _allocate(self) -> None:
        self._flat: Tensor | None = None  # uint8 [world_size * B], from the gather to its end
        self._is_gathered = False
        self._stays_gathered = False  # after `release_hold`
        self._callbacks: dict[int, Callable[[], None]] = {}

    @cached_property
    def extensions(self) -> "list[_Extension]":
        device, precision = self._pools.own.device, self._plan.precision
        return [_Extension(one, self.mesh, precision, device) for one in self.parameters]

    @property
    def views(self) -> tuple[Tensor, ...]:
        return ()

    def listen(self, position: int, callback: Callable[[], None]) -> None:
        self._callbacks[position] = callback

    def expect(self, kind: EventKind) -> None:
        """The classes decide what they gather, so nothing is planned."""

    def launch_gather(self, collectives: Collectives, label: str) -> Work:
        self.reclaim_locals()
        with torch.no_grad():
            inputs = [one for extension in self.extensions for one in extension.inputs()]
        *offsets, slot_bytes = accumulate((aligned(one.num_bytes) for one in inputs), initial=0)
        owner = f"inputs of {self.parameters[0].name}"
        shards = self.mesh.shards
        flat = self._pools.own.allocate_tensor(shards.size * slot_bytes, torch.uint8, owner)
        self._flat = flat
        own = flat.view(shards.size, slot_bytes)[shards.index]
        fill = partial(_fill, own, list(zip(offsets, inputs, strict=True)))
        return collectives.all_gather(flat, shards, label, fill)

    def finish_gather(self) -> None:
        """Make the dense parameters from the gathered inputs."""
        assert self._flat is not None
        num_ranks = self.mesh.shards.size
        slots = self._flat.view(num_ranks, len(self._flat) // num_ranks)
        offset = 0
        with torch.no_grad():
            for position, extension in enumerate(self.extensions):
                before = extension.parameter.dense
                offset = extension.fill(slots, offset)
                if extension.parameter.dense is not before and position in self._callbacks:
                    hooks.on_gradient(extension.parameter.dense, self._callbacks[position])
        self._free_flat()
        self._is_gathered = True

    def free(self) -> None:
        if self._flat is not None:
            self._free_flat()
        if self._is_gathered:
            self._is_gathered = False
            for extension in self.extensions:
                extension.empty()

    def launch_subgroup_part(self, collectives: Collectives, label: str) -> None:
        """All ranks gather them again."""

    def launch_hold(self, collectives: Collectives, label: str) -> Work:
        self._stays_gathered = self._is_gathered
        return self.launch_gather(collectives, label)

    def use_held(self) -> None:
        self.finish_gather()
        for parameter in self.parameters:
            parameter.use_unsharded()

    def held_parameters(self) -> Iterator[tuple[FSDPParameter, Tensor]]:
        """None: gathered parameters cannot be written to the shards, so they must not change."""
        for parameter in self.parameters:
            if parameter.owners[0].get() is not parameter.dense or parameter.forget_changes():
                raise PlanError(
                    f"{parameter.name}: a {type(local_of(parameter.sharded)).__name__} cannot be "
                    "changed in sw.gathered(write_back=True); change it before fully_shard"
                )
        return iter(())

    def release_hold(self, *, write_back: bool) -> None:  # noqa: ARG002
        if not self._stays_gathered:
            self.free()
        self._stays_gathered = False

    def free_subgroup_part(self) -> None:
        """There is none."""

    def _free_flat(self) -> None:
        assert self._flat is not None
        self._pools.own.free(self._flat.untyped_storage())
        self._flat = None


@dataclass(frozen=True, slots=True)
class _Input:
    """What a rank sends of one tensor: as many elements as every other rank does."""

    tensor: Tensor  # it may be shorter along `dim`, where it is the last chunk
    shape: tuple[int, ...]  # in the slot of each rank
    dim: int  # along which the inputs of ranks make up the output

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.tensor.itemsize

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype, int]:
        return self.shape, self.tensor.dtype, self.dim


class _Output:
    """The inputs of all ranks in one tensor, whose memory comes and goes."""

    def __init__(self, of: _Input, num_ranks: int, device: torch.device) -> None:
        shape = list(of.shape)
        shape[of.dim] *= num_ranks
        self.tensor = torch.empty(shape, dtype=of.tensor.dtype, device=device)
        self._dim = of.dim
        *outer, last = of.shape
        self._slot_shape = (*outer, last * of.tensor.itemsize)  # in bytes
        # `.data` has its own version counter, so autograd does not see that it is filled again.
        self._bytes = self.tensor.view(torch.uint8).data

    def fill(self, slots: Tensor, offset: int) -> None:
        """Copy from ``slots`` [ranks, B], where the input of each rank is at ``offset``."""
        length, num_bytes = self._slot_shape[self._dim], prod(self._slot_shape)
        for rank, slot in enumerate(slots):
            part = self._bytes.narrow(self._dim, rank * length, length)
            copy_(part, slot[offset : offset + num_bytes].view(self._slot_shape))


class _Extension:
    """One parameter: its inputs and outputs, and the tensors that its class made from them."""

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
        self._metadata: Any = None
        self._inputs: list[_Input] = []  # of the last gather
        self._outputs: list[_Output] = []
        self._kinds: list[tuple[tuple[int, ...], torch.dtype, int]] = []  # of `_outputs`
        # Storages of outputs, and of the other tensors that the class has made, with their bytes.
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def inputs(self) -> list[_Input]:
        """What this rank sends."""
        self._inputs = [self._as_input(tensor) for tensor in self._before_gather()]
        return self._inputs

    def fill(self, slots: Tensor, offset: int) -> int:
        """Make the dense parameter of ``slots`` [ranks, B] from ``offset`` on; where they end."""
        is_new = not self._storages or self._kinds != [one.kind for one in self._inputs]
        if is_new:
            num_ranks = self._mesh.shards.size
            self._outputs = [_Output(one, num_ranks, self._device) for one in self._inputs]
            self._kinds = [one.kind for one in self._inputs]
        for storage, num_bytes in () if is_new else self._storages:
            storage.resize_(num_bytes)
        for one, output in zip(self._inputs, self._outputs, strict=True):
            output.fill(slots, offset)
            offset += aligned(one.num_bytes)
        outputs = tuple(output.tensor for output in self._outputs)
        after_gather = getattr(self._local, "fsdp_post_all_gather", None)
        if is_new:
            self._make_dense(outputs, after_gather)
        elif after_gather is not None:
            after_gather(outputs, self._metadata, self._dtype, out=self.parameter.dense)
        self._metadata, self._inputs = None, []
        self.parameter.forget_changes()
        return offset

    def empty(self) -> None:
        """Free the memory of the dense parameter."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def _make_dense(self, outputs: Sequence[Tensor], after_gather: Any) -> None:
        if after_gather is None:
            made, others = outputs[0], ()
        else:
            made, others = after_gather(tuple(outputs), self._metadata, self._dtype)
        storages = [one.untyped_storage() for one in (*outputs, *others)]
        by_address = {storage.data_ptr(): storage for storage in storages}
        self._storages = [(one, one.nbytes()) for one in by_address.values()]
        whole = torch.as_strided(made, self._size, self._stride, storage_offset=0)
        dense = self.parameter.sharding.dense(whole)
        trainable = self.parameter.sharding.extent.parameter.trainable
        self.parameter.dense = nn.Parameter(dense, requires_grad=trainable)

    def _before_gather(self) -> Sequence[Tensor]:
        local = self._local
        if local.device != self._device:  # it is on the host
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

    def _as_input(self, tensor: Tensor) -> _Input:
        shape = tuple(tensor.shape) or (1,)
        if shape == tuple(self._local.shape):
            return _Input(tensor, self._chunk_shape, self._dim)
        return _Input(tensor, shape, self._dim if shape == self._chunk_shape else 0)

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


def _fill(own: Tensor, inputs: Sequence[tuple[int, _Input]]) -> None:
    """Write this rank's inputs into its slot [B]."""
    with torch.no_grad():
        for offset, one in inputs:
            slot = own[offset : offset + one.num_bytes].view(one.tensor.dtype).view(one.shape)
            tensor = one.tensor if one.tensor.dim() else one.tensor.view(1)
            slot.narrow(one.dim, 0, tensor.shape[one.dim]).copy_(tensor)
