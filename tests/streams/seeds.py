"""Bugs that are introduced into shardwise one at a time. The checker must find each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import device as transport_device, process_group
from shardwise.comm.api import MemoryKind, RankGroup
from shardwise.comm.device import DeviceStream, DeviceWork
from shardwise.comm.process_group import ProcessGroupCollectives
from shardwise.features import activation_offload, device_step
from shardwise.features.unused import UsedParameterSync, gradients_of
from shardwise.optim import exchange as matrix_exchange
from shardwise.runtime import memory as runtime_memory, offload
from shardwise.runtime.codecs import RunCodec
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.memory import Pool
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.schedule import memory as schedule_memory
from shardwise.schedule.events import EventKind
from shardwise.schedule.memory import MemoryPlacement
from shardwise.tensor import reductions
from shardwise.tensor.sharding import local_of
from tests.streams.clock import Event, Stream
from tests.streams.programs import DEVICE, Program
from tests.streams.simulation import Problem, Simulation

__all__ = ["BUGS", "Bug"]

PLAIN = Program()
_MUON = Program("stack", optimizer="muon")
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Bug:
    """A patch, the program that reveals it, and the problem that is found.

    ``problem`` is None if the only sign is that the final numbers are wrong.
    """

    install: Callable[[Simulation], Any]
    problem: Problem | None
    program: Program = PLAIN
    num_ranks: int = 2
    rank: int = 0  # on which it is found


@contextmanager
def patched(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def instead(function: Any) -> Wrap:
    return lambda _original: function


def then(action: Callable[..., Any]) -> Wrap:
    """Call ``action(self)`` after the original."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def both(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            action(self)
            return result

        return both

    return wrap


def without_waits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip all waits for work on the device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with patched(DeviceWork, "wait", instead(lambda _work, *_timeout: True)):
            return original(*args, **kwargs)

    return run


