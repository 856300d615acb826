"""``python -m benchmarks.guard``: what detecting diverged ranks costs while nothing is wrong.

In a healthy step the guard only keeps records, on the host: an id and tags for each collective, the
state of its queue under a lock, a note of where the rank is and of the units that it entered. Each
of these is timed by itself, multiplied by its number in a step, and compared with the step. (The
whole cannot be seen in a comparison of steps: it is a hundred times smaller than their scatter.)
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch

import shardwise as sw
from benchmarks import make_parser
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures
from shardwise.bench.options import Setting
from shardwise.bench.work import gpt_work
from shardwise.launch.world import World
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import EventKind
from shardwise.train.model import Shape
from shardwise.transport.communicator import communicator
from shardwise.transport.host.collectives import HostCollectives

BATCHES, REPETITIONS = 15, 2000


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("guard", __doc__, ranks=2, rounds=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--width", type=int, default=384, help="of the GPT: 10.7M parameters")
    options = parser.parse_args()
    step_seconds, chores = harness.run_ranks(options.ranks, measure, options)[0]
    for chore in chores.values():
        chore["seconds"] = chore["microseconds"] * chore["times_a_step"] / 1e6
        chore["share"] = chore["seconds"] / step_seconds
    total = sum(chore["seconds"] for chore in chores.values())
    rows = chores | {"together": {"seconds": total, "share": total / step_seconds}}
    columns = (
        ("µs", "microseconds", "{:.2f}".format),
        ("times a step", "times_a_step", "{:.0f}".format),
        ("share of the step", "share", "{:.4%}".format),
    )
    title = f"the guard in a step of {step_seconds * 1e3:.0f} ms, {options.ranks} CPU ranks"
    setting = {"ranks": options.ranks, "sequences_of_a_rank": options.batch, "width": options.width}
    harness.publish(title, columns, rows, options.out, **setting, step_seconds=step_seconds)


def measure(world: World, options: Namespace) -> tuple[float, dict[str, Figures]]:
    """The fastest step (of which the guard is the largest share), and each chore alone."""
    shape = Shape(vocabulary=256, context=128, width=options.width, layers=6, heads=4)
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
    return fastest, time_chores(trainee.model)


def time_chores(model: torch.nn.Module) -> dict[str, Figures]:
    """Time every chore, and count it in the last step of ``model``."""
    records = sw.ledger(model).records()
    kinds = [record.event.kind for record in records]
    forwards, backwards = kinds.count(EventKind.FORWARD), kinds.count(EventKind.BACKWARD)
    collectives = sum(len(record.works) for record in records) + 1  # agreeing on unused parameters
    runtime = runtime_of_root(model)
    label = runtime.scheduler.units[1].plan.label
    links = communicator(runtime.mesh.world, torch.device("cpu"))
    assert isinstance(links.gather, HostCollectives)
    chores: dict[str, tuple[Callable[[], object], int]] = {
        "id, tags and state of a collective": (partial(note_collective, links.gather), collectives),
        "note where the rank is": (
            lambda: runtime.scheduler.report(f"forward of {label}"),
            forwards + backwards + 1,
        ),
        "note the unit that is entered": (lambda: links.enter(label), forwards),
        "ask whether to recover": (links.recover, forwards),
    }
    return {
        name: {"microseconds": microseconds(chore), "times_a_step": times}
        for name, (chore, times) in chores.items()
    }


def note_collective(queue: HostCollectives) -> None:
    """What is noted of a collective of two exchanges."""
    collective = queue._next_id("gather blocks.0", queue.world, 1 << 20)
    queue._begin(collective)
    _ = collective.tag, collective.tag
    queue._end(collective)


def microseconds(chore: Callable[[], object]) -> float:
    """Median over batches of the mean time of a call."""
    means = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(REPETITIONS):
            chore()
        means.append((time.perf_counter() - began) / REPETITIONS)
    return statistics.median(means) * 1e6


if __name__ == "__main__":
    main()
