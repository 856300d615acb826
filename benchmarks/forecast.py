"""``python -m benchmarks.forecast``: predicted and measured steps of this engine.

The models of the other benchmarks are planned and traced on the meta device, and trained on local
CPU ranks. *Bytes* are what a rank sends per step. *Memory* is what a rank's process has allocated
at the peak of a step. Gathered parameters are in an arena that the ranks of a host share, so each
rank counts its share of it.

*Time* is measured in rounds, in the same processes: a short calibration of the machine, then a few
steps of every case. Each round is predicted with its own calibration, so that changes in the
machine's speed affect both. The figures are medians over all rounds: of predicted seconds, measured
seconds, and their ratio in each round. No round is excluded.

``--page FILE`` writes the table into a page of the documentation. ``--figures FILE`` takes it from
an earlier result instead of measuring.
"""

import gc
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import shardwise as sw
from benchmarks import make_parser, print_figures
from benchmarks.forecast_page import write_table
from shardwise.bench import harness
from shardwise.bench.calibrate import calibration_of, measure_ranks
from shardwise.bench.engines import Ours
from shardwise.bench.harness import Figures
from shardwise.bench.memory import Peak, SharedMemoryUse, allocated_bytes
from shardwise.bench.options import Setting, read_shape
from shardwise.bench.traffic import watch_traffic
from shardwise.bench.work import TrainedModel, gpt_work
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.calibrated import CalibratedMachine, RanksCalibration
from shardwise.forecast.memory.step import Certificate, memory_certificate
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.planned import plan_of, precision_of
from shardwise.forecast.time.step import step_time
from shardwise.forecast.time.traffic import sent_bytes
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.forecast.trace.tracing import trace
from shardwise.forecast.work import Workload
from shardwise.launch.world import World
from shardwise.plan.plan import Plan
from shardwise.train.model import GPT, gpt_shape

