"""Activations that wait for backward in host memory.

What autograd saves is of two kinds: activations, which live until backward, and views of the
units' flat buffers, whose memory comes and goes with each gather. Only the first are worth moving;
a copy of the second would be a copy of the whole model.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.errors import StepError
from shardwise.runtime.module import runtime_of_root
from shardwise.transport.device import to_host

__all__ = ["offload_activations"]

_WORTH_BYTES = 1 << 12  # a copy of less takes longer than its memory matters


@contextlib.contextmanager
def offload_activations(model: nn.Module) -> Iterator[None]:
    """Within it, what forward saves for backward is moved to host memory until backward needs it.

    ::

        with sw.offload_activations(model):
            loss = model(batch).mean()
        loss.backward()

    From a GPU the copies go to pinned memory and back while the GPU computes; on a CPU they
    are copies as well, for tests. Parameters stay where they are, unlike with
    `torch.autograd.graph.save_on_cpu`, which gives the same gradients but also keeps a copy of
    every unit as it was gathered; so do tensors of less than 4 KiB. Of units that are checkpointed
    only the inputs are moved, for the rest is computed again.

    Args:
        model: the root, sharded. Ranks need not agree on it.

    Raises:
        PlanError: the model is not sharded, or is a unit inside one that is.
        StepError: in backward, if a tensor that was not moved has been changed in place since.
    """
    units = runtime_of_root(model).units
    buffers = {
        _storage_of(view) for unit in units for flat in unit.flats for view in flat.views[:1]
    }

    def pack(tensor: Tensor) -> "_Moved | _Left":
        small = tensor.numel() * tensor.element_size() < _WORTH_BYTES
        if small or tensor.layout is not torch.strided or _storage_of(tensor) in buffers:
            return _Left(tensor, tensor._version)
        return _Moved(to_host(tensor), tensor.device)

    with saved_tensors_hooks(pack, _unpack):
        yield


@dataclass(frozen=True, slots=True)
class _Left:
    """A tensor that stays where it is. Autograd does not watch what a hook has packed."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _Moved:
    """A copy in host memory."""

    copy: Tensor
    device: torch.device


def _unpack(packed: _Moved | _Left) -> Tensor:
    if isinstance(packed, _Moved):
        return packed.copy.to(packed.device, non_blocking=True)
    tensor = packed.tensor
    if tensor._version != packed.version:
        raise StepError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
            f"after it was saved (version {tensor._version}, expected {packed.version}); clone it "
            "before the in-place operation"
        )
    return tensor


def _storage_of(tensor: Tensor) -> int:
    """Which Storage ``tensor`` views; buffers keep theirs while memory is swapped in and out."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
