"""``python -m benchmarks.switches``: every combination of what a training run can switch on.

A GPT on local CPU ranks: precision x checkpointing x offload x accumulation, 81 rows. Each trains a
few steps of the same batches as one process that does not shard, in float32, and is told

- *loss*: the largest relative difference to that process in any step, in units of the precision
  (2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32);
- *engine*: the peak of what is held for the engine (shards, gradients, also those that autograd
  keeps for it, whole units, reductions), sampled at every event, and how far it is from the plan's
  figure;
- *time*: of a step, relative to the plain run (float32, nothing switched on), which takes turns
  with it: the median of the ratios.

Nothing is asserted; a row that is off is marked.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.forecast.memory import step_memory
from shardwise.runtime.engine import Runtime
from shardwise.runtime.gradient_shards import GradientShard
from shardwise.runtime.memory import Pool
from shardwise.runtime.module import runtime_of_root
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.tensor import ShardedTensor
from shardwise.runtime.unit import Unit
from shardwise.schedule.events import EventKind
from shardwise.train.model import GPT, Block, Shape
from shardwise.transport.api import Work

SIZES = {
    "50M": Shape(vocabulary=4096, context=128, width=640, layers=10, heads=10),
    "1M": Shape(vocabulary=320, context=64, width=128, layers=5, heads=4),
}
LEAST_STEPS = 3
PRECISIONS = {
    "fp32": (sw.MixedPrecisionPolicy(), 2.0**-24),
    "bf16": (sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32), 2.0**-8),
    "fp16": (sw.MixedPrecisionPolicy(torch.float16, torch.float32), 2.0**-11),
}
CHECKPOINTING = ("none", "full", "selective")
OFFLOADS = {
    "none": sw.OffloadPolicy(),
    "optimizer": sw.CPUOffloadPolicy(parameters=False),
    "all": sw.CPUOffloadPolicy(),
}
ACCUMULATION = ("1", "4, shards", "4, whole")
MICRO_BATCHES = 4
LEARNING_RATE = 1e-4
MEMORY_OFF, LOSS_OFF = 0.03, {"fp32": 256.0, "bf16": 1.0, "fp16": 1.0}


@dataclass(frozen=True, slots=True)
class Setting:
    size: str
    ranks: int
    steps: int
    port: int


@dataclass(frozen=True, slots=True)
class Combination:
    precision: str = "fp32"
    checkpointing: str = "none"
    offload: str = "none"
    accumulation: str = "1"

    @property
    def num_parts(self) -> int:
        return 1 if self.accumulation == "1" else MICRO_BATCHES

    @property
    def holds(self) -> bool:
        return self.accumulation.endswith("whole")


@dataclass(frozen=True, slots=True)
class Outcome:
    combination: Combination
    loss_units: float
    engine_bytes: int
    planned_bytes: int
    time: float  # relative to the plain run

    @property
    def memory_off(self) -> float:
        return self.engine_bytes / self.planned_bytes - 1.0

    @property
    def is_off(self) -> bool:
        too_far = self.loss_units > LOSS_OFF[self.combination.precision]
        return too_far or abs(self.memory_off) > MEMORY_OFF


class Trainee:
    """A model on this rank, with some switches on."""

    def __init__(self, shape: Shape, combination: Combination) -> None:
        self.model = build(shape)
        self.combination = combination
        if combination.checkpointing != "none":
            self.model.checkpoint_every, self.model.checkpoint = 1, combination.checkpointing
        policy, _ = PRECISIONS[combination.precision]
        offload = OFFLOADS[combination.offload]
        sw.fully_shard(self.model, units=Block, mp_policy=policy, offload_policy=offload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=combination.precision == "fp16")

    def step(self, batch: Tensor) -> float:
        """Train on this rank's part of a global batch; the loss of the whole of it."""
        parts = batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(
            self.combination.num_parts
        )
        total = torch.zeros(())
        for number, part in enumerate(parts, start=1):
            if self.combination.holds:
                assert isinstance(self.model, sw.FSDPModule)
                self.model.set_requires_gradient_sync(number == len(parts))
            loss = loss_of(self.model, part) / len(parts)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def planned_bytes(self) -> int:
        runtime = runtime_of_root(self.model)
        several, holds = self.combination.num_parts > 1, self.combination.holds
        accumulates = several and not holds
        memory = step_memory(
            runtime.plan,
            accumulates=accumulates,
            unreduced=holds,
            on_cpu=True,
        )
        return memory.total_peak_bytes


