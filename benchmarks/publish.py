"""``python -m benchmarks.publish``: whole weights out of sharded models, compared with PyTorch's.

On local CPU ranks, a GPT in float32 hands out its weights: by `sw.full_tensors`, to all ranks or to
one; by `sw.publish` in bfloat16, all of them or only what a training step has changed; and by
torch's full state dict of an FSDP2 model, on all ranks or, with ``cpu_offload``, on one.

The receiver drops each tensor. "received" is counted by shardwise's sockets, per receiver, without
what the receiver owns itself, and relative to the weights in float32. "memory" is the peak of
malloc on the rank where it is largest, minus the bytes before.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round
from shardwise.bench.memory import Peak, allocated_bytes
from shardwise.bench.options import Setting
from shardwise.bench.work import gpt_work
from shardwise.comm.communicator import communicator
from shardwise.features.host_collectives import HostCollectives
from shardwise.launch.world import World
from shardwise.runtime.module import runtime_of_root
from shardwise.train.model import gpt_shape
from shardwise.weights import Manifest, Update

BASE = "torch, all ranks"
SAMPLE_SECONDS = 0.002
LEARNING_RATE = 1e-6  # as in reinforcement learning


class Nowhere:
    """A target that drops what it gets, and counts the bytes."""

    accepts_runs = True

    def __init__(self) -> None:
        self.version = self.num_bytes = 0

    def begin(self, manifest: Manifest) -> None:
        del manifest
        self.num_bytes = 0

    def send(self, bucket: Sequence[Update]) -> None:
        self.num_bytes += sum(update.num_bytes for update in bucket)

    def commit(self, version: int) -> None:
        self.version = version


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("publish", __doc__, ranks=2, rounds=10)
    parser.add_argument("--width", type=int, default=576, help="width of the GPT (576: 50M)")
    parser.add_argument("--layers", type=int, default=11, help="number of blocks")
    parser.add_argument("--bucket", type=float, default=8, help="size of a bucket in MB")
    options = parser.parse_args()
    by_rank = harness.run_ranks(options.ranks, measure, options)
    rounds = harness.merge(by_rank, ("seconds", "memory", "received"))
    names = list(rounds[0].cases)
    rows: Mapping[str, Figures] = {name: harness.medians(rounds, name) for name in names}
    for name, figures in rows.items():
        figures["ratio"] = harness.ratio(rounds, name, BASE).median
    columns = (
        ("ms", "seconds", lambda seconds: f"{seconds * 1e3:.0f}"),
        ("of torch's", "ratio", "{:.2f}".format),
        ("received / weights", "received", "{:.3f}".format),
        ("memory, MB", "memory", lambda num_bytes: f"{num_bytes / 1e6:.0f}"),
    )
    title = f"whole weights, {options.ranks} CPU ranks, buckets of {options.bucket:g} MB"
    print_figures(title, columns, rows, options.out, ranks=options.ranks, width=options.width)


def measure(world: World, options: Namespace) -> list[Round]:
    """Run the rounds on one rank."""
    shape = gpt_shape(8192, 128, options.width, options.layers, heads=4)
    setting = Setting("", shape, world.size, "fp32", (), options.rounds, batch=1)
    work = gpt_work(setting)
    ours, torchs = (ENGINES[name].start(work) for name in ("shardwise-fsdp", "fsdp2"))
    for group in ours.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    model, bucket_bytes = ours.model, int(options.bucket * 1e6)
    changed, target, everything = torch.bfloat16, Nowhere(), Nowhere()

    def iterate(to: int | None) -> None:
        whole = sw.full_tensors(model, bucket_bytes=bucket_bytes, to="all" if to is None else to)
        for _ in whole:
            pass

    publish = partial(sw.publish, model, dtype=changed, bucket_bytes=bucket_bytes)
    full = StateDictOptions(full_state_dict=True)
    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    cases: dict[str, Callable[[], object]] = {
        "full_tensors, all ranks": partial(iterate, None),
        "full_tensors, one rank": partial(iterate, 0),
        "publish, everything": partial(publish, everything, only_changed=False),
        "publish, only changed": partial(publish, target),
        BASE: lambda: get_model_state_dict(torchs.model, options=full),
        "torch, one rank": lambda: get_model_state_dict(torchs.model, options=on_first),
    }

    def case(name: str, number: int) -> Figures:
        if name == "publish, only changed":
            ours.step(work.batch(number, world.rank))
        received = None if "torch" in name else partial(received_bytes, model)
        return timed(cases[name], received)

    named = {name: partial(case, name) for name in cases}
    return harness.interleave(
        named, options.rounds, title="weights", warm_up=1, visible=world.is_first
    )


def timed(action: Callable[[], object], received: Callable[[], float] | None) -> Figures:
    """Measure until all ranks are done; ``received`` is relative to the weights."""
    dist.barrier()
    before = received() if received else 0.0
    began = time.perf_counter()
    with Peak(allocated_bytes, SAMPLE_SECONDS) as peak:
        action()
        dist.barrier()
    figures = {"seconds": time.perf_counter() - began, "memory": float(peak.bytes)}
    if received:
        figures["received"] = received() - before
    return figures


def received_bytes(model: nn.Module) -> float:
    """What the other ranks have sent in gathers, relative to the weights: to the first rank, which
    receives in every case, if there are two ranks."""
    runtime = runtime_of_root(model)
    queue = communicator(runtime.mesh.world, torch.device("cpu")).gather
    assert isinstance(queue, HostCollectives)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    return queue.sent[1] / weights


if __name__ == "__main__":
    main()
