"""The measurements of `shardwise bench`, which run on every rank."""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise._private import TorchDispatchMode, pytree
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round, interleave
from shardwise.bench.machine import (
    Peak,
    SharedMemoryUse,
    allocated_bytes,
    high_water_bytes,
    reset_high_water,
    resident_bytes,
    set_mmap_threshold,
)
from shardwise.bench.options import Setting
from shardwise.bench.work import TrainedModel, Work, gpt_work
from shardwise.comm.communicator import Collectives, communicator
from shardwise.comm.device import CommStream, ThreadStream
from shardwise.launch.world import World
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import WAITS

__all__ = [
    "MMAP_THRESHOLD",
    "inspect_engine",
    "measure_resident_peak",
    "measure_steps",
    "watch_traffic",
]

NUM_WARM_UP = 2  # rounds
NUM_STEPS = 4  # steps trained before memory and traffic are measured
MMAP_THRESHOLD = 64 * 1024  # bytes
SAMPLE_SECONDS = 0.0005


def measure_steps(
    world: World,
    setting: Setting,
    make_work: Callable[[Setting], Work],
    names: Sequence[str],
    title: str,
) -> list[Round]:
    """Measure one step per round with every engine in ``names``, on the same batch.

    The figures of a step are ``seconds`` (between barriers before and after it), ``cpu_seconds``
    (of all threads), ``page_faults`` and ``loss``. Engines that record their communication also
    have ``busy_seconds`` of gathers and reductions, and ``exposed_seconds`` that the host waited.
    """
    work = make_work(setting)
    trainees = {name: ENGINES[name].start(work) for name in names}
    for trainee in trainees.values():
        if isinstance(trainee.model, sw.FSDPModule):
            sw.ledger(trainee.model).takes_times = True  # on an accelerator, this costs host time
    cases = {
        name: partial(_measure_step, trainee, work, world.rank)
        for name, trainee in trainees.items()
    }
    rounds = interleave(
        cases, setting.rounds, title=title, warm_up=NUM_WARM_UP, visible=world.is_first
    )
    dist.barrier()
    return rounds


def _measure_step(trainee: TrainedModel, work: Work, rank: int, number: int) -> Figures:
    batch = work.batch(number, rank)
    dist.barrier()
    faults = _page_faults()
    began, cpu_began = time.perf_counter(), time.process_time()
    loss = float(trainee.step(batch))
    dist.barrier()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "page_faults": _page_faults() - faults,
        "loss": loss,
        **_communication(trainee.model),
    }


def _communication(model: nn.Module) -> Figures:
    if not isinstance(model, sw.FSDPModule):
        return {}
    records = sw.ledger(model).records()
    return {
        "busy_seconds": sum(record.busy_seconds for record in records),
        "exposed_seconds": sum(r.seconds for r in records if r.event.kind in WAITS),
    }


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def inspect_engine(world: World, setting: Setting, name: str) -> Figures:
    """Measure the resident peak and then, with a second model, live bytes and traffic.

    Live bytes are those that any thread has allocated with malloc since before the model was made
    and not yet freed, sampled every 0.5 ms: parameters, gradients, states, activations, buffers and
    pools. torch's profiler is not usable here, because it sees only the threads that it was started
    on, and FSDP2 frees gradients on others (it reported peaks of 482, 620 and 880 MB for one model;
    this method agrees within 1 MB). malloc does not count shared memory, so this rank's share after
    the last step is added.
    """
    resident_peak = measure_resident_peak(world, setting, name, None)
    gc.collect()
    work = gpt_work(setting)
    before = SharedMemoryUse.read()
    with Peak(allocated_bytes, SAMPLE_SECONDS) as live:
        trainee = _train(work, name, world)
    live_peak = live.bytes + _shared_after_barrier().share - before.share
    outer_bytes = _outer_bytes(trainee.model)
    with watch_traffic(trainee.model) as traffic:
        trainee.step(work.batch(0, world.rank))
    dist.barrier()
    return {
        "copied_bytes": traffic.copied_bytes,
        "sent_bytes": traffic.sent_bytes,
        "outer_bytes": _outer_bytes(trainee.model) - outer_bytes,
        "num_collectives": traffic.num_collectives,
        "live_peak": live_peak,
        "resident_peak": resident_peak,
    }


def _outer_bytes(model: nn.Module) -> int:
    return sw.ledger(model).outer_bytes if isinstance(model, sw.FSDPModule) else 0


def measure_resident_peak(
    world: World, setting: Setting, name: str, mmap_threshold: int | None
) -> int:
    """Measure the peak of resident bytes while a model is made and trained for `NUM_STEPS` steps.

    Memory that was resident before (libraries, connections) is subtracted. Shared memory counts
    with this rank's share after the last step. With malloc's ``mmap_threshold`` at 64 KB, freed
    memory is returned to the system at once, and new allocations cause page faults.
    """
    if mmap_threshold is not None:
        set_mmap_threshold(mmap_threshold)
    _warm_up()
    reset_high_water()
    before, shared_before = resident_bytes(), SharedMemoryUse.read()
    trainee = _train(gpt_work(setting), name, world)
    peak = high_water_bytes() - before
    shared = _shared_after_barrier()
    of_others = shared.resident - shared.share - (shared_before.resident - shared_before.share)
    del trainee
    return peak - of_others


