"""``python -m benchmarks.recording``: the cost of the ledger and of a recording.

The same model takes steps without a ledger, with it, with a recording of totals, and with a
recording of all events and memory; the cases take turns. Times are CPU seconds of a rank, because
other processes share the machine. They scatter by more than the cost. The cost is therefore also
measured alone, by repeating the calls of a step with the records of a real step.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round
from shardwise.bench.options import Setting
from shardwise.bench.work import gpt_work
from shardwise.launch.world import World
from shardwise.recording.record import DefaultSteps
from shardwise.runtime.ledger import Ledger, Record
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.scheduler import Scheduler
from shardwise.schedule.events import Event, EventKind
from shardwise.train.model import gpt_shape

CALLS = 200  # number of calls that a mean is taken over
BASE = "no ledger"
NUM_STEPS = 1000  # steps of the run that determines the default share of detailed steps


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("recording", __doc__, ranks=2, rounds=25)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--width", type=int, default=256, help="width of the GPT")
    parser.add_argument("--layers", type=int, default=12, help="layers of the GPT")
    options = parser.parse_args()
    by_rank = harness.run_ranks(options.ranks, measure, options)
    rounds = harness.merge([rounds for rounds, _ in by_rank], worst=())
    alone = harness.largest([figures for _, figures in by_rank])
    base = harness.medians(rounds, BASE)["cpu_seconds"]
    rows = {name: _row(rounds, name, alone.get(name, 0.0), base) for name in rounds[0].cases}
    detailed = sum(step in DefaultSteps() for step in range(NUM_STEPS)) / NUM_STEPS
    usual = (1 - detailed) * alone["totals"] + detailed * alone["details"]
    rows["by default"] = {"alone_seconds": usual, "share": usual / base}
    columns = (
        ("CPU s per step", "cpu_seconds", "{:.3f}".format),
        ("/ no ledger", "ratio", "{:.3f}".format),
        ("calls alone, ms", "alone_seconds", lambda seconds: f"{seconds * 1e3:.2f}"),
        ("share of the step", "share", "{:.2%}".format),
    )
    setting = {name: getattr(options, name) for name in ("ranks", "batch", "width", "layers")}
    title = f"recording a step of {base:.2f} CPU seconds, {options.ranks} ranks"
    print_figures(title, columns, rows, options.out, **setting, detailed_share=detailed)


def _row(rounds: Sequence[Round], name: str, alone: float, base: float) -> dict[str, Any]:
    return {
        "cpu_seconds": harness.medians(rounds, name)["cpu_seconds"],
        "ratio": harness.ratio(rounds, name, BASE, "cpu_seconds").median,
        "alone_seconds": alone,
        "share": alone / base,
    }


def measure(world: World, options: Namespace) -> tuple[list[Round], Figures]:
    """Measure CPU seconds of a step in each case, and of the calls alone."""
    width, layers = options.width, options.layers
    shape = gpt_shape(vocabulary=256, context=128, width=width, layers=layers, heads=4)
    setting = Setting("", shape, world.size, "fp32", (), options.rounds, options.batch)
    work = gpt_work(setting)
    trainee = ENGINES["shardwise-fsdp"].start(work)
    scheduler = runtime_of_root(trainee.model).scheduler
    with tempfile.TemporaryDirectory() as directory:

        def recorder(steps: Collection[int]) -> sw.Recorder:
            return sw.record(trainee.model, Path(directory), steps=steps)

        def step(number: int, *, recorded: Collection[int] | None, bare: bool = False) -> Figures:
            batch = work.batch(number, world.rank)
            with nullcontext() if recorded is None else recorder(recorded):
                if bare:
                    vars(scheduler)["_perform"] = partial(perform_only, scheduler)
                began = time.process_time()
                trainee.step(batch)
                seconds = time.process_time() - began
                vars(scheduler).pop("_perform", None)
            return {"cpu_seconds": seconds}

        every = range(1 << 30)
        rounds = harness.interleave(
            {
                BASE: partial(step, recorded=None, bare=True),
                "ledger": partial(step, recorded=None),
                "totals": partial(step, recorded=()),
                "details": partial(step, recorded=every),
            },
            options.rounds,
            title="steps",
            warm_up=2,
            visible=world.is_first,
        )
        trainee.step(work.batch(0, world.rank))
        records = scheduler.ledger.records()
        ledger = seconds_of(partial(write, scheduler.ledger, records))
        alone = {"ledger": ledger}
        for name, steps in (("totals", ()), ("details", every)):
            with recorder(steps):
                alone[name] = seconds_of(partial(write, scheduler.ledger, records))
    return rounds, alone


def perform_only(scheduler: Scheduler, events: Sequence[Event]) -> None:
    """Run `Scheduler._perform` without records."""
    for event in events:
        if event.kind is not EventKind.FORWARD:
            scheduler._do(event.kind, scheduler.units[event.unit])


def write(ledger: Ledger, records: Sequence[Record]) -> None:
    """Record a step as the scheduler does; no activations are saved here."""
    ledger.begin_forward()
    ledger.end_forward(awaits_backward=True)
    for record in records:
        written = Record(record.event, ledger.step, ledger.clock(), record.ended, record.works)
        ledger.append(written)
    ledger.begin_step()


def seconds_of(call: Callable[[], object]) -> float:
    """Return the mean CPU seconds of many calls."""
    began = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - began) / CALLS


if __name__ == "__main__":
    main()
