"""Slot codecs: how a rank's shard becomes its slot of a gathered buffer, and all slots parameters::

    shard  --fill-->  own slot of flat [world_size * S]  --all-gather-->  flat  --unpack-->  views

A layout has one codec. To add a kind of shard, add a class, and choose it in `FlatParameters`:

    RunCodec           the shard is copied to its slot, with a cast if its dtype is another; or it
                       is the whole buffer, if that has one slot
    HostCodec          the shard is in host memory
    `ExtensionCodec`   the classes of the parameters make the slots, and parameters from them
                       (`features.extensions`)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.api import SharedBuffer
from shardwise.comm.device import copy_
from shardwise.plan.layout import Layout
from shardwise.runtime.attach import put_sharded
from shardwise.runtime.buffers import ChunkedBuffer, FlatBuffer, flat_buffer
from shardwise.runtime.memory import Pool
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import CLASS, FSDPParameter
from shardwise.tensor.sharding import Sharding, local_of, sharding_of

__all__ = ["GatheredBuffer", "HostCodec", "RunCodec", "SlotCodec"]


class GatheredBuffer(Protocol):
    """The memory of the gathered parameters of one layout."""

    @property
    def flat(self) -> Tensor:
        """[world_size * S], what a collective fills; may be read between `acquire` and `unpack`."""

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The parameters; empty if their classes define what is gathered."""

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        """The storages of the parameters; may be empty before the first gather."""

    @property
    def num_bytes(self) -> int:
        """Its size while it has memory."""

    @property
    def is_acquired(self) -> bool:
        """Whether it has memory."""

    def slot_of(self, rank: int) -> Tensor:
        """The part [S] of ``flat`` that ``rank`` owns."""

    def acquire(self) -> None:
        """Give it memory with undefined content."""

    def release(self) -> None:
        """Return its memory to where it came from."""

    def unpack(self) -> None:
        """Make the parameters from ``flat``."""

    def pack(self) -> None:
        """The reverse of `unpack`."""

    def shared_buffer(self) -> SharedBuffer | None:
        """What ranks need to gather the buffer in shared memory; None if they cannot."""


class SlotCodec(ABC):
    """The shard of one layout on this rank, and the buffer that it is gathered to."""

    can_split = True  # parts of ``flat`` can be gathered alone, and in the dtype of the shard
    buffer: GatheredBuffer
    shard: Tensor  # [S], between steps; empty if every parameter has its own

    @abstractmethod
    def fill(self, slot: Tensor) -> Callable[[], None]:
        """Return what writes the shard to ``slot`` [S], just before it is sent."""

    @abstractmethod
    def stored(self) -> Iterator[Tensor]:
        """The tensors of this rank's parameters."""

    @abstractmethod
    def adopt(
        self, root: nn.Module, original: nn.Parameter, sharding: Sharding, position: int
    ) -> FSDPParameter:
        """Replace ``original``, a parameter of ``root``, by this rank's part of it."""

    def note_changes(self) -> None:  # noqa: B027
        """The shard may have been changed since the last step."""

    def kept_memory(self) -> Iterator[torch.UntypedStorage]:
        """Between steps: memory that is kept on the device, and whose values are made again."""
        return iter(())

    def check_unchanged(self) -> None:  # noqa: B027
        """Raise a PlanError if a gathered parameter was changed, and no shard can follow."""


