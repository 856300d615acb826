"""``python -m benchmarks.switches``: all combinations of training options.

`shardwise train` runs on local CPU ranks with precision x checkpointing x offload x accumulation,
81 rows. Each row trains a few steps on the same batches as the plain run (float32, all options
off):

- *loss*: the largest relative difference from the plain run in any step, in units of the precision
  (2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32); float16 may skip its first steps;
- *transient*: the peak memory that the engine allocates and frees in a step (gathered units,
  gradients and reductions), and its difference from the forecast, which also counts the gradient of
  the tied embedding that autograd keeps;
- *time*: step time relative to the plain run in the same round.

Nothing is asserted; rows outside the expected range are marked.
"""

import gc
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch.distributed as dist

from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.harness import Figures
from shardwise.launch.world import World
from shardwise.runtime.module import runtime_of_root
from shardwise.train import loop
from shardwise.train.build import memory_of
from shardwise.train.config import Config
from shardwise.train.sinks import StepMetrics
from shardwise.train.trainer import Trainer

MODELS = {
    "50M": {"context": 128, "width": 640, "layers": 10, "heads": 10},
    "1M": {"context": 64, "width": 128, "layers": 5, "heads": 4},
}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
CHECKPOINTING = ("none", "full", "products")
OFFLOADS = ("none", "optimizer", "all")
ACCUMULATION = ("1", "4 shards", "4 whole")
PLAIN = ("fp32", "none", "none", "1")
MICRO_BATCHES = 4
WARM_UP = 2  # steps
MEMORY_OFF, LOSS_OFF = 0.03, {"fp32": 256.0, "bf16": 1.0, "fp16": 1.0}


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("switches", __doc__, ranks=2, rounds=4)
    parser.add_argument("--size", choices=MODELS, default="50M")
    options = parser.parse_args()
    rows = harness.run_ranks(options.ranks, measure_all, options)[0]
    columns = (
        ("loss, units off", "loss_units", "{:.2f}".format),
        ("transient, MB", "transient_bytes", lambda peak: f"{peak / 1e6:.1f}"),
        ("vs. forecast", "memory_off", "{:+.1%}".format),
        ("time", "time", "{:.2f}".format),
        ("", "is_off", lambda is_off: "off" if is_off else ""),
    )
    title = f"GPT of {options.size}, {options.ranks} CPU ranks"
    print_figures(title, columns, rows, options.out, ranks=options.ranks, size=options.size)


def make_config(options: Namespace, switches: tuple[str, ...]) -> Config:
    precision, checkpointing, offload, accumulation = switches
    memory: dict[str, Any] = {"offload": offload, "accumulate": accumulation.split()[-1]}
    if accumulation == "1":
        memory["accumulate"] = "shards"
    if checkpointing != "none":
        memory |= {"checkpoint_every": 1, "checkpoint": checkpointing}
    train = {
        "steps": 10_000,
        "warmup_share": 0.0,
        "lr": 1e-4,
        "global_batch": options.ranks * MICRO_BATCHES,
        "micro_batch": 0 if accumulation == "1" else 1,
    }
    document = {
        "model": MODELS[options.size],
        "train": train,
        "shard": {"nproc": options.ranks},
        "precision": {"compute": PRECISIONS[precision]},
        "memory": memory,
    }
    return Config.model_validate(document)


def measure_all(world: World, options: Namespace) -> dict[str, Figures]:
    """Measure all rows on one rank; the result is the same on every rank."""
    plain_config = make_config(options, PLAIN)
    steps = loop.steps(Trainer(plain_config, world))
    expected = [next(steps).loss for _ in range(WARM_UP + options.rounds)]
    rows = {}
    for switches in product(PRECISIONS, CHECKPOINTING, OFFLOADS, ACCUMULATION):
        name = ", ".join(switches)
        rows[name] = measure(world, options, switches, steps, expected)
        if world.is_first:  # show rows as they come, because a run takes long
            print(name, rows[name], flush=True)  # noqa: T201
        gc.collect()
    return rows


def measure(
    world: World,
    options: Namespace,
    switches: tuple[str, ...],
    plain: Iterator[StepMetrics],
    expected: list[float],
) -> Figures:
    """Train a model with these options and the plain model in turns."""
    config = make_config(options, switches)
    trainer, losses = Trainer(config, world), []
    steps = loop.steps(trainer)

    def measure_step(run: Iterator[StepMetrics]) -> Figures:
        dist.barrier()
        began = time.perf_counter()
        record = next(run)
        if run is steps:
            losses.append(record.loss)
        dist.barrier()
        return {"seconds": time.perf_counter() - began}

    cases = {"plain": lambda _: measure_step(plain), "own": lambda _: measure_step(steps)}
    rounds = harness.interleave(cases, options.rounds, warm_up=WARM_UP, title="", visible=False)
    rounds = harness.merge(world.gather(rounds))
    transient = max(world.gather(runtime_of_root(trainer.model).pools.peak_bytes))
    forecast = memory_of(config, "cpu")[0]["transient"]
    error = max(
        abs(loss / plain_loss - 1.0) for loss, plain_loss in zip(losses, expected, strict=True)
    )
    loss_units, memory_off = error / UNITS[switches[0]], transient / forecast - 1.0
    is_far = not loss_units <= LOSS_OFF[switches[0]]  # also true for NaN
    return {
        "loss_units": loss_units,
        "transient_bytes": transient,
        "memory_off": memory_off,
        "time": harness.ratio(rounds, "own", "plain").median,
        "is_off": is_far or abs(memory_off) > MEMORY_OFF,
    }


if __name__ == "__main__":
    main()
