"""The measurements of `shardwise bench`, which run on every rank."""

import gc
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round, interleave
from shardwise.bench.memory import (
    Peak,
    SharedMemoryUse,
    allocated_bytes,
    high_water_bytes,
    reset_high_water,
)
from shardwise.bench.options import Setting
from shardwise.bench.traffic import watch_traffic
from shardwise.bench.work import TrainedModel, Work, gpt_work
from shardwise.forecast.memory.process import resident_bytes, set_mmap_threshold
from shardwise.launch.world import World
from shardwise.schedule.events import WAITS

__all__ = ["MMAP_THRESHOLD", "inspect_engine", "measure_resident_peak", "measure_steps"]

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