def on_stream(stream: Stream) -> Wrap:
    """Run the original on ``stream``, which waits for nothing."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with stream:
                return original(*args, **kwargs)

        return run

    return wrap


# -- streams and events ---------------------------------------------------------------------------


def stream_does_not_wait(_simulation: Simulation) -> Any:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def enqueue(self: DeviceStream, *after: Any, **options: Any) -> Iterator[Any]:
            with ExitStack() as stack:
                with patched(Stream, "wait_event", instead(lambda _stream, _event: None)):
                    work = stack.enter_context(original(self, *after, **options))
                yield work

        return enqueue

    return patched(DeviceStream, "enqueue", wrap)


def event_before_the_job(_simulation: Simulation) -> Any:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def enqueue(self: Any, *after: Any, **options: Any) -> Iterator[Any]:
            with original(self, *after, **options) as work:
                if self._stream is None:  # on the host
                    yield work
                    return
                early: Event = self._stream.record_event()
                yield work
            work.times[1].event.clock = early.clock

        return enqueue

    return patched(DeviceStream, "enqueue", wrap)


def current_stream_of_another_device(simulation: Simulation) -> Any:
    modules: Any = vars(transport_device)["torch"]
    return patched(
        modules.accelerator,
        "current_stream",
        instead(lambda _device=None: simulation.current_stream()),
    )


# -- gathers --------------------------------------------------------------------------------------


def gather_is_not_awaited(_simulation: Simulation) -> Any:
    return patched(Unit, "await_gather", without_waits)


def free_does_not_await_an_unused_gather(_simulation: Simulation) -> Any:
    return patched(Unit, "free", without_waits)


def shard_is_copied_on_another_stream(simulation: Simulation) -> Any:
    side = simulation.new_stream(DEVICE)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, to: on_stream(side)(original(self, to))

    return patched(RunCodec, "fill", wrap)


def chunks_are_unpacked_at_once(_simulation: Simulation) -> Any:
    unpack = FlatParameters.finish_gather
    stack = ExitStack()
    stack.enter_context(patched(FlatParameters, "launch_gather", then(unpack)))
    stack.enter_context(patched(FlatParameters, "finish_gather", instead(lambda _flat: None)))
    return stack


# -- reductions -----------------------------------------------------------------------------------


def reduction_is_not_awaited(_simulation: Simulation) -> Any:
    return patched(Unit, "collect", without_waits)


def buffer_is_released_at_reduce(_simulation: Simulation) -> Any:
    return patched(Gradients, "launch_reduce", then(lambda buffer: buffer._close()))


def scratch_is_freed_at_reduce(_simulation: Simulation) -> Any:
    return patched(Gradients, "launch_reduce", then(lambda buffer: buffer._free_scratch()))


def gradient_is_written_after_reduce(_simulation: Simulation) -> Any:
    def write(buffer: Gradients) -> None:
        buffer._buffer.views[0].add_(1)

    return patched(Gradients, "launch_reduce", then(write))


def gradients_are_allocated_on_another_stream(simulation: Simulation) -> Any:
    return patched(Gradients, "memory", on_stream(simulation.new_stream(DEVICE)))


def gradients_are_read_by_the_host(_simulation: Simulation) -> Any:
    def read(unit: Unit) -> None:
        for parameter in unit.parameters:
            if parameter.sharded.grad is not None:
                local_of(parameter.sharded.grad).sum().item()

    return patched(Unit, "collect", then(read))


# -- host memory ----------------------------------------------------------------------------------


def offloader_copies_nothing(_simulation: Simulation) -> Any:
    return patched(HostOffloader, "to_device", instead(lambda _self, _to, _of: lambda: None))


def copy_to_device_is_not_awaited(_simulation: Simulation) -> Any:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_device(self: HostOffloader, to: Tensor, of: Tensor) -> Callable[[], None]:
            original(self, to, of)
            return lambda: None

        return to_device

    return patched(HostOffloader, "to_device", wrap)


def host_does_not_synchronize(_simulation: Simulation) -> Any:
    return patched(DeviceWork, "synchronize", instead(lambda _work: None))


def copies_block(_simulation: Simulation) -> Any:
    return patched(offload, "copy_", instead(lambda dst, src: dst.copy_(src)))


def gradients_are_offloaded_to_pageable_memory(_simulation: Simulation) -> Any:
    def unpin(offloader: Any) -> None:
        offloader._is_pinned = False
        offloader.staging = Pool(torch.device("cpu"))

    return patched(HostOffloader, "__init__", then(unpin))


def activations_are_not_awaited(_simulation: Simulation) -> Any:
    return patched(activation_offload._Moved, "take", without_waits)


def activations_are_dropped_while_they_are_copied(_simulation: Simulation) -> Any:
    def finish(mover: Any, _num_left: int = 0) -> None:
        mover._leaving.clear()

    return patched(activation_offload._Mover, "finish", instead(finish))


# -- NCCL's restrictions, and the order on all ranks ----------------------------------------------


def sums_are_in_host_memory(_simulation: Simulation) -> Any:
    def allocate(_pool: Pool, size: int, dtype: torch.dtype, _owner: str = "") -> Tensor:
        return torch.zeros(size, dtype=dtype)

    return patched(Pool, "allocate_tensor", instead(allocate))


def groups_sort_their_ranks(_simulation: Simulation) -> Any:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, *args, **options: original(
            replace(group, ranks=tuple(sorted(group.ranks))), *args, **options
        )

    return patched(process_group, "new_group", wrap)


def sum_is_at_the_first_slot(_simulation: Simulation) -> Any:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            with patched(RankGroup, "index", instead(property(lambda _group: 0))):
                return original(*args, **kwargs)

        return launch

    return patched(Gradients, "launch_reduce", wrap)


def norms_are_not_awaited(_simulation: Simulation) -> Any:
    return patched(reductions, "gather_runs", without_waits)


def one_rank_swaps_two_gathers(_simulation: Simulation) -> Any:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def perform(self: Any, events: Any) -> None:
            events = list(events)
            for i in range(len(events) - 1):
                if events[i].kind is events[i + 1].kind is EventKind.GATHER:
                    events[i], events[i + 1] = events[i + 1], events[i]
            original(self, events)

        return perform

    return patched(Scheduler, "_perform", wrap if dist.get_rank() == 1 else lambda one: one)


def one_rank_does_not_agree_on_unused(_simulation: Simulation) -> Any:
    def init(self: Any, units: Any, *_others: Any) -> None:
        self._gradients, self._pending = gradients_of(units), None
        self._own = [True for each in self._gradients for _ in each.used]

    wrap: Wrap = instead(init) if dist.get_rank() == 1 else lambda one: one
    return patched(UsedParameterSync, "__init__", wrap)


def gathers_use_unregistered_memory(_simulation: Simulation) -> Any:
    def allocate(original: Callable[..., Any]) -> Callable[..., Any]:
        def elsewhere(queue: Any, num_bytes: int, *others: Any) -> Any:
            if "/gather/" in queue.name:
                return runtime_memory._allocate(num_bytes, queue._device)
            return original(queue, num_bytes, *others)

        return elsewhere

    return patched(ProcessGroupCollectives, "allocate", allocate)


def one_rank_has_other_offsets(_simulation: Simulation) -> Any:
    def reverse(original: Callable[..., Any]) -> Callable[..., Any]:
        def placed(sizes: Any, *others: Any) -> MemoryPlacement:
            found = original(sizes, *others)
            offsets = [
                found.extent - start - size
                for start, size in zip(found.offsets, sizes, strict=True)
            ]
            return MemoryPlacement(tuple(offsets), found.extent)

        return placed

    wrap: Wrap = reverse if dist.get_rank() == 1 else lambda one: one
    return patched(schedule_memory, "place", wrap)


_OFFLOAD = Program(offload="all")
_SYMMETRIC = Program("stack", memory=MemoryKind.SYMMETRIC, steps=3)  # planned in the third step
_ACTIVATIONS = Program("wide", offloads_activations=True)
_HSDP = Program(strategy="hsdp")


def parts_of_matrices_are_not_awaited(_simulation: Simulation) -> Any:
    return patched(matrix_exchange._Messages, "wait", instead(lambda *_args: None))


def parts_of_matrices_are_dropped_while_they_are_sent(_simulation: Simulation) -> Any:
    def drop(messages: Any) -> None:
        messages.sent.clear()

    return patched(matrix_exchange._Messages, "__init__", then(drop))


def states_are_not_awaited(_simulation: Simulation) -> Any:
    return patched(device_step.DeviceSteps, "_step", without_waits)


def states_are_dropped_while_they_are_copied(_simulation: Simulation) -> Any:
    return patched(device_step, "_await_copies", instead(lambda _one: None))


def stepped_shards_are_read_at_once(_simulation: Simulation) -> Any:
    return patched(device_step, "arrives", instead(lambda _tensor, _wait: None))


_DEVICE_STEP = Program("stack", offload="device")

BUGS = {
    "communication stream does not wait": Bug(stream_does_not_wait, Problem.RACE),
    "event before the job": Bug(event_before_the_job, Problem.RACE),
    "current stream of another device": Bug(current_stream_of_another_device, Problem.RACE),
    "gather is not awaited": Bug(gather_is_not_awaited, Problem.RACE),
    "free does not wait for an unused prefetch": Bug(
        free_does_not_await_an_unused_gather,
        Problem.EARLY_FREE,
        Program("alternating", prefetch=3, granularity="dim"),
    ),
    "shard is copied on another stream": Bug(shard_is_copied_on_another_stream, Problem.RACE),
    "chunks are unpacked at once": Bug(
        chunks_are_unpacked_at_once, Problem.RACE, Program(granularity="dim")
    ),
    "reduction is not awaited": Bug(
        reduction_is_not_awaited, Problem.RACE, Program(unused="zeros")
    ),
    "buffer is released at reduce": Bug(buffer_is_released_at_reduce, Problem.EARLY_FREE),
    "scratch is freed at reduce": Bug(
        scratch_is_freed_at_reduce, Problem.RACE, Program(accumulate=2)
    ),
    "gradient is written after reduce": Bug(gradient_is_written_after_reduce, Problem.RACE),
    "gradients are allocated on another stream": Bug(
        gradients_are_allocated_on_another_stream, Problem.EARLY_FREE
    ),
    "gradients are read by the host": Bug(gradients_are_read_by_the_host, Problem.SYNC),
    "offloader copies nothing": Bug(offloader_copies_nothing, None, _OFFLOAD),
    "copy to device is not awaited": Bug(copy_to_device_is_not_awaited, Problem.RACE, _OFFLOAD),
    "refreshed copies are not awaited": Bug(
        copy_to_device_is_not_awaited, Problem.RACE, Program(offload="copies")
    ),
    "host does not synchronize": Bug(host_does_not_synchronize, Problem.HOST_RACE, _OFFLOAD),
    "copies block": Bug(copies_block, Problem.SYNC, _OFFLOAD),
    "gradients are offloaded to pageable memory": Bug(
        gradients_are_offloaded_to_pageable_memory, Problem.SYNC, _OFFLOAD
    ),
    "activations are not awaited": Bug(activations_are_not_awaited, Problem.RACE, _ACTIVATIONS),
    "activations are dropped while they are copied": Bug(
        activations_are_dropped_while_they_are_copied, Problem.EARLY_FREE, _ACTIVATIONS
    ),
    "states are not awaited": Bug(states_are_not_awaited, Problem.RACE, _DEVICE_STEP),
    "states are dropped while they are copied": Bug(
        states_are_dropped_while_they_are_copied, Problem.EARLY_FREE, _DEVICE_STEP
    ),
    "states of steps in backward are dropped while they are copied": Bug(
        states_are_dropped_while_they_are_copied,
        Problem.EARLY_FREE,
        replace(_DEVICE_STEP, steps_in_backward=True),
    ),
    "stepped shards are read at once": Bug(
        stepped_shards_are_read_at_once, Problem.HOST_RACE, _DEVICE_STEP
    ),
    "sums are in host memory": Bug(sums_are_in_host_memory, Problem.NCCL, _OFFLOAD),
    "groups sort their ranks": Bug(
        groups_sort_their_ranks, Problem.NCCL, replace(_HSDP, is_permuted=True), 4
    ),
    "sum is at the first slot": Bug(
        sum_is_at_the_first_slot, Problem.NCCL, Program(low_precision=True), rank=1
    ),
    "norms are not awaited": Bug(norms_are_not_awaited, Problem.RACE, Program(clip=1.0)),
    "one rank swaps two gathers": Bug(
        one_rank_swaps_two_gathers, Problem.ORDER, Program(prefetch=2)
    ),
    "one rank skips the exchange about unused parameters": Bug(
        one_rank_does_not_agree_on_unused, Problem.ORDER
    ),
    "parts of matrices are not awaited": Bug(
        parts_of_matrices_are_not_awaited, Problem.RACE, _MUON
    ),
    "parts of matrices are dropped while they are sent": Bug(
        parts_of_matrices_are_dropped_while_they_are_sent, Problem.EARLY_FREE, _MUON
    ),
    "memory of gathers is not registered": Bug(
        gathers_use_unregistered_memory, Problem.NCCL, _SYMMETRIC
    ),
    "one rank has other offsets in symmetric memory": Bug(
        one_rank_has_other_offsets, Problem.ORDER, _SYMMETRIC
    ),
}
