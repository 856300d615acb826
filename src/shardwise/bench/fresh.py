"""What needs processes of its own: memory, which engines of one process share, and traffic."""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwise.bench.engines import ENGINES
from shardwise.bench.machine import (
    high_water_bytes,
    reset_high_water,
    resident_bytes,
    set_mmap_threshold,
)
from shardwise.bench.setting import Setting
from shardwise.bench.traffic import Traffic, watch_traffic
from shardwise.bench.work import Trainee, Work, gpt_work
from shardwise.train.ranks import Ranks

__all__ = ["MMAP_THRESHOLD", "NUM_STEPS", "Inspection", "inspect_engine", "measure_resident_peak"]

NUM_STEPS = 4
MMAP_THRESHOLD = 64 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class Inspection:
    """Of one rank."""

    traffic: Traffic  # of a step
    live_peak: int  # bytes of tensors at once
    resident_peak: int  # bytes, as `measure_resident_peak` measures them


def inspect_engine(ranks: Ranks, setting: Setting, name: str) -> Inspection:
    """The resident peak; then, with a second model, live bytes and what a step moves.

    Live bytes are what torch's CPU allocator has given out since before the model was made and not
    taken back, as its profiler tells (``profile_memory``): parameters, gradients, states,
    activations, buffers and pools of every engine, whether or not they are in use. What Gloo
    allocates on its own threads is not seen.
    """
    resident_peak = measure_resident_peak(ranks, setting, name, None)
    gc.collect()
    work = gpt_work(setting)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _no_chatter():
        profiler.start()
    trainee = _train(work, name, ranks)
    with _no_chatter():
        profiler.stop()
    with watch_traffic(trainee.model) as traffic:
        trainee.step(work.batch(0, ranks.rank))
    dist.barrier()
    return Inspection(traffic, _peak_allocated(profiler), resident_peak)


def measure_resident_peak(
    ranks: Ranks, setting: Setting, name: str, mmap_threshold: int | None
) -> int:
    """The most bytes that were resident while a model was made and trained for `NUM_STEPS` steps.

    Above what was resident before the model was made, so libraries and the ranks' connections do
    not count.

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
    before = resident_bytes()
    _train(gpt_work(setting), name, ranks)
    peak = high_water_bytes() - before
    dist.barrier()
    return peak


def _train(work: Work, name: str, ranks: Ranks) -> Trainee:
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


def _peak_allocated(profiler: profile) -> int:
    """From the trace, which is what of the profiler's memory records is public."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    records = [event["args"] for event in events if event.get("name") == "[memory]"]
    if not records:
        return 0
    before = records[0]["Total Allocated"] - records[0]["Bytes"]  # left by an earlier trace
    return int(max(record["Total Allocated"] for record in records) - before)


@contextmanager
def _no_chatter() -> Iterator[None]:
    """The profiler's library writes to the process's stderr when it starts and stops."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
