"""Converts finished steps and spans to the lines of a recording."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import SupportsFloat

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwise._private import has_saved_tensors_hooks
from shardwise.comm.device import Device, allocated_bytes, is_accelerator
from shardwise.features.activation_offload import Unmoved, storage_of, unpack
from shardwise.recording.format import (
    HeldBytes,
    Line,
    MemorySample,
    RecordedEvent,
    Span,
    StepTotals,
)
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import Record, is_timed
from shardwise.runtime.unit import FlatParameters
from shardwise.schedule.events import COPIES, WAITS
from shardwise.tensor.sharding import local_of

__all__ = ["EndedSpan", "EndedStep", "MemoryMeter", "recorded_event"]


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """A span that has ended on the host, maybe not yet on the device."""

    step: int
    name: str
    began: SupportsFloat
    ended: SupportsFloat

    def is_over(self, device: Device) -> bool:
        """Whether its times are known without blocking the host."""
        return device.is_over(self.ended)

    def lines(self, offset: float) -> Iterator[Line]:
        yield Span(self.step, self.name, float(self.began) + offset, float(self.ended) + offset)


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that has ended on the host, maybe not yet on the device."""

    step: int
    records: Sequence[Record]
    samples: Sequence[tuple[Record, HeldBytes]]
    updates: int
    gathered_bytes: int  # at the end of the step
    tokens: tuple[int, int] | None  # (tokens that counted, padding)
    is_detailed: bool
    began: SupportsFloat
    ended: SupportsFloat

    def is_over(self, device: Device) -> bool:
        works = (work for record in self.records for work in record.works)
        return device.is_over(self.ended) and all(
            work.done and device.is_over(work.times[1]) for work in works
        )

    def lines(self, offset: float) -> Iterator[Line]:
        """Yield its events and memory if it is detailed, and its totals, on the clock of rank 0."""
        if not self.records:
            return
        if self.is_detailed:
            for record in self.records:
                yield recorded_event(self.step, record, offset)
            kept = set(map(id, self.records))  # samples of an evaluation are left out
            for record, held in self.samples:
                if id(record) in kept:
                    at, unit = float(record.ended) + offset, record.event.unit
                    yield MemorySample(**asdict(held), step=self.step, at=at, unit=unit)
        yield self._totals(offset)

    def _totals(self, offset: float) -> StepTotals:
        records = self.records
        tokens, padded = self.tokens or (None, None)
        changes = list(accumulate(record.event.gathered_change for record in records))
        before = self.gathered_bytes - changes[-1]
        launched = [r for r in records if r.works and r.event.kind not in COPIES]
        exposed = busy = None
        if is_timed(records):
            exposed = sum(record.seconds for record in records if record.event.kind in WAITS)
            busy = sum(record.busy_seconds for record in launched)
        return StepTotals(
            step=self.step,
            began=float(self.began) + offset,
            ended=float(self.ended) + offset,
            updates=self.updates,
            exposed_seconds=exposed,
            communication_seconds=busy,
            communication_bytes=sum(record.event.bytes for record in launched),
            peak_gathered_bytes=before + max(0, *changes),
            tokens=tokens,
            padded_tokens=padded,
        )


def recorded_event(step: int, record: Record, offset: float) -> RecordedEvent:
    """Convert ``record``, with ``offset`` added to the clock of this rank."""
    spans = [(began + offset, ended + offset) for began, ended in (w.span for w in record.works)]
    return RecordedEvent(
        step=step,
        event=record.event.kind,
        unit=record.event.unit,
        bytes=record.event.bytes,
        began=float(record.began) + offset,
        ended=float(record.ended) + offset,
        spans=tuple(spans),
    )


# -- memory ----------------------------------------------------------------------------------------


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
        shards = [flat.shard for flat in self._flats]
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
        values = [value for own in state.values() for value in own.values()]
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
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.device == self._device
        }
        return sum(storages.values())


class SavedTensors:
    """Counts the storages that autograd saves in some forwards, as long as they live."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {storage_of(tensor) for tensor in excluded}  # counted elsewhere
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
        identity = storage_of(tensor)
        if identity not in self._excluded and identity not in self._alive:
            self._alive[identity] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, identity).atexit = False
        return Unmoved(tensor.detach(), tensor._version)
