"""The part of `benchmarks.gpu` that runs on several GPUs, with a real process group.

In each round, every engine builds the model, trains it and frees it, so that engines do not affect
each other's memory. Figures are maxima over ranks.
"""

import gc
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.gpu_figures import device_figures, gigabytes, milliseconds, step_figures
from benchmarks.gpu_models import MODELS, make_work
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures
from shardwise.bench.traffic import watch_traffic
from shardwise.launch.world import World

__all__ = ["COMPARED", "compare"]

BASE = "fsdp2"
COMPARED = {BASE: "fsdp2", "shardwise": "shardwise-fsdp"}  # rows of `shardwise bench`
COLUMNS = (
    ("ms", "seconds", milliseconds),
    (f"/ {BASE}", "ratio", str),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
    ("peak GB", "allocated_peak", gigabytes),
    ("reserved GB", "reserved_peak", gigabytes),
    ("comm. ms", "communication_seconds", milliseconds),
    ("exposed ms", "exposed_seconds", milliseconds),
    ("collectives", "collectives", "{:.0f}".format),
    ("sent GB", "sent_bytes", gigabytes),
    ("kernels", "kernel_launches", "{:.0f}".format),
    ("waits", "host_waits", "{:.0f}".format),
    ("loss", "loss", "{:.4f}".format),
)


def compare(world: World, options: Namespace) -> None:
    """Measure on every rank; rank 0 prints."""
    rows: dict[str, dict[str, Any]] = {}
    rounds_by_model = {}
    for name in options.models.split(","):
        cases = {
            engine: partial(_train, world, options, name, ENGINES[row])
            for engine, row in COMPARED.items()
        }
        own = harness.interleave(cases, options.rounds, title=name, visible=world.is_first)
        rounds = rounds_by_model[name] = harness.merge(world.gather(own), worst=None)
        for engine in cases:
            figures = harness.medians(rounds, engine)
            rows[f"{name}: {engine}"] = figures | {
                "ratio": harness.ratio(rounds, engine, BASE),
                "tokens_per_second": MODELS[name].tokens / figures["seconds"],
            }
    if not world.is_first:
        return
    title = f"{world.size} ranks on {world.device.type}, {dist.get_backend()}"
    harness.make_console().print(harness.make_table(title, COLUMNS, rows))
    if options.out is not None:
        written = {name: row | {"ratio": asdict(row["ratio"])} for name, row in rows.items()}
        by_model = {name: list(map(asdict, rounds)) for name, rounds in rounds_by_model.items()}
        document = {"ranks": world.size, "backend": dist.get_backend()}
        harness.write_json(options.out, {**document, "rounds": by_model, "rows": written})


def _train(world: World, options: Namespace, name: str, engine: Any, number: int) -> Figures:
    """Measure one turn of one engine on this rank."""
    device = world.device
    work = make_work(name, options.blocks, device)
    trainee, batch = engine.start(work), work.batch(number, world.rank)
    step = partial(trainee.step, batch)
    figures = step_figures(step, options.steps, device)
    with watch_traffic(trainee.model) as traffic:
        loss = step()
    figures |= device_figures(step, device)
    figures |= {
        "collectives": traffic.num_collectives,
        "sent_bytes": traffic.sent_bytes,
        "loss": float(loss),
    }
    dist.barrier()
    del work, trainee, step
    gc.collect()  # FSDP2's modules are in reference cycles
    return figures