def _shared_after_barrier() -> SharedMemoryUse:
    dist.barrier()
    shared = SharedMemoryUse.read()
    dist.barrier()
    return shared


def _train(work: Work, name: str, world: World) -> TrainedModel:
    trainee = ENGINES[name].start(work)
    for number in range(NUM_STEPS):
        trainee.step(work.batch(number, world.rank))
    return trainee


def _warm_up() -> None:
    """Run a small step, so that lazy imports and first allocations do not count."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    dist.barrier()


# -- traffic ---------------------------------------------------------------------------------------


_COPIES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::clone",
    "aten::cat",
    "aten::stack",
    "aten::_chunk_cat",
    "aten::_foreach_copy_",
    "aten::_foreach_copy",
    "aten::split_with_sizes_copy",
    "aten::index_copy_",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::split_with_sizes_copy",
}
_SCALES_INTO = {"aten::mul", "aten::div"}  # with out=
_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Traffic:
    """The traffic of one step on one rank."""

    copied_bytes: int = 0
    sent_bytes: int = 0
    num_collectives: int = 0


@contextmanager
def watch_traffic(model: nn.Module) -> Iterator[Traffic]:
    """Yield a `Traffic` that contains the traffic of the block when the block ends."""
    traffic = Traffic()
    queues = _queues(model)
    before = [queue.sent for queue in queues]
    own, *others = [_Watch() for _ in range(1 + len(queues))]
    for queue, watch in zip(queues, others, strict=True):
        _run_on(queue.stream, watch.__enter__)
    with own:
        yield traffic
    for queue, watch in zip(queues, others, strict=True):
        _run_on(queue.stream, partial(watch.__exit__, None, None, None))
    traffic.copied_bytes = sum(watch.copied_bytes for watch in (own, *others))
    traffic.sent_bytes = round(sum(watch.sent_bytes for watch in (own, *others)))
    traffic.num_collectives = sum(watch.num_calls for watch in (own, *others))
    for queue, (calls, num_bytes) in zip(queues, before, strict=True):
        traffic.num_collectives += queue.sent[0] - calls
        traffic.sent_bytes += queue.sent[1] - num_bytes


class _Watch(TorchDispatchMode):
    """Counts the ops of the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied_bytes = 0
        self.sent_bytes = 0.0
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        collective = name.removeprefix("c10d::")
        if name in _COPIES:
            self.copied_bytes += _written(name, args, kwargs or {}, result)
        elif name in _SCALES_INTO and kwargs and "out" in kwargs:
            self.copied_bytes += kwargs["out"].nbytes
        elif collective in _SENT and collective != name:
            factor, argument = _SENT[collective]
            self.num_calls += 1
            self.sent_bytes += factor * _share(args) * _bytes(args[argument])
        return result


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if name == "fsdp::all_gather_copy_in":  # returns the whole buffer, but fills one slot
        return _bytes(args[0])
    out = kwargs.get("out")
    if out is not None:
        return _bytes(out)
    return _bytes(args[0] if name == "aten::_foreach_copy_" else result)


def _bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor))


def _share(args: tuple[Any, ...]) -> float:
    """Return (n - 1) / n for the n ranks of the group in the arguments of a c10d op."""
    groups = [arg for arg in args if _is_group(arg)]
    size: int = dist.ProcessGroup.unbox(groups[0]).size()
    return (size - 1) / size


def _is_group(arg: Any) -> bool:
    return type(arg).__name__ in {"ScriptObject", "ProcessGroup"} and "ProcessGroup" in str(arg)


# c10d op -> (factor, argument): sent bytes are factor * (n - 1) / n * bytes of the argument.
_RESULT, _INPUT = 0, 1
_SENT: dict[str, tuple[int, int]] = {
    "allreduce_": (2, _RESULT),
    "allreduce_coalesced_": (2, _RESULT),
    "allgather_": (1, _RESULT),
    "_allgather_base_": (1, _RESULT),
    "allgather_into_tensor_coalesced_": (1, _RESULT),
    "reduce_scatter_": (1, _INPUT),
    "_reduce_scatter_base_": (1, _INPUT),
    "reduce_scatter_tensor_coalesced_": (1, _INPUT),
    "broadcast_": (1, _RESULT),
    "reduce_": (1, _RESULT),
    "alltoall_base_": (1, _INPUT),
    "alltoall_": (1, _INPUT),
}


def _queues(model: nn.Module) -> list[Collectives]:
    if not isinstance(model, sw.FSDPModule):
        return []
    runtime = runtime_of_root(model)
    comm = communicator(runtime.mesh.world, runtime.pools.device)
    return [q for q in (comm.gather, comm.reduce) if isinstance(q.stream, ThreadStream)]


def _run_on(stream: CommStream, job: Callable[[], object]) -> None:
    work = stream.submit(lambda: (job(), None)[1])
    assert work.wait(_WAIT_SECONDS), "a stream did not become idle"
    if work.error is not None:
        raise work.error
