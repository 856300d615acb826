"""``python -m benchmarks.host_step``: the optimizer's step on shards in host memory.

On one CPU rank, AdamW steps the parameters of a GPT in float32: with fused kernels, with foreach,
and with torch's loop over parameters, which is its default on a CPU; each on one thread, as
torchrun sets it, and on all cores. *time* is relative to fused kernels on one thread in the same
round (median).
"""

import os
import time
from argparse import Namespace
from functools import partial
from itertools import product
from typing import Any

import torch

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.harness import Figures
from shardwise.launch.world import World
from shardwise.train.model import GPT, Block, gpt_shape

KERNELS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
BASE = "fused, 1 thread"
WARM_UP = 2  # rounds


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("host_step", __doc__, rounds=10)
    parser.add_argument(
        "--width", type=int, default=384, help="width of the GPT (384: 10.7M parameters)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="beside one thread")
    options = parser.parse_args()
    rows = harness.run_ranks(1, measure, options)[0]
    columns = (
        ("step, ms", "seconds", lambda seconds: f"{seconds * 1e3:.1f}"),
        ("time", "time", "{:.2f}".format),
    )
    title = "AdamW's step on shards in host memory"
    print_figures(title, columns, rows, options.out, width=options.width)


def measure(world: World, options: Namespace) -> dict[str, Figures]:
    """Step with each kind of kernel and number of threads in turns."""
    shape = gpt_shape(vocabulary=256, context=128, width=options.width, layers=6, heads=4)
    model = sw.fully_shard(GPT(shape), units=Block)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), **kernels) for name, kernels in KERNELS.items()
    }
    cases = {
        f"{name}, {threads} {'thread' if threads == 1 else 'threads'}": partial(
            step, optimizer, threads
        )
        for (name, optimizer), threads in product(optimizers.items(), sorted({1, options.threads}))
    }
    rounds = harness.interleave(
        cases, options.rounds, title="steps", warm_up=WARM_UP, visible=world.is_first
    )
    return {
        name: {
            "seconds": harness.medians(rounds, name)["seconds"],
            "time": harness.ratio(rounds, name, BASE).median,
        }
        for name in cases
    }


def step(optimizer: Any, threads: int, _round: int) -> Figures:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        began = time.perf_counter()
        optimizer.step()
        return {"seconds": time.perf_counter() - began}
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
