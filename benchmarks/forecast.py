"""``python -m benchmarks.forecast``: our own steps, as they are predicted and as they are.

For each of the cases a GPT is planned and traced on the meta device, and trained on local CPU
ranks. *Bytes* are what a rank sends in a step, *memory* is what is allocated in the process of a
rank at the peak of a step, and *time* is that of a step, on a machine that was measured with
``shardwise doctor --calibrate`` (``--machine FILE``; without it this script measures first).

Gathered parameters are in an arena that the ranks of a host share, so each counts its part of it.
Times and live bytes are the least of several rounds, each of which goes through all cases.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks import make_parser
from shardwise.bench import harness
from shardwise.bench.calibrate import calibrate
from shardwise.bench.engines import Ours
from shardwise.bench.harness import Figures
from shardwise.bench.memory import Peak, SharedMemoryUse, allocated_bytes
from shardwise.bench.options import Setting, read_shape
from shardwise.bench.traffic import watch_traffic
from shardwise.bench.work import gpt_work
from shardwise.forecast.calibrated import CalibratedMachine
from shardwise.forecast.certificate import Certificate, memory_certificate
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.planned import plan_of, precision_of
from shardwise.forecast.timeline import step_time
from shardwise.forecast.tracing import trace
from shardwise.forecast.traffic import sent_bytes
from shardwise.launch.world import World
from shardwise.train.model import GPT, Shape

SEQUENCE, BATCH = 128, 2
SIZES = ("10M", "50M")
TINY = Shape(vocabulary=64, context=SEQUENCE, width=16, layers=2, heads=2)  # to test this script
RANKS = (1, 2, 4)
WARM_UP, STEPS = 2, 3
SAMPLE_SECONDS = 0.0005
STRATEGIES = ("fsdp", "zero2", "ddp")
COLUMNS: list[harness.Column] = [
    ("sent MB", "predicted sent_bytes", lambda value: f"{value / 1e6:.3f}"),
    ("measured", "sent_bytes", lambda value: f"{value / 1e6:.3f}"),
    ("memory MB", "predicted live_peak", lambda value: f"{value / 1e6:.0f}"),
    ("measured", "live_peak", lambda value: f"{value / 1e6:.0f}"),
    ("error", "live_peak error", lambda value: f"{value:+.1%}"),
    ("step ms", "predicted seconds", lambda value: f"{value * 1e3:.0f}"),
    ("measured", "seconds", lambda value: f"{value * 1e3:.0f}"),
    ("error", "seconds error", lambda value: f"{value:+.1%}"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration of the benchmark."""

    size: str
    ranks: int
    strategy: str
    dtype: str
    checkpointing: bool = False

    @property
    def name(self) -> str:
        words = [self.size, str(self.ranks), self.strategy, self.dtype]
        return " ".join([*words, "checkpointed"] if self.checkpointing else words)

    @property
    def setting(self) -> Setting:
        shape = TINY if self.size == "0" else read_shape(self.size, SEQUENCE)
        return Setting(self.size, shape, self.ranks, self.dtype, (), rounds=0, batch=BATCH)

    @property
    def configuration(self) -> Configuration:
        half = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        is_ddp = self.strategy == "ddp"
        return Configuration(
            strategy=self.strategy,
            shard_size=1 if is_ddp else self.ranks,
            replicas=self.ranks if is_ddp else 1,
            micro_batch=BATCH,
            sequence=SEQUENCE,
            checkpointing="full" if self.checkpointing else "none",
            compute_dtype=half,
            reduce_dtype=half,
            clips=False,
        )


def cases_of(sizes: Sequence[str], ranks: Sequence[int]) -> list[Case]:
    """All of them; with checkpointing in float32 on two ranks, and bfloat16 for the small model."""
    cases = []
    for size in sizes:
        for number in ranks:
            for strategy in STRATEGIES if number > 1 else ("fsdp",):
                case = Case(size, number, strategy, "fp32")
                cases.append(case)
                if size == SIZES[0] and strategy != "zero2":
                    cases.append(replace(case, dtype="bf16"))
                if number == 2 and strategy != "zero2":  # noqa: PLR2004
                    cases.append(replace(case, checkpointing=True))
    return cases


# -- predicted -----------------------------------------------------------------------------------


