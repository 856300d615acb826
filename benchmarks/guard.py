"""``python -m benchmarks.guard``: the cost of detecting diverged ranks while nothing is wrong.

In a healthy step, the guard only keeps records on the host: an id and tags for each collective, the
state of its queue under a lock, the rank's current position, and the units that it has entered.
Each of these tasks is timed separately, multiplied by its number of calls per step, and compared
with the step. (A comparison of whole steps cannot show the cost, which is a hundred times smaller
than their scatter.)
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures
from shardwise.bench.options import Setting
from shardwise.bench.work import gpt_work
from shardwise.comm.communicator import communicator
from shardwise.features.host_collectives import HostCollectives
from shardwise.launch.world import World
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import EventKind
from shardwise.train.model import gpt_shape

BATCHES, REPETITIONS = 15, 2000


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("guard", __doc__, ranks=2, rounds=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument(
        "--width", type=int, default=384, help="width of the GPT (384: 10.7M parameters)"
    )
    options = parser.parse_args()
    step_seconds, tasks = harness.run_ranks(options.ranks, measure, options)[0]
    for task in tasks.values():
        task["seconds"] = task["microseconds"] * task["times_a_step"] / 1e6
        task["share"] = task["seconds"] / step_seconds
    total = sum(task["seconds"] for task in tasks.values())
    rows = tasks | {"together": {"seconds": total, "share": total / step_seconds}}
    columns = (
        ("µs", "microseconds", "{:.2f}".format),
        ("calls per step", "times_a_step", "{:.0f}".format),
        ("share of the step", "share", "{:.4%}".format),
    )
    title = f"the guard in a step of {step_seconds * 1e3:.0f} ms, {options.ranks} CPU ranks"
    setting = {"ranks": options.ranks, "sequences_of_a_rank": options.batch, "width": options.width}
    print_figures(title, columns, rows, options.out, **setting, step_seconds=step_seconds)


def measure(world: World, options: Namespace) -> tuple[float, dict[str, Figures]]:
    """Measure the fastest step, of which the guard has the largest share, and each task alone."""
    shape = gpt_shape(vocabulary=256, context=128, width=options.width, layers=6, heads=4)
    setting = Setting("", shape, world.size, "fp32", (), options.rounds, options.batch)
    work = gpt_work(setting)
    trainee = ENGINES["shardwise-fsdp"].start(work)

    def step(number: int) -> Figures:
        began = time.perf_counter()
        trainee.step(work.batch(number, world.rank))
        return {"seconds": time.perf_counter() - began}

    rounds = harness.interleave(
        {"step": step}, options.rounds, title="steps", warm_up=1, visible=world.is_first
    )
    fastest = min(round_.cases["step"]["seconds"] for round_ in rounds)
    return fastest, time_tasks(trainee.model)


def time_tasks(model: torch.nn.Module) -> dict[str, Figures]:
    """Time every task, and count its calls in the last step of ``model``."""
    records = sw.ledger(model).records()
    kinds = [record.event.kind for record in records]
    forwards, backwards = kinds.count(EventKind.FORWARD), kinds.count(EventKind.BACKWARD)
    collectives = sum(len(record.works) for record in records) + 1  # agreeing on unused parameters
    runtime = runtime_of_root(model)
    label = runtime.scheduler.units[1].plan.label
    comm = communicator(runtime.mesh.world, torch.device("cpu"))
    assert isinstance(comm.gather, HostCollectives)
    tasks: dict[str, tuple[Callable[[], object], int]] = {
        "id, tags and state of a collective": (partial(note_collective, comm.gather), collectives),
        "note where the rank is": (
            lambda: runtime.scheduler.report(f"forward of {label}"),
            forwards + backwards + 1,
        ),
        "note the unit that is entered": (lambda: comm.watch.enter(label), forwards),
        "ask whether to recover": (comm.watch.recover, forwards),
    }
    return {
        name: {"microseconds": microseconds(task), "times_a_step": times}
        for name, (task, times) in tasks.items()
    }


def note_collective(queue: HostCollectives) -> None:
    """Keep the records of a collective with two exchanges."""
    collective = queue._next_id("gather blocks.0", queue.world, 1 << 20)
    _ = collective.tag
    queue._perform(collective, lambda _tag: None)


def microseconds(task: Callable[[], object]) -> float:
    """Return the mean time of a call, as a median over batches of calls."""
    means = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(REPETITIONS):
            task()
        means.append((time.perf_counter() - began) / REPETITIONS)
    return statistics.median(means) * 1e6


if __name__ == "__main__":
    main()
