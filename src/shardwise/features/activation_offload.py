"""Offloading of activations to host memory until backward needs them.

Autograd saves two kinds of tensors: activations, which live until backward, and views of the units'
flat buffers, whose memory is allocated and freed with each gather. Only activations are moved;
copying the views would copy the whole model.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise._private import storage_id
from shardwise.comm.device import DeviceStream, DeviceWork, is_accelerator
from shardwise.errors import StepError
from shardwise.runtime.module import runtime_of_root

if TYPE_CHECKING:
    from shardwise.runtime.engine import Runtime

__all__ = ["Unmoved", "offload_activations", "unpack"]

_MIN_BYTES = 1 << 12  # copying a smaller tensor costs more than the memory is worth
# Streams to the host and back. Creating them synchronizes, so each model keeps its own.
_streams: "weakref.WeakKeyDictionary[Runtime, tuple[DeviceStream, DeviceStream]]" = (
    weakref.WeakKeyDictionary()
)
_IN_FLIGHT = 2  # copies to the host that may be in flight while forward continues


@contextlib.contextmanager
def offload_activations(model: nn.Module) -> Iterator[None]:
    """Move what forward saves for backward to host memory until backward needs it.

    ::

        with sw.offload_activations(model):
            loss = model(batch).mean()
        loss.backward()

    Tensors of a GPU are copied to pinned memory and back while the GPU computes; each copy back
    overlaps with the part of backward that uses the tensor after it. On a CPU they are copied too,
    for tests. Parameters stay on the device, as do tensors of less than 4 KiB.
    `torch.autograd.graph.save_on_cpu` gives the same gradients, but also copies every gathered
    unit. For checkpointed units only the inputs are moved, because the rest is recomputed. A rank
    may use this block without the others.

    Args:
        model: the root of a sharded model.

    Raises:
        PlanError: the model is not sharded, or is a unit inside a sharded model.
        StepError: in backward, if a tensor that was not moved has been changed in place since.
    """
    runtime = runtime_of_root(model)
    flats = [flat for unit in runtime.units for flat in unit.flats]
    buffers = {
        storage_id(view.untyped_storage()) for flat in flats for view in flat.codec.buffer.views[:1]
    }
    if runtime not in _streams:
        device = runtime.pools.device
        _streams[runtime] = DeviceStream(device), DeviceStream(device)
    mover = _Mover(runtime.pools.device, *_streams[runtime])

    def pack(tensor: Tensor) -> "_Moved | Unmoved":
        small = tensor.numel() * tensor.element_size() < _MIN_BYTES
        moves = tensor.device == mover.device and tensor.layout is torch.strided
        if small or not moves or storage_id(tensor.untyped_storage()) in buffers:
            return Unmoved(tensor.detach(), tensor._version)
        return mover.move(tensor)

    with saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            mover.finish()


@dataclass(frozen=True, slots=True)
class Unmoved:
    """A tensor that stays where it is, with the version to check in backward.

    Autograd does not check the versions of tensors that a hook has packed.
    """

    tensor: Tensor
    version: int


class _Mover:
    """Makes the copies of one `offload_activations` block, on one stream for each direction."""

    def __init__(
        self, device: torch.device, to_host: DeviceStream, to_device: DeviceStream
    ) -> None:
        self.device = device
        self._has_streams = is_accelerator(device)
        self._to_host, self._to_device = to_host, to_device
        self._leaving: deque[tuple[Tensor, DeviceWork]] = deque()  # tensors that are still read
        self._last: Callable[[], _Moved | None] = lambda: None

    def move(self, tensor: Tensor) -> "_Moved":
        """Start copying ``tensor`` to the host."""
        is_pinned = tensor.device.type != "cpu"
        copy = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned, requires_grad=False)
        with self._to_host.enqueue() as work:
            copy.copy_(tensor.detach(), non_blocking=True)
        if self._has_streams:
            self._leaving.append((tensor, work))
            self.finish(_IN_FLIGHT)
        moved = _Moved(self, copy, work, self._last)
        self._last = weakref.ref(moved)
        return moved

    def finish(self, num_remaining: int = 0) -> None:
        """Make later work wait for all copies to the host except the last ``num_remaining``."""
        while len(self._leaving) > num_remaining:
            _, work = self._leaving.popleft()
            work.wait_on_device()

    def copy_back(self, copy: Tensor, after: DeviceWork) -> tuple[Tensor, DeviceWork | None]:
        """Start copying ``copy`` back to the device after ``after``, the work that writes it."""
        if not self._has_streams:
            return copy, None
        tensor = torch.empty_like(copy, device=self.device)
        with self._to_device.enqueue(after) as work:
            tensor.copy_(copy, non_blocking=True)
        return tensor, work


@dataclass(eq=False)
class _Moved:
    """An offloaded tensor: a copy in host memory, and later one on the device."""

    mover: _Mover
    copy: Tensor
    work: DeviceWork  # writes the copy
    previous: "Callable[[], _Moved | None]"  # moved before this one; None once backward used it
    copied_back: tuple[Tensor, DeviceWork | None] | None = None

    def __del__(self) -> None:
        if self.copied_back is not None and self.copied_back[1] is not None:  # never used
            self.copied_back[1].wait_on_device()  # before the memory is reused

    def prefetch(self) -> None:
        """Start copying the tensor back, unless that has begun."""
        if self.copied_back is None:
            self.copied_back = self.mover.copy_back(self.copy, self.work)

    def take(self) -> Tensor:
        """Return the tensor on the device, and prefetch the one that backward needs next."""
        self.prefetch()
        previous = self.previous()
        if previous is not None:
            previous.prefetch()
        assert self.copied_back is not None
        (tensor, work), self.copied_back = self.copied_back, None
        if work is not None:
            work.wait_on_device()
        return tensor


def unpack(packed: _Moved | Unmoved) -> Tensor:
    """The tensor that was saved, for backward.

    Raises:
        StepError: the tensor has been changed in place since.
    """
    if isinstance(packed, _Moved):
        return packed.take()
    tensor = packed.tensor
    if tensor._version != packed.version:
        raise StepError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
            f"after it was saved (version {tensor._version}, expected {packed.version}); clone it "
            "before the in-place operation"
        )
    return tensor