def predict(case: Case, machine: Path) -> Figures:
    """From the plan and a trace on the meta device."""
    configuration, shape = case.configuration, case.setting.shape
    with torch.device("meta"):
        model = GPT(shape)
    plan = plan_of(model, configuration)
    blocks = [unit.name for unit in plan.units if unit.name]
    workload = trace(
        model,
        (torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),),
        units=blocks,
        loss=next_token_loss,
        precision=precision_of(configuration),
        checkpointing=dict.fromkeys(blocks, "full") if case.checkpointing else None,
    )
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    memory = memory_certificate(plan, workload, configuration, buffer_bytes=buffers, on_cpu=True)
    step = step_time(plan, workload, CalibratedMachine.read(machine, case.ranks), configuration)
    return {
        "sent_bytes": sent_bytes(plan),
        "live_peak": live_bytes(memory, plan.world_size),
        "seconds": step.seconds,
    }


def live_bytes(memory: Certificate, ranks: int) -> int:
    """At the peak, on a CPU.

    The arena of gathered units is kept as long as the model, and ranks of a host share it.
    """
    arena = max(moment.gathered for moment in memory.timeline)
    return max(moment.total - moment.gathered for moment in memory.timeline) + arena // ranks


def next_token_loss(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64))


# -- measured ------------------------------------------------------------------------------------


def measure(world: World, cases: Sequence[Case], rounds: int) -> dict[str, Figures]:
    """Of every case, on this rank."""
    found: dict[str, Figures] = {}
    for dtype in sorted({case.dtype for case in cases}):  # libraries allocate on first use
        _measure(world, next(case for case in cases if case.dtype == dtype))
    with harness.show_progress(
        f"{world.size} ranks", rounds * len(cases), visible=world.is_first
    ) as begin:
        for _ in range(rounds):
            for case in cases:
                begin(case.name)
                figures = _measure(world, case)
                known = found.setdefault(case.name, figures)
                for name in ("seconds", "live_peak"):
                    known[name] = min(known[name], figures[name])
    return found


def _measure(world: World, case: Case) -> Figures:
    work = gpt_work(case.setting)
    before = SharedMemoryUse.read()
    seconds = []
    with Peak(allocated_bytes, SAMPLE_SECONDS) as live:
        trainee = Ours(case.strategy)(work)
        model = trainee.model
        assert isinstance(model, GPT)
        model.checkpoint_every = int(case.checkpointing)
        for number in range(WARM_UP + STEPS):
            batch = work.batch(number, world.rank)
            dist.barrier()
            began = time.perf_counter()
            trainee.step(batch)
            dist.barrier()
            seconds.append(time.perf_counter() - began)
    dist.barrier()
    shared = SharedMemoryUse.read().share - before.share
    dist.barrier()
    with watch_traffic(trainee.model) as traffic:
        trainee.step(work.batch(0, world.rank))
    figures = {
        "sent_bytes": traffic.sent_bytes,
        "live_peak": live.bytes + shared,
        "seconds": min(seconds[WARM_UP:]),
    }
    del trainee, model
    gc.collect()
    return figures


def main() -> None:
    """Run the command."""
    parser = make_parser("forecast", __doc__, rounds=3)
    parser.add_argument("--machine", type=Path, help="file of `shardwise doctor --calibrate`")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of the model")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks")
    options = parser.parse_args()
    ranks = [int(size) for size in options.ranks.split(",")]
    machine = options.machine
    if machine is None:
        machine = Path("runs/calibrated.json")
        machine.parent.mkdir(exist_ok=True)
        calibrate(ranks, print).write(machine)
    cases = cases_of(options.sizes.split(","), ranks)
    rows: dict[str, Figures] = {}
    for size in ranks:
        own = [case for case in cases if case.ranks == size]
        by_rank = harness.run_ranks(size, measure, own, options.rounds)
        for case in own:
            measured = harness.largest([figures[case.name] for figures in by_rank])
            predicted = predict(case, machine)
            rows[case.name] = measured | {
                **{f"predicted {name}": value for name, value in predicted.items()},
                **{
                    f"{name} error": value / measured[name] - 1
                    for name, value in predicted.items()
                    if measured[name]
                },
            }
        title = f"GPTs, {BATCH} sequences of {SEQUENCE} tokens for each rank; up to {size} ranks"
        harness.publish(title, COLUMNS, rows, options.out)


if __name__ == "__main__":
    main()
