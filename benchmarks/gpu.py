"""``python -m benchmarks.gpu``: training steps of shardwise and FSDP2 on GPUs.

On one GPU, a fake process group simulates one rank of 8 and of 64: **no network is involved**. Each
gather is a copy on the device, and reductions do nothing, so this shows the overhead of an engine
on a GPU, and not how it scales. Each engine runs in its own processes, which take turns; figures
are medians over processes.

On several GPUs (``--nproc 8``, or ``torchrun --nproc-per-node 8 -m benchmarks.gpu``), the ranks are
real and use NCCL. In each round, every engine builds the model, trains it and frees it, so that
engines do not affect each other's memory. Figures are maxima over ranks. *Communication* is the
time in which a collective runs on the device, and *exposed* the part of it in which nothing else
runs.

Models, in bfloat16 with float32 shards, activation checkpointing and fused AdamW:

- *gpt-175b*: as many blocks of its shape (width 12,288, 96 heads) as fit;
- *llama-8b*: the whole Llama-3.1-8B of `transformers`;
- *tiny*: a model to test this script, also on a CPU.

FLOPs are those of all matrix products of a step, including recomputation. The peak of the GPU is
that of a product of two square bfloat16 matrices in the same process. Allocator calls are requests
to torch's allocator per step, and device allocations its requests to the driver. *Host waits* are
waits for a stream or an event of the device.
"""

import gc
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import make_parser, print_figures
from benchmarks.gpu_figures import (
    count_flops,
    device_figures,
    gigabytes,
    milliseconds,
    product_flops,
    step_figures,
)
from benchmarks.gpu_models import MODELS, make_work
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures
from shardwise.bench.traffic import watch_traffic
from shardwise.launch.environment import read_rank_env
from shardwise.launch.local import check_num_ranks, run_on_local_ranks
from shardwise.launch.world import World, join_world

BASE = "fsdp2"
COMPARED = {BASE: "fsdp2", "shardwise": "shardwise-fsdp"}  # rows of `shardwise bench`


@dataclass(frozen=True, slots=True)
class Task:
    """One engine on one model in its own process, as one of ``ranks`` simulated ranks."""

    model: str
    blocks: int
    engine: str
    ranks: int
    device: str
    steps: int

    def __str__(self) -> str:
        return f"{self.model}, {self.blocks} blocks, {self.ranks} ranks: {self.engine}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = make_parser("gpu", __doc__, rounds=3)
    parser.add_argument("--models", default="gpt-175b,llama-8b", help="models, comma-separated")
    parser.add_argument("--nproc", type=int, help="number of real ranks, each on its own GPU")
    parser.add_argument(
        "--ranks", default="8,64", help="numbers of ranks to simulate on one GPU, comma-separated"
    )
    parser.add_argument("--blocks", type=int, help="number of blocks, instead of each model's own")
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps per turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    _check(parser, options)
    env = read_rank_env(os.environ)
    if env is not None:
        env.check_nproc(options.nproc)
        with join_world(env) as world:
            _compare_on_ranks(world, options)
    elif options.nproc is not None:
        check_num_ranks(options.nproc, "--nproc")
        run_on_local_ranks(options.nproc, _compare_on_ranks, options)
    else:
        _compare_on_one_gpu(options)


def _check(parser: ArgumentParser, options: Namespace) -> None:
    if unknown := [name for name in options.models.split(",") if name not in MODELS]:
        parser.error(f"unknown models {unknown}; expected some of {', '.join(MODELS)}")
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        parser.error("there is no GPU; --device cpu --models tiny tests this script")
    if options.device == "cpu" and has_gpu:
        parser.error("ranks take the GPUs that they see; hide them: CUDA_VISIBLE_DEVICES=''")


# -- one GPU ---------------------------------------------------------------------------------------


def _compare_on_one_gpu(options: Namespace) -> None:
    device, steps = options.device, options.steps
    tasks = [
        Task(name, options.blocks or MODELS[name].blocks, engine, ranks, device, steps)
        for name in options.models.split(",")
        for ranks in map(int, options.ranks.split(","))
        for engine in COMPARED
    ]
    cases = {str(task): partial(measure_in_new_process, task) for task in tasks}
    rounds = harness.merge([harness.interleave(cases, options.rounds, title="processes")])
    rows = {name: harness.medians(rounds, name) for name in cases}
    columns = (
        ("tokens/s", "tokens_per_second", "{:,.0f}".format),
        ("TFLOP/s", "flops_per_second", lambda flops: f"{flops / 1e12:.3g}"),
        ("of peak", "share_of_product", "{:.0%}".format),
        ("peak GB", "allocated_peak", gigabytes),
        ("reserved GB", "reserved_peak", gigabytes),
        ("kernels", "kernel_launches", "{:.0f}".format),
        ("host waits", "host_waits", "{:.0f}".format),
        ("allocator calls", "allocator_calls", "{:.0f}".format),
        ("device allocations", "device_allocations", "{:.1f}".format),
    )
    title = "one rank; no network is involved"
    tasks_by_name = {str(task): asdict(task) for task in tasks}
    processes = {name: [round_.cases[name] for round_ in rounds] for name in cases}
    document = {"tasks": tasks_by_name, "processes": processes}
    print_figures(title, columns, rows, options.out, **document)


def measure_in_new_process(task: Task, _number: int) -> Figures:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, task).result()


def measure(task: Task) -> Figures:
    """Measure one engine on rank 0 of a simulated world. On a CPU, there are no memory figures."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=task.ranks, store=FakeStore())
    device = torch.device(task.device)
    peak = product_flops(device)
    work = make_work(task.model, task.blocks, device)
    trainee, batch = ENGINES[COMPARED[task.engine]].start(work), work.batch(0, 0)
    step = partial(trainee.step, batch)
    figures = step_figures(step, task.steps, device)
    seconds, flops = figures.pop("seconds"), count_flops(step)
    figures |= {
        "tokens_per_second": MODELS[task.model].tokens / seconds,
        "flops": flops,  # per step
        "flops_per_second": flops / seconds,
        "peak_flops_per_second": peak,
        "share_of_product": flops / seconds / peak,
        **device_figures(step, device),
    }
    dist.destroy_process_group()
    return figures


# -- several GPUs ----------------------------------------------------------------------------------

_COLUMNS = (
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


def _compare_on_ranks(world: World, options: Namespace) -> None:
    """Measure on every rank; rank 0 prints."""
    rows: dict[str, dict[str, Any]] = {}
    rounds_by_model = {}
    for name in options.models.split(","):
        cases = {
            engine: partial(_measure_turn, world, options, name, ENGINES[row])
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
    harness.make_console().print(harness.make_table(title, _COLUMNS, rows))
    if options.out is not None:
        written = {name: row | {"ratio": asdict(row["ratio"])} for name, row in rows.items()}
        by_model = {name: list(map(asdict, rounds)) for name, rounds in rounds_by_model.items()}
        document = {"ranks": world.size, "backend": dist.get_backend()}
        harness.write_json(options.out, {**document, "rounds": by_model, "rows": written})


def _measure_turn(world: World, options: Namespace, name: str, engine: Any, number: int) -> Figures:
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


if __name__ == "__main__":
    main()
