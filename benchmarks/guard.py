"""``python -m benchmarks.guard``: what the watch over diverging ranks costs while nothing is wrong.

In a healthy step the guard only keeps books, on the host: a ticket and its tag for each collective,
the state of its link under a lock, a note of where the rank is and of the units that it entered.
Each of these is timed by itself, times how often a step does it, and set against the step. (The
whole cannot be seen in an A/B of steps: it is a hundred times smaller than their scatter.)
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

import shardwise as sw
from shardwise.runtime.engine import runtime_of_root
from shardwise.schedule.events import EventKind
from shardwise.train.model import GPT, Block, Shape
from shardwise.transport.communicator import communicator
from shardwise.transport.host.collectives import Exchange, HostCollectives

SHAPE = Shape(vocabulary=256, context=128, width=384, layers=6, heads=4)  # 10.7 million parameters
CPU = torch.device("cpu")
REPETITIONS = 2000


@dataclass(frozen=True, slots=True)
class Chore:
    """Something that the guard does in every step."""

    name: str
    microseconds: float
    times_a_step: int

    @property
    def seconds_a_step(self) -> float:
        return self.microseconds * self.times_a_step / 1e6


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--port", type=int, default=29556)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    spawn(run_rank, args=(options,), nprocs=options.ranks)


def run_rank(rank: int, options: argparse.Namespace) -> None:
    """One rank's part of the run; rank 0 reports."""
    torch.set_num_threads(max(1, torch.get_num_threads() // options.ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=rank,
        world_size=options.ranks,
    )
    torch.manual_seed(0)
    model = sw.fully_shard(GPT(SHAPE), units=Block)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    step_seconds = time_steps(model, options.steps, options.batch)
    chores = measure(model)
    if rank == 0:
        report(chores, step_seconds, num_parameters, options)
    dist.barrier()
    dist.destroy_process_group()


def time_steps(model: torch.nn.Module, steps: int, batch: int) -> float:
    """The fastest of ``steps`` steps: the one of which the guard is the largest share."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    taken = []
    for _ in range(steps):
        tokens = torch.randint(0, SHAPE.vocabulary, (batch, SHAPE.context + 1))
        dist.barrier()
        began = time.perf_counter()
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(model: torch.nn.Module) -> list[Chore]:
    """Time every chore alone and count it in the last step of ``model``."""
    records = sw.ledger(model).records()
    kinds = [record.event.kind for record in records]
    forwards, backwards = kinds.count(EventKind.FORWARD), kinds.count(EventKind.BACKWARD)
    collectives = sum(len(record.works) for record in records) + 1  # agreeing on unused parameters

    scheduler = model.__dict__["_shardwise"].runtime.scheduler
    unit = scheduler.units[1].plan

    def note() -> None:
        scheduler.report(f"forward of {unit.label}")

    def enter() -> None:
        links.recent_units.append(7, unit.label)

    links = communicator(runtime_of_root(model).axis.world, CPU)
    queue = links.gather
    assert isinstance(queue, HostCollectives)
    note_one = partial(note_collective, queue)
    return [
        Chore(
            "id, tags and state of a collective",
            microseconds(note_one),
            collectives,
        ),
        Chore("note where the rank is", microseconds(note), forwards + backwards + 1),
        Chore("note the unit that is entered", microseconds(enter), forwards),
        Chore("ask whether to recover", microseconds(links.recover), forwards),
    ]


def note_collective(queue: HostCollectives) -> None:
    """What is noted of a collective of two exchanges."""
    exchange = Exchange(queue.world, 1 << 20, lambda _: None)
    collective = queue._next_id("gather blocks.0", exchange)
    queue._begin(collective)
    _ = collective.tag, collective.tag
    queue._end(collective)


def microseconds(chore: Callable[[], object]) -> float:
    """Median over batches of the mean time of a call."""
    means = []
    for _ in range(15):
        began = time.perf_counter()
        for _ in range(REPETITIONS):
            chore()
        means.append((time.perf_counter() - began) / REPETITIONS)
    return statistics.median(means) * 1e6


def report(
    chores: list[Chore], step_seconds: float, num_parameters: int, options: argparse.Namespace
) -> None:
    """Print the table, and write the figures where asked."""
    total = sum(chore.seconds_a_step for chore in chores)
    share = total / step_seconds
    title = f"the guard in a step of {step_seconds * 1e3:.0f} ms, {options.ranks} CPU ranks"
    table = Table("chore", title=title)
    for heading in ("µs", "times a step", "share of the step"):
        table.add_column(heading, justify="right")
    for chore in chores:
        part = chore.seconds_a_step / step_seconds
        table.add_row(
            chore.name, f"{chore.microseconds:.2f}", str(chore.times_a_step), f"{part:.4%}"
        )
    table.add_row("together", "", "", f"{share:.4%}")
    Console().print(table)
    if options.out is not None:
        figures = {
            "ranks": options.ranks,
            "parameters": num_parameters,
            "sequences_of_a_rank": options.batch,
            "context": SHAPE.context,
            "step_seconds": step_seconds,
            "guard_seconds": total,
            "share": share,
            "chores": [asdict(chore) for chore in chores],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
