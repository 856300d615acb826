"""Activations that wait for backward in host memory.

What autograd saves is of two kinds: activations, which live until backward, and views of the
units' flat buffers, whose memory comes and goes with each gather. Only the first are worth moving;
a copy of the second would be a copy of the whole model.
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

from shardwise.errors import StepError
from shardwise.runtime.module import runtime_of_root
from shardwise.transport.device import DeviceStream, DeviceWork, is_accelerator

if TYPE_CHECKING:
    from shardwise.runtime.engine import Runtime

__all__ = ["Left", "offload_activations", "storage_of", "unpack"]

_WORTH_BYTES = 1 << 12  # a copy of less takes longer than its memory matters
# To the host and back. To make them takes a synchronization, so a model keeps them.
_streams: "weakref.WeakKeyDictionary[Runtime, tuple[DeviceStream, DeviceStream]]" = (
    weakref.WeakKeyDictionary()
)
_IN_FLIGHT = 2  # tensors that may be on their way to the host while forward goes on


@contextlib.contextmanager
def offload_activations(model: nn.Module) -> Iterator[None]:
    """Within it, what forward saves for backward is moved to host memory until backward needs it.

    ::

        with sw.offload_activations(model):
            loss = model(batch).mean()
        loss.backward()

    From a GPU the copies go to pinned memory and back while the GPU computes, each on the way back
    while backward uses the one after it; on a CPU they are copies as well, for tests. Parameters
    stay where they are, unlike with `torch.autograd.graph.save_on_cpu`, which gives the same
    gradients but also keeps a copy of every unit as it was gathered; so do tensors of less than
    4 KiB. Of units that are checkpointed only the inputs are moved, for the rest is computed again.

    Args:
        model: the root, sharded. Ranks need not agree on it.

    Raises:
        PlanError: the model is not sharded, or is a unit inside one that is.
        StepError: in backward, if a tensor that was not moved has been changed in place since.
    """
    runtime = runtime_of_root(model)
    buffers = {
        storage_of(view) for unit in runtime.units for flat in unit.flats for view in flat.views[:1]
    }
    if runtime not in _streams:
        device = runtime.pools.device
        _streams[runtime] = DeviceStream(device), DeviceStream(device)
    mover = _Mover(runtime.pools.device, *_streams[runtime])

    def pack(tensor: Tensor) -> "_Moved | Left":
        small = tensor.numel() * tensor.element_size() < _WORTH_BYTES
        moves = tensor.device == mover.device and tensor.layout is torch.strided
        if small or not moves or storage_of(tensor) in buffers:
            return Left(tensor, tensor._version)
        return mover.move(tensor)

    with saved_tensors_hooks(pack, unpack):
        try:
            yield
        finally:
            mover.finish()


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor that stays where it is. Autograd does not watch what a hook has packed."""

    tensor: Tensor
    version: int


class _Mover:
    """Copies of one `offload_activations`, in each direction on a stream of its own."""

    def __init__(
        self, device: torch.device, to_host: DeviceStream, to_device: DeviceStream
    ) -> None:
        self.device = device
        self._has_streams = is_accelerator(device)
        self._to_host, self._to_device = to_host, to_device
        self._leaving: deque[tuple[Tensor, DeviceWork]] = deque()  # whose memory is still read
        self._last: Callable[[], _Moved | None] = lambda: None

    def move(self, tensor: Tensor) -> "_Moved":
        """Begin to copy ``tensor`` to the host."""
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

    def finish(self, num_left: int = 0) -> None:
        """Have what is queued from now on wait for all copies to the host but the last ones."""
        while len(self._leaving) > num_left:
            _, work = self._leaving.popleft()
            work.wait_on_device()

    def bring(self, copy: Tensor, after: DeviceWork) -> tuple[Tensor, DeviceWork | None]:
        """Begin to copy ``copy`` back to the device, when ``after`` has made it."""
        if not self._has_streams:
            return copy, None
        tensor = torch.empty_like(copy, device=self.device)
        with self._to_device.enqueue(after) as work:
            tensor.copy_(copy, non_blocking=True)
        return tensor, work


class _Moved:
    """A copy in host memory, and later one on the device."""

    def __init__(
        self, mover: _Mover, copy: Tensor, work: DeviceWork, previous: "Callable[[], _Moved | None]"
    ) -> None:
        self._mover = mover
        self._copy = copy
        self._work = work
        self._previous = previous  # what was moved before it, as long as backward needs that
        self._brought: tuple[Tensor, DeviceWork | None] | None = None

    def __del__(self) -> None:
        if self._brought is not None and self._brought[1] is not None:  # in vain
            self._brought[1].wait_on_device()  # before its memory is used again

    def bring(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self._brought is None:
            self._brought = self._mover.bring(self._copy, self._work)

    def take(self) -> Tensor:
        """The tensor on the device. Backward takes them last first, so the next one is begun."""
        self.bring()
        previous = self._previous()
        if previous is not None:
            previous.bring()
        assert self._brought is not None
        (tensor, work), self._brought = self._brought, None
        if work is not None:
            work.wait_on_device()
        return tensor


def unpack(packed: _Moved | Left) -> Tensor:
    """What backward needs of a tensor that was saved.

    Raises:
        StepError: it was changed in place since.
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


def storage_of(tensor: Tensor) -> int:
    """Which Storage ``tensor`` views; buffers keep theirs while memory is swapped in and out."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
