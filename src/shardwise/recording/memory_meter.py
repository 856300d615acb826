"""Measures the bytes that a rank holds, by category."""

import contextlib
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwise._private import has_saved_tensors_hooks, storage_id
from shardwise.comm.device import is_accelerator
from shardwise.features.activation_offload import Unmoved, unpack
from shardwise.local_devices import allocated_bytes
from shardwise.recording.format import HeldBytes
from shardwise.runtime.engine import Runtime
from shardwise.runtime.unit import FlatParameters
from shardwise.tensor.sharding import local_of

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Measures the memory of one model on its device; host memory does not count.

    On an accelerator, activations are everything allocated beyond the other categories. On the CPU
    they are the tensors that autograd saves within a forward of the model. Tensors that the loss
    saves afterwards do not count, nor does anything saved under the user's own saved-tensor hooks.
    """

    def __init__(
        self, model: nn.Module, runtime: Runtime, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._device = runtime.pools.device
        self._pools = runtime.pools
        self._flats = [flat for unit in runtime.units for flat in unit.flats]
        self._optimizer = optimizer
        shards = [flat.codec.shard for flat in self._flats]
        copies = sum(unit.plan.device_copy_bytes for unit in runtime.units)
        self._shard_bytes = self._bytes_of(*shards) + copies
        self._buffer_bytes = self._bytes_of(*model.buffers())
        self._optimizer_bytes = 0
        views = [view for flat in self._flats for view in flat.codec.buffer.views[:1]]
        parameters = map(local_of, model.parameters())
        self._saved: SavedTensors | None = None
        if not is_accelerator(self._device):
            self._saved = SavedTensors([*views, *shards, *parameters, *model.buffers()])

    def step_begins(self) -> None:
        """Measure the optimizer state, which changes little within a step."""
        state = {} if self._optimizer is None else self._optimizer.state
        owned = (own for own in state.values() if isinstance(own, dict))  # not MADGRAD's "k"
        values = [value for own in owned for value in own.values()]
        tensors = (value for value in values if isinstance(value, Tensor))
        self._optimizer_bytes = self._bytes_of(*map(local_of, tensors))

    def forward_began(self) -> None:
        if self._saved is not None:
            self._saved.begin()

    def forward_ended(self) -> None:
        if self._saved is not None:
            self._saved.end()

    def sample(self, gathered_bytes: int) -> HeldBytes:
        pools = self._pools
        shards = sum(map(self._gradient_bytes_of, self._flats))
        buffers = pools.of_gradients.allocated_bytes
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
        current = flat.gradients.kept_memory
        if current is not None:
            return self._bytes_of(current)
        # The gradients of all parameters share one storage, unless the user set some of them.
        gradients = (parameter.sharded.grad for parameter in flat.parameters)
        first = next((one for one in gradients if isinstance(one, DTensor)), None)
        return 0 if first is None else self._bytes_of(local_of(first))

    def _bytes_of(self, *tensors: Tensor) -> int:
        storages = {
            storage_id(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.device == self._device
        }
        return sum(storages.values())


class SavedTensors:
    """Counts the storages that autograd saves in some forwards, as long as they live."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        # Counted elsewhere.
        self._excluded = {storage_id(tensor.untyped_storage()) for tensor in excluded}
        self._alive: dict[int, int] = {}  # bytes by storage
        self._hooks = contextlib.ExitStack()

    @property
    def num_bytes(self) -> int:
        return sum(self._alive.values())

    def begin(self) -> None:
        """Start counting, unless other saved-tensor hooks are active."""
        self.end()  # in case the previous forward raised
        if torch.is_grad_enabled() and not has_saved_tensors_hooks():
            self._hooks.enter_context(saved_tensors_hooks(self._pack, unpack))

    def end(self) -> None:
        self._hooks.close()

    def _pack(self, tensor: Tensor) -> Unmoved:
        storage = tensor.untyped_storage()
        identity = storage_id(storage)
        if identity not in self._excluded and identity not in self._alive:
            self._alive[identity] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, identity).atexit = False
        return Unmoved(tensor.detach(), tensor._version)
