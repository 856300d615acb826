"""The bytes that a rank holds, by category."""

import contextlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwise._private import has_saved_tensors_hooks
from shardwise.features.activation_offload import Unmoved, storage_of, unpack
from shardwise.runtime.engine import Runtime
from shardwise.runtime.unit import FlatParameters
from shardwise.tensor.sharding import local_of
from shardwise.transport.device import allocated_bytes, is_accelerator

__all__ = ["HeldBytes", "MemoryMeter"]


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What a `MemorySample` says, without its time."""

    shards: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int


class MemoryMeter:
    """Measures the memory of one model on its device; what is on the host does not count.

    On an accelerator, activations are all that the allocator has given to others. On the CPU they
    are what autograd saves within a forward of the model: not what the loss saves after it, nor
    anything while hooks of the user decide what is saved.
    """

    def __init__(
        self, model: nn.Module, runtime: Runtime, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._device = runtime.pools.device
        self._pools = runtime.pools
        self._flats = [flat for unit in runtime.units for flat in unit.flats]
        self._optimizer = optimizer
        shards = [flat.shard for flat in self._flats]
        copies = sum(unit.plan.device_copy_bytes for unit in runtime.units)
        self._shard_bytes = self._bytes_of(*shards) + copies
        self._buffer_bytes = self._bytes_of(*model.buffers())
        self._optimizer_bytes = 0
        views = [view for flat in self._flats for view in flat.views[:1]]
        parameters = [local_of(p) if isinstance(p, DTensor) else p for p in model.parameters()]
        self._saved: SavedTensors | None = None
        if not is_accelerator(self._device):
            self._saved = SavedTensors([*views, *shards, *parameters, *model.buffers()])

    def step_begins(self) -> None:
        """Measure what changes little within a step."""
        state = {} if self._optimizer is None else self._optimizer.state
        values = [value for one in state.values() for value in one.values()]
        tensors = [
            local_of(value) if isinstance(value, DTensor) else value
            for value in values
            if isinstance(value, Tensor)
        ]
        self._optimizer_bytes = self._bytes_of(*tensors)

    def forward_began(self) -> None:
        if self._saved is not None:
            self._saved.begin()

    def forward_ended(self) -> None:
        if self._saved is not None:
            self._saved.end()

    def sample(self, gathered_bytes: int) -> HeldBytes:
        """What is held now."""
        pools = self._pools
        shards = sum(map(self._gradient_bytes_of, self._flats))
        buffers = pools.gradients.allocated_bytes + pools.outer_gradients.allocated_bytes
        if self._saved is not None:
            activations = self._saved.num_bytes
        else:
            known = self._shard_bytes + self._buffer_bytes + self._optimizer_bytes + shards
            known += sum(pool.held_bytes for pool in pools)
            activations = max(0, allocated_bytes(self._device) - known)
        return HeldBytes(
            shards=self._shard_bytes,
            gathered=gathered_bytes,
            gradients=buffers + shards,
            optimizer=self._optimizer_bytes,
            activations=activations,
            buffers=self._buffer_bytes,
        )

    def _gradient_bytes_of(self, flat: FlatParameters) -> int:
        if flat.gradients is None:
            return 0
        current = flat.gradients.shard.current
        if current is not None:
            return self._bytes_of(current)
        # Those of all parameters are one tensor, unless the user set some.
        gradients = (parameter.sharded.grad for parameter in flat.parameters)
        first = next((one for one in gradients if one is not None), None)
        return 0 if first is None else self._bytes_of(local_of(first))

    def _bytes_of(self, *tensors: Tensor) -> int:
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.device == self._device
        }
        return sum(storages.values())


class SavedTensors:
    """The storages that autograd has saved in some forwards, as long as they live."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._others = {storage_of(tensor) for tensor in others}  # they count elsewhere
        self._alive: dict[int, int] = {}  # bytes by storage
        self._within = contextlib.ExitStack()

    @property
    def num_bytes(self) -> int:
        return sum(self._alive.values())

    def begin(self) -> None:
        """Count what is saved from now on, unless hooks of others decide what is saved."""
        self.end()  # of a forward that raised
        if torch.is_grad_enabled() and not has_saved_tensors_hooks():
            self._within.enter_context(saved_tensors_hooks(self._pack, unpack))

    def end(self) -> None:
        self._within.close()

    def _pack(self, tensor: Tensor) -> Unmoved:
        storage = tensor.untyped_storage()
        identity = storage_of(tensor)
        if identity not in self._others and identity not in self._alive:
            self._alive[identity] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, identity).atexit = False
        return Unmoved(tensor, tensor._version)