SEQUENCE = 128
MODELS = {  # models of other benchmarks: shape, and sequences per rank
    "10M": (read_shape("10M", SEQUENCE), 2),
    "50M": (read_shape("50M", SEQUENCE), 2),
    "guard": (gpt_shape(vocabulary=256, context=SEQUENCE, width=384, layers=6, heads=4), 4),
    "recording": (gpt_shape(vocabulary=256, context=SEQUENCE, width=256, layers=12, heads=4), 4),
    "switches": (gpt_shape(vocabulary=256, context=SEQUENCE, width=640, layers=10, heads=10), 1),
    "tiny": (gpt_shape(vocabulary=64, context=SEQUENCE, width=16, layers=2, heads=2), 2),
}
RANKS = (1, 2, 4)
MEMORY_STEPS = 3
WARM_UP, STEPS = 1, 2  # steps per case and round
CALIBRATION_TIMES, CALIBRATION_STEPS = 1, 5
MIN_ROUNDS = 3
SAMPLE_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained."""

    model: str  # a key of `MODELS`
    ranks: int
    strategy: str = "fsdp"
    dtype: str = "fp32"
    checkpointing: bool = False
    accumulation: int = 1
    wire: sw.Wire = field(default_factory=sw.Wire)

    @property
    def name(self) -> str:
        parts = [self.model, str(self.ranks), self.strategy, self.dtype]
        parts += ["checkpointed"] * self.checkpointing
        parts += [f"{self.accumulation} micro-batches"] * (self.accumulation > 1)
        return " ".join(parts)

    @property
    def shape(self) -> Shape:
        return MODELS[self.model][0]

    @property
    def batch(self) -> int:
        return MODELS[self.model][1]

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.shape, self.ranks, self.dtype, (), 0, self.batch)

    @property
    def configuration(self) -> Configuration:
        half = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        replicas = {"ddp": self.ranks, "hsdp": 2}.get(self.strategy, 1)
        return Configuration(
            strategy=self.strategy,
            shard_size=self.ranks // replicas,
            replicas=replicas,
            micro_batch=self.batch,
            accumulation=self.accumulation,
            sequence=SEQUENCE,
            checkpointing="full" if self.checkpointing else "none",
            compute_dtype=half,
            reduce_dtype=half,
            clips=False,
        )


def cases_of(models: Sequence[str], ranks: Sequence[int]) -> list[Case]:
    """Return the cases of these models and numbers of ranks."""
    return [case for case in _CASES if case.model in models and case.ranks in ranks]


def _every_strategy(model: str, ranks: int) -> list[Case]:
    return [Case(model, ranks, strategy) for strategy in ("fsdp", "zero2", "ddp")]


_CASES = [
    Case("10M", 1),
    Case("10M", 1, dtype="bf16"),
    Case("50M", 1),
    *_every_strategy("10M", 2),
    Case("10M", 2, dtype="bf16"),
    Case("10M", 2, "ddp", "bf16"),
    Case("10M", 2, checkpointing=True),
    Case("10M", 2, "ddp", checkpointing=True),
    *_every_strategy("50M", 2),
    Case("50M", 2, checkpointing=True),
    Case("guard", 2),
    Case("recording", 2),
    Case("switches", 2),
    Case("switches", 2, accumulation=4),
    *_every_strategy("10M", 4),
    Case("10M", 4, "hsdp"),
    Case("10M", 4, dtype="bf16"),
    Case("50M", 4),
    *_every_strategy("tiny", 2),  # to test this script
    Case("tiny", 2, "ddp", checkpointing=True),
    Case("tiny", 2, accumulation=2),
]


# -- predicted -----------------------------------------------------------------------------------


def predict(case: Case, calibrations: Sequence[RanksCalibration]) -> tuple[Figures, list[float]]:
    """Predict bytes, and the seconds of a step with each calibration, from the plan and a trace."""
    configuration, workload = case.configuration, _workload(_one_rank(case))
    plan, figures = predict_bytes(case)
    machines = [
        CalibratedMachine.measured_on(calibration_of({case.ranks: calibration}), case.ranks)
        for calibration in calibrations
    ]
    seconds = [step_time(plan, workload, machine, configuration).seconds for machine in machines]
    return figures, seconds


def predict_bytes(case: Case) -> tuple[Plan, Figures]:
    """Return the plan, and the bytes that a rank has at the peak and sends in a step."""
    configuration, workload = case.configuration, _workload(_one_rank(case))
    with torch.device("meta"):
        model = GPT(case.shape)
    plan = plan_of(model, configuration)
    units = (replace(one, options=replace(one.options, wire=case.wire)) for one in plan.units)
    plan = replace(plan, units=tuple(units))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    memory = memory_certificate(plan, workload, configuration, buffer_bytes=buffers, on_cpu=True)
    # Ranks that decode what they gather have the arena of gathered units for themselves.
    sharing = 1 if case.wire.gather else plan.world_size
    figures: Figures = {"live_peak": live_bytes(memory, sharing)}
    if case.accumulation == 1:
        figures["sent_bytes"] = sent_bytes(plan).total
    return plan, figures


def _one_rank(case: Case) -> Case:
    """Return the single-rank case that has the same trace."""
    return replace(case, ranks=1, strategy="fsdp", accumulation=1, wire=sw.Wire())


@cache
def _workload(case: Case) -> Workload:
    with torch.device("meta"):
        model = GPT(case.shape)
    blocks = [unit.name for unit in plan_of(model, case.configuration).units if unit.name]
    return trace(
        model,
        (torch.zeros(case.batch, SEQUENCE, dtype=torch.int64),),
        units=blocks,
        loss=next_token_loss,
        precision=precision_of(case.configuration),
        checkpointing=dict.fromkeys(blocks, "full") if case.checkpointing else None,
    )


def live_bytes(memory: Certificate, sharing: int) -> int:
    """Return the live bytes at the peak on a CPU.

    The arena of gathered units lives as long as the model, and ``sharing`` ranks have it together.
    """
    arena = max(moment.gathered for moment in memory.timeline)
    return max(moment.total - moment.gathered for moment in memory.timeline) + arena // sharing


def next_token_loss(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64))


# -- measured ------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The measurements of one rank: figures of each case, and its seconds in each round."""

    figures: dict[str, Figures]
    calibrations: list[RanksCalibration]
    rounds: list[dict[str, float]]


def measure(world: World, cases: Sequence[Case], options: Namespace) -> Measured:
    """Measure bytes and memory of every case, and then the time of all cases in turns."""
    trainees: dict[Case, TrainedModel] = {}
    figures: dict[str, Figures] = {}
    for dtype in sorted({case.dtype for case in cases}):  # libraries allocate on first use
        measure_bytes(world, next(case for case in cases if case.dtype == dtype))
    for case in cases:
        figures[case.name], trainees[case] = measure_bytes(world, case)
    found = Measured(figures, [], [])
    title = f"{world.size} ranks"
    with harness.show_progress(title, options.rounds, visible=world.is_first) as begin:
        began = time.perf_counter()
        for number in range(options.rounds):
            is_late = time.perf_counter() - began > options.seconds
            if number >= MIN_ROUNDS and world.gather(is_late)[0]:  # rank 0 decides for all
                break
            begin(f"round {number + 1}")
            calibration = measure_ranks(world, CALIBRATION_TIMES, CALIBRATION_STEPS)
            found.calibrations.append(calibration)
            found.rounds.append({c.name: _time_steps(world, c, t) for c, t in trainees.items()})
    return found