class RunCodec(SlotCodec):
    """A shard [S] on the device: a run of elements, or chunks, of each parameter."""

    def __init__(
        self, layout: Layout, rank: int, pool: Pool, own_pool: Pool, shard: Tensor | None = None
    ) -> None:
        """Make a codec for the slot of ``rank``; see `flat_buffer` for the pools.

        The ``shard`` [S], zeros, is by default on the device, or the buffer if that has one slot.
        """
        is_whole = not layout.needs_gather
        self.buffer: FlatBuffer | ChunkedBuffer = flat_buffer(
            layout, pool, own_pool, dtype=layout.cast.compute_dtype, owns_memory=is_whole
        )
        self._slices = layout.slices_of_shard(rank)
        if shard is None and is_whole:
            shard = self.buffer.flat
        elif shard is None:
            dtype = getattr(torch, layout.dtype)
            shard = torch.zeros(layout.shard_elements, dtype=dtype, device=pool.device)
        self.shard = shard

    def fill(self, slot: Tensor) -> Callable[[], None]:
        return partial(copy_, slot, self.shard)

    def stored(self) -> Iterator[Tensor]:
        yield self.shard

    def adopt(
        self, root: nn.Module, original: nn.Parameter, sharding: Sharding, position: int
    ) -> FSDPParameter:
        local = self.shard[self._slices[position]].data
        with torch.no_grad():
            local.copy_(_own_part_of(original, sharding))  # a cast if the shard is a master
        kind, attributes = _class_of(original)
        owners, sharded = put_sharded(root, original, sharding, sharding.wrap(local))
        trainable = sharding.extent.parameter.trainable
        dense = nn.Parameter(sharding.dense(self.buffer.views[position]), requires_grad=trainable)
        if kind is not None:
            dense.__class__ = kind
            vars(dense).update(attributes)
            vars(sharded)[CLASS] = kind
        cast = sharding.layout.cast
        if cast.keeps_sums and cast.reduce_itemsize > cast.compute_itemsize:
            dense.grad_dtype = sharded.grad_dtype = getattr(torch, sharding.layout.gradient_dtype)
        return FSDPParameter(sharding, sharded, local_of(sharded), dense, owners)


class HostCodec(RunCodec):
    """A shard [S] in host memory, and perhaps a copy on the device, from step to step."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        pool: Pool,
        own_pool: Pool,
        offloader: HostOffloader,
    ) -> None:
        shard = offloader.allocate_shard(layout, layout.dtype)
        super().__init__(layout, rank, pool, own_pool, shard)
        self.offloader = offloader
        self.device_copy: Tensor | None = None  # [S], on the device
        if offloader.keeps_copies:
            dtype = self.buffer.flat.dtype
            self.device_copy = torch.zeros(layout.shard_elements, dtype=dtype, device=pool.device)
        self._is_stale = True

    def fill(self, slot: Tensor) -> Callable[[], None]:
        if self.device_copy is None:
            return self.offloader.to_device(slot, self.shard)
        copy_on_device = partial(copy_, slot, self.device_copy)
        if not self._is_stale:
            return copy_on_device
        self._is_stale = False
        refresh = self.offloader.to_device(self.device_copy, self.shard)
        return lambda: (refresh(), copy_on_device())[1]

    def note_changes(self) -> None:
        self._is_stale = True

    def kept_memory(self) -> Iterator[torch.UntypedStorage]:
        if self.device_copy is not None:
            self._is_stale = True
            yield self.device_copy.untyped_storage()


def _class_of(original: nn.Parameter) -> tuple[type | None, dict[str, Any]]:
    """The parameter class of ``original`` before sharding, and its attributes.

    Classes like bitsandbytes' `Params4bit` need the attributes to interpret the elements.

    Returns:
        None and no attributes for `nn.Parameter` itself.
    """
    kind = vars(original).get(CLASS, type(original))
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        return None, {}
    own = {key: value for key, value in vars(original).items() if key != CLASS}
    return kind, {key: value for key, value in own.items() if not isinstance(value, Sharding)}


def _own_part_of(original: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of ``original``, 1-D."""
    before = sharding_of(original)
    if before is not None:
        assert isinstance(original, DTensor)
        if before.has_same_cuts(sharding):
            return local_of(original).reshape(-1)
        original = original.full_tensor()
    elif isinstance(original, DTensor):
        original = local_of(original)
    return sharding.own_part_of(original.detach()).reshape(-1)
