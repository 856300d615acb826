"""What needs processes of its own: memory, which engines of one process share, and traffic."""

import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardwise.bench.engines import ENGINES
from shardwise.bench.machine import (
    Peak,
    Shared,
    allocated_bytes,
    high_water_bytes,
    reset_high_water,
    resident_bytes,
    set_mmap_threshold,
)
from shardwise.bench.setting import Setting
from shardwise.bench.traffic import Traffic, watch_traffic
from shardwise.bench.work import Trainee, Work, gpt_work
from shardwise.launch.world import World

__all__ = ["MMAP_THRESHOLD", "NUM_STEPS", "Inspection", "inspect_engine", "measure_resident_peak"]

NUM_STEPS = 4
MMAP_THRESHOLD = 64 * 1024  # bytes
_SAMPLE_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Inspection:
    """Of one rank."""

    traffic: Traffic  # of a step
    live_peak: int  # bytes, as `inspect_engine` measures them
    resident_peak: int  # bytes, as `measure_resident_peak` measures them


def inspect_engine(ranks: World, setting: Setting, name: str) -> Inspection:
    """The resident peak; then, with a second model, live bytes and what a step moves.

    Live bytes are what malloc has given out since before the model was made and not got back, seen
    every half a millisecond: parameters, gradients, states, activations, buffers and pools of every
    engine, whether or not they are in use, and what libraries take on any thread. (torch's profiler
    sees only the threads that it was started on. Gradients of FSDP2 are freed on others: its peak
    came out as 482 MB, as 620, and as 880 for one model; several runs of this are within 1 MB.)
    Memory that ranks have in common is not malloc's: of that, the part of this rank is added, as it
    is after the last step.
    """
    resident_peak = measure_resident_peak(ranks, setting, name, None)
    gc.collect()
    work = gpt_work(setting)
    before = Shared.read()
    with Peak(allocated_bytes, _SAMPLE_SECONDS) as live:
        trainee = _train(work, name, ranks)
    live_peak = live.bytes + _when_all_are_there().share - before.share
    with watch_traffic(trainee.model) as traffic:
        trainee.step(work.batch(0, ranks.rank))
    dist.barrier()
    return Inspection(traffic, live_peak, resident_peak)


def measure_resident_peak(
    ranks: World, setting: Setting, name: str, mmap_threshold: int | None
) -> int:
    """The most bytes that were resident while a model was made and trained for `NUM_STEPS` steps.

    Above what was resident before the model was made, so libraries and the ranks' connections do
    not count. Memory that ranks have in common counts in parts, as it is after the last step.

    Args:
        ranks: new processes.
        setting: the model.
        name: the engine.
        mmap_threshold: for glibc's malloc; None leaves it as it is. With 64 KB, memory that is
            freed leaves the process at once, and comes back by page faults.
    """
    if mmap_threshold is not None:
        set_mmap_threshold(mmap_threshold)
    _warm_up()
    reset_high_water()
    before, shared_before = resident_bytes(), Shared.read()
    trainee = _train(gpt_work(setting), name, ranks)
    peak = high_water_bytes() - before
    shared = _when_all_are_there()
    of_others = shared.resident - shared.share - (shared_before.resident - shared_before.share)
    del trainee
    return peak - of_others


def _when_all_are_there() -> Shared:
    dist.barrier()
    shared = Shared.read()
    dist.barrier()
    return shared


def _train(work: Work, name: str, ranks: World) -> Trainee:
    trainee = ENGINES[name].start(work)
    for turn in range(NUM_STEPS):
        trainee.step(work.batch(turn, ranks.rank))
    return trainee


def _warm_up() -> None:
    """Load what the first step of any model loads."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    dist.barrier()