def measure_bytes(world: World, case: Case) -> tuple[Figures, TrainedModel]:
    """Measure peak memory and traffic of a few steps; return them and the model."""
    work = gpt_work(case.setting)
    gc.collect()
    before = SharedMemoryUse.read()
    with Peak(allocated_bytes, SAMPLE_SECONDS) as live:
        trainee = Ours(case.strategy, wire=case.wire)(work)
        assert isinstance(trainee.model, GPT)
        if case.checkpointing:
            checkpoint_blocks(trainee.model, "full")
        for number in range(MEMORY_STEPS):
            dist.barrier()
            _step(trainee, case, work.batch(number, world.rank))
    dist.barrier()
    shared = SharedMemoryUse.read().share - before.share
    dist.barrier()
    with watch_traffic(trainee.model) as traffic:
        _step(trainee, case, work.batch(0, world.rank))
    return {"live_peak": live.bytes + shared, "sent_bytes": traffic.sent_bytes}, trainee


def _time_steps(world: World, case: Case, trainee: TrainedModel) -> float:
    """Return the median time of a step, from the start on all ranks to the end on all ranks."""
    work = gpt_work(case.setting)
    batches = [work.batch(number, world.rank) for number in range(WARM_UP + STEPS)]
    seconds = []
    for batch in batches:
        dist.barrier()
        began = time.perf_counter()
        _step(trainee, case, batch)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def _step(trainee: TrainedModel, case: Case, batch: Tensor) -> None:
    """Run `TrainedModel.step` with accumulation; all micro-batches have the same data."""
    for _ in range(case.accumulation - 1):
        trainee.loss(batch).backward()  # type: ignore[no-untyped-call]
    trainee.step(batch)


# -- the table -----------------------------------------------------------------------------------


def compare(cases: Sequence[Case], by_rank: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Return a row for each case: measured and predicted figures, and errors."""
    rows: dict[str, dict[str, Any]] = {}
    for case in cases:
        measured = harness.largest([one.figures[case.name] for one in by_rank])
        predicted, expected = predict(case, by_rank[0].calibrations)
        took = [max(views) for views in zip(*(_seconds(own, case) for own in by_rank), strict=True)]
        ratios = [seconds / actual for seconds, actual in zip(expected, took, strict=True)]
        rows[case.name] = {
            **{name: measured[name] for name in predicted},
            "seconds": statistics.median(took),
            **{f"predicted {name}": value for name, value in predicted.items()},
            "predicted seconds": statistics.median(expected),
            "live_peak error": predicted["live_peak"] / measured["live_peak"] - 1,
            "seconds error": statistics.median(ratios) - 1,
            "rounds": [list(pair) for pair in zip(expected, took, strict=True)],
        }
    return rows


def _seconds(measured: Measured, case: Case) -> list[float]:
    return [seconds[case.name] for seconds in measured.rounds]


def main() -> None:
    """Run the command."""
    parser = make_parser("forecast", __doc__, rounds=20)
    parser.add_argument("--models", default=",".join(name for name in MODELS if name != "tiny"))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        help=f"time limit for the rounds of each number of ranks, after {MIN_ROUNDS} rounds",
    )
    parser.add_argument("--page", type=Path, help="also write the table into this page")
    parser.add_argument("--figures", type=Path, help="use this earlier result; measure nothing")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if options.figures:
        rows = json.loads(options.figures.read_text(encoding="utf-8"))["rows"]
    else:
        for size in map(int, options.ranks.split(",")):
            cases = cases_of(options.models.split(","), [size])
            rows |= compare(cases, harness.run_ranks(size, measure, cases, options))
            title = f"up to {size} ranks"
            print_figures(title, _COLUMNS, rows, options.out)
    if options.page:
        write_table(options.page, rows)


BYTE_COLUMNS: list[harness.Column] = [
    ("sent MB", "predicted sent_bytes", lambda value: f"{value / 1e6:.3f}"),
    ("measured", "sent_bytes", lambda value: f"{value / 1e6:.3f}"),
    ("memory MB", "predicted live_peak", lambda value: f"{value / 1e6:.0f}"),
    ("measured", "live_peak", lambda value: f"{value / 1e6:.0f}"),
    ("error", "live_peak error", lambda value: f"{value:+.1%}"),
]
_COLUMNS = [
    *BYTE_COLUMNS,
    ("step ms", "predicted seconds", lambda value: f"{value * 1e3:.0f}"),
    ("measured", "seconds", lambda value: f"{value * 1e3:.0f}"),
    ("error", "seconds error", lambda value: f"{value:+.1%}"),
    ("rounds", "rounds", lambda value: str(len(value))),
]


if __name__ == "__main__":
    main()