def build(shape: Shape) -> GPT:
    torch.manual_seed(0)
    return GPT(shape)


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    logits = model(sequences[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, sequences[:, 1:].flatten())


def batches(setting: Setting) -> list[Tensor]:
    """Of all ranks together, one a step: [ranks * MICRO_BATCHES, context + 1]."""
    shape = SIZES[setting.size]
    generator = torch.Generator().manual_seed(1)
    size = (setting.ranks * MICRO_BATCHES, shape.context + 1)
    return [
        torch.randint(shape.vocabulary, size, generator=generator) for _ in range(setting.steps)
    ]


def reference_losses(setting: Setting) -> list[float]:
    """Of one process, in float32, which every rank is for itself."""
    model = build(SIZES[setting.size])
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    losses = []
    for batch in batches(setting):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- what the engine holds -----------------------------------------------------------------------


@contextmanager
def sampled(held_bytes: Callable[[], int]) -> Iterator[list[int]]:
    """What ``held_bytes`` says before and after every event, and when gradients are there."""
    samples: list[int] = []
    do, hand_over = Scheduler._do, GradientShard._hand_over

    def sample(scheduler: Scheduler, kind: EventKind, unit: Unit) -> tuple[Work, ...]:
        samples.append(held_bytes())
        marks = do(scheduler, kind, unit)
        samples.append(held_bytes())
        return marks

    def sample_handing(gradients: GradientShard, reduced: Tensor) -> None:
        hand_over(gradients, reduced)
        samples.append(held_bytes())

    with (
        mock.patch.object(Scheduler, "_do", sample),
        mock.patch.object(GradientShard, "_hand_over", sample_handing),
    ):
        yield samples


class Waiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gradients of the tied weight that autograd holds: the head's waits for the embedding's.

    No object of Python's refers to it, so it is followed from where it is computed.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = weight.shape
        self._found: list[tuple[StorageWeakRef, int, int]] = []  # with address and bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is Tensor and out.shape == self._shape:
            storage = out.untyped_storage()
            if storage.nbytes() == out.nbytes:  # or it is a part of a buffer, which is counted
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._found.append((reference, storage.data_ptr(), storage.nbytes()))
        return out

    def alive(self) -> dict[int, int]:
        """Bytes by address."""
        found = [(at, size) for ref, at, size in self._found if not ref.expired()]  # type: ignore[no-untyped-call]
        return dict(found)


def engine_bytes(runtime: Runtime, waiting: Waiting) -> int:
    tensors: list[Tensor | None] = []
    for unit in runtime.units:
        for flat in unit.flats:
            tensors += [flat.shard, flat._device_copy]
            tensors += [parameter.dense.grad for parameter in flat.parameters]
            tensors += [_local(parameter.sharded.grad) for parameter in flat.parameters]
        for gradients in unit.gradients:
            tensors += [gradients.shard.current]
            has_own = gradients.owns_buffer or gradients._is_in_place
            tensors += [gradients._buffer.flat] if has_own else []
    storages = [t.untyped_storage() for t in tensors if t is not None]
    own = waiting.alive() | {storage.data_ptr(): storage.nbytes() for storage in storages}
    lent = [pool.allocated_bytes for pool in pools_of(runtime)]
    return int(sum(own.values()) + sum(lent))


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_local() if isinstance(gradient, ShardedTensor) else None


def pools_of(runtime: Runtime) -> list[Pool]:
    """All from which a step takes memory, of the device and of the host."""
    flats = [flat for unit in runtime.units for flat in unit.flats]
    staging = {id(flat.offloader): flat.offloader.staging for flat in flats if flat.offloader}
    return [*runtime.pools, *staging.values()]


# -- the run -------------------------------------------------------------------------------------


def run_rank(rank: int, setting: Setting, combinations: Sequence[Combination], out: Path) -> None:
    """One rank's part; rank 0 reports."""
    torch.set_num_threads(max(1, torch.get_num_threads() // setting.ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{setting.port}",
        rank=rank,
        world_size=setting.ranks,
    )
    expected = reference_losses(setting)
    plain = Trainee(SIZES[setting.size], Combination())
    plain.step(batches(setting)[0])
    outcomes = []
    with Progress(disable=rank > 0) as progress:
        for combination in progress.track(combinations):
            outcomes.append(try_out(setting, combination, plain, expected))
            gc.collect()
            if rank == 0:  # a run takes long, and may be stopped
                progress.console.print(*cells(outcomes[-1]), markup=False, highlight=False)
                write(setting, outcomes, out)
    if rank == 0:
        report(setting, outcomes)
    dist.barrier()
    dist.destroy_process_group()


def try_out(
    setting: Setting, combination: Combination, plain: Trainee, expected: Sequence[float]
) -> Outcome:
    trainee = Trainee(SIZES[setting.size], combination)
    losses, ratios, samples = [], [], [0]
    for number, batch in enumerate(batches(setting)):
        if number == 1:  # with states and gradient shards, but not on the clock
            runtime, waiting = runtime_of_root(trainee.model), Waiting(trainee.model.head.weight)
            with waiting, sampled(partial(engine_bytes, runtime, waiting)) as samples:
                losses.append(trainee.step(batch))
            continue
        seconds = [_timed(plain, batch)[0]]
        own_seconds, loss = _timed(trainee, batch)
        losses.append(loss)
        if number > 1:
            ratios.append(own_seconds / seconds[0])
    _, unit = PRECISIONS[combination.precision]
    off = max(abs(loss / right - 1.0) for loss, right in zip(losses, expected, strict=True))
    return Outcome(
        combination,
        loss_units=off / unit if math.isfinite(off) else math.inf,
        engine_bytes=max(samples),
        planned_bytes=trainee.planned_bytes(),
        time=statistics.median(ratios),
    )


def _timed(trainee: Trainee, batch: Tensor) -> tuple[float, float]:
    dist.barrier()
    began = time.perf_counter()
    loss = trainee.step(batch)
    dist.barrier()
    return time.perf_counter() - began, loss


def write(setting: Setting, outcomes: Sequence[Outcome], out: Path) -> None:
    rows = [asdict(outcome) for outcome in outcomes]
    out.write_text(json.dumps({"setting": asdict(setting), "rows": rows}) + "\n", encoding="utf-8")


def cells(outcome: Outcome) -> tuple[str, ...]:
    """A row of the table."""
    c = outcome.combination
    return (
        *(c.precision, c.checkpointing, c.offload, c.accumulation),
        f"{outcome.loss_units:.2f}",
        f"{outcome.engine_bytes / 1e6:.1f}",
        f"{outcome.memory_off:+.1%}",
        f"{outcome.time:.2f}" + (" (off)" if outcome.is_off else ""),
    )


def report(setting: Setting, outcomes: Sequence[Outcome]) -> None:
    title = f"GPT of {setting.size}, {setting.ranks} CPU ranks"
    table = Table("precision", "checkpointing", "offload", "micro batches", title=title)
    for heading in ("loss, units off", "engine, MB", "of the plan", "time"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(*cells(outcome))
    Console(width=110).print(table)
    off = sum(outcome.is_off for outcome in outcomes)
    Console().print(f"{len(outcomes)} combinations, {off} off")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switches", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="50M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="the first two are not timed")
    parser.add_argument("--port", type=int, default=29556)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/switches.json"))
    options = parser.parse_args()
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps}: expected {LEAST_STEPS} or more")
    setting = Setting(options.size, options.ranks, options.steps, options.port)
    rows = itertools.product(PRECISIONS, CHECKPOINTING, OFFLOADS, ACCUMULATION)
    combinations = [Combination(*row) for row in rows]
    spawn(  # type: ignore[no-untyped-call]
        run_rank, args=(setting, combinations, options.out), nprocs=setting.ranks
    )


if __name__ == "__main__":
    main()
