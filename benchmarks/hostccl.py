"""``python -m benchmarks.hostccl``: steps of DDP and FSDP2 on the backend "hostccl" and on Gloo.

The GPT of `shardwise bench` trains on CPU ranks of one host. PyTorch's engines run on a process
group of either backend, and shardwise on Gloo's group. All cases take turns in one run, and an
all-reduce of four bytes is one of them.

Ratios are to the same engine on Gloo, within a round. *CPU* is the mean over ranks of the time that
a rank's process computes, with its threads.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardwise.hostccl  # noqa: F401 - registers the backend
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.baselines import Fsdp2, start_ddp
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round
from shardwise.bench.options import Setting
from shardwise.bench.work import TrainedModel, Work, gpt_work
from shardwise.launch.world import World
from shardwise.train.model import gpt_shape

BACKENDS = ("gloo", "hostccl")
PEERS: dict[str, Callable[..., TrainedModel]] = {"ddp": start_ddp, "fsdp2": Fsdp2()}
OURS = "shardwise-fsdp"
NUM_SMALL = 100  # all-reduces of 4 bytes


def main() -> None:
    """Parse the command line, measure, print."""
    parser = make_parser("hostccl", __doc__, ranks=2, rounds=15)
    parser.add_argument("--width", type=int, default=384, help="width of the GPT")
    parser.add_argument("--layers", type=int, default=5, help="layers of the GPT")
    parser.add_argument("--seq", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    options = parser.parse_args()
    by_rank = harness.run_ranks(options.ranks, measure, options)
    rounds = harness.merge(by_rank)
    rows = {name: _row(rounds, name) for name in rounds[0].cases}
    columns = (
        ("ms", "seconds", lambda seconds: f"{1e3 * seconds:.2f}"),
        ("CPU ms", "cpu_seconds", lambda seconds: f"{1e3 * seconds:.2f}"),
        ("time / Gloo", "time_ratio", "{:.2f}".format),
        ("CPU / Gloo", "cpu_ratio", "{:.2f}".format),
    )
    setting = {
        name: getattr(options, name) for name in ("ranks", "width", "layers", "seq", "batch")
    }
    title = f"{options.ranks} ranks, width {options.width}, {options.layers} layers"
    print_figures(title, columns, rows, options.out, **setting)


def _row(rounds: Sequence[Round], case: str) -> dict[str, Any]:
    row: dict[str, Any] = harness.medians(rounds, case)
    engine, _, backend = case.partition(" on ")
    if backend == "hostccl":
        base = f"{engine} on gloo"
        row["time_ratio"] = harness.ratio(rounds, case, base).median
        row["cpu_ratio"] = harness.ratio(rounds, case, base, "cpu_seconds").median
    return row


def measure(world: World, options: Namespace) -> list[Round]:
    """Measure all cases on this rank."""
    torch.set_num_threads(1)
    width, layers = options.width, options.layers
    shape = gpt_shape(3072, context=options.seq, width=width, layers=layers, heads=width // 64)
    setting = Setting("", shape, world.size, "fp32", (), options.rounds, options.batch)
    work = gpt_work(setting)
    cases: dict[str, Callable[[int], Figures]] = {}
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        small = torch.ones(1)
        for engine, start in PEERS.items():
            cases[f"{engine} on {backend}"] = _step(work, start(work, group), world)
        cases[f"all-reduce on {backend}"] = partial(_all_reduce, small, group)
    cases[OURS] = _step(work, ENGINES[OURS].start(work), world)
    return harness.interleave(
        cases, options.rounds, title="steps", warm_up=3, visible=world.is_first
    )


def _step(work: Work, trained: TrainedModel, world: World) -> Callable[[int], Figures]:
    def step(number: int) -> Figures:
        batch = work.batch(number, world.rank)
        return _timed(lambda: trained.step(batch))

    return step


def _all_reduce(small: torch.Tensor, group: dist.ProcessGroup, _number: int) -> Figures:
    def run() -> None:
        for _ in range(NUM_SMALL):
            dist.all_reduce(small, group=group)

    return {name: seconds / NUM_SMALL for name, seconds in _timed(run).items()}


def _timed(run: Callable[[], object]) -> Figures:
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


if __name__ == "__main__":
    main()
