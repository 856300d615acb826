"""Measurements that need a process per engine: memory and traffic."""

import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwise.bench.engines import ENGINES
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
from shardwise.bench.traffic import Traffic, watch_traffic
from shardwise.bench.work import Trainee, Work, gpt_work
from shardwise.launch.world import World

__all__ = ["MMAP_THRESHOLD", "NUM_STEPS", "Inspection", "inspect_engine", "measure_resident_peak"]

NUM_STEPS = 4
MMAP_THRESHOLD = 64 * 1024  # bytes
_SAMPLE_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Inspection:
    """The results of one rank."""

    traffic: Traffic  # of a step
    live_peak: int  # bytes; see `inspect_engine`
    resident_peak: int  # bytes; see `measure_resident_peak`


def inspect_engine(ranks: World, setting: Setting, name: str) -> Inspection:
    """Measure the resident peak, and then, with a second model, live bytes and traffic.

    Live bytes are allocated from malloc on any thread since before the model was made and not yet
    freed, sampled every 0.5 ms: parameters, gradients, states, activations, buffers and pools.
    torch's profiler does not do here: it sees only the threads that it was started on, and FSDP2
    frees gradients on others (its peak came out as 482, 620 and 880 MB for one model; this agrees
    within 1 MB). Shared memory is not malloc's; this rank's share after the last step is added.
    """
    resident_peak = measure_resident_peak(ranks, setting, name, None)
    gc.collect()
    work = gpt_work(setting)
    before = SharedMemoryUse.read()
    with Peak(allocated_bytes, _SAMPLE_SECONDS) as live:
        trainee = _train(work, name, ranks)
    live_peak = live.bytes + _shared_after_barrier().share - before.share
    with watch_traffic(trainee.model) as traffic:
        trainee.step(work.batch(0, ranks.rank))
    dist.barrier()
    return Inspection(traffic, live_peak, resident_peak)


def measure_resident_peak(
    ranks: World, setting: Setting, name: str, mmap_threshold: int | None
) -> int:
    """The peak of resident bytes while a model is made and trained for `NUM_STEPS` steps.

    Memory that was resident before (libraries, connections) is subtracted. Shared memory counts by
    share, as it is after the last step.

    Args:
        ranks: in new processes.
        setting: the model.
        name: the engine.
        mmap_threshold: for glibc's malloc; None for its default. With 64 KB, freed memory leaves
            the process at once and comes back by page faults.
    """
    if mmap_threshold is not None:
        set_mmap_threshold(mmap_threshold)
    _warm_up()
    reset_high_water()
    before, shared_before = resident_bytes(), SharedMemoryUse.read()
    trainee = _train(gpt_work(setting), name, ranks)
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


def _train(work: Work, name: str, ranks: World) -> Trainee:
    trainee = ENGINES[name].start(work)
    for turn in range(NUM_STEPS):
        trainee.step(work.batch(turn, ranks.rank))
    return trainee


def _warm_up() -> None:
    """Make the lazy imports and allocations of a first step."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    dist.barrier()
