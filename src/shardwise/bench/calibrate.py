"""Measures this machine for forecasts: operations, collectives and the optimizer, within a minute.

Small models are trained, unsharded and sharded, on the numbers of local ranks to forecast:

- *Operations*: each operation in forward and backward of transformer blocks of several widths, as
  the median over repetitions. On a CPU, the thread's CPU time is measured, which other processes
  hardly affect; on a GPU, events on its stream.
- *Host*: the remaining time of forward and backward of the smallest model, per operation.
- *Engine*: what sharding adds to the thread that computes, per step, unit, flat buffer, trained and
  frozen parameter, from models of tiny units; the optimizer's time per parameter.
- *Collectives*: units of 16 KB to 16 MB with almost no compute, from the engine's ledger.
- *Optimizer*: fused AdamW, per byte of gradients.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.bench.machine import describe_machine
from shardwise.bench.work import fused_adamw, next_token_loss
from shardwise.comm.device import is_accelerator, wait_for_device
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.machines.calibrated import (
    VERSION,
    Calibration,
    Curve,
    RanksCalibration,
    Rate,
    measured_accelerator,
)
from shardwise.forecast.models.adapted import LoRALinear
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.trace.recorder import Recorder
from shardwise.forecast.work import Kind, Operation
from shardwise.launch.local import run_on_local_ranks
from shardwise.launch.world import World
from shardwise.local_devices import num_local_accelerators
from shardwise.recording.steps import recorded_event
from shardwise.report.measured import transfer_seconds
from shardwise.schedule.events import EventKind
from shardwise.train.model import GPT, gpt_shape

if TYPE_CHECKING:
    from shardwise.recording.format import RecordedEvent

__all__ = ["calibrate", "calibration_of", "default_ranks", "measure_ranks"]

DTYPES = (torch.float32, torch.bfloat16)
_SHAPES = {  # GPTs by device type; on a CPU, a step takes 0.1 to 0.3 s in float32
    "cpu": (
        gpt_shape(1024, 64, 128, 1, 2),
        gpt_shape(4096, 128, 512, 1, 8),
        gpt_shape(8192, 128, 1024, 1, 16),
    ),
    "cuda": (gpt_shape(8192, 1024, 1024, 1, 16), gpt_shape(32768, 2048, 4096, 2, 32)),
}
_BATCH = 2
_TIMES = 3  # maximum number of timed steps; at least one
_SECONDS = 1.5  # time budget for the timed steps
_LARGE_SECONDS = 0.4  # after a model whose step takes this long, no larger model is measured
_UNIT_ELEMENTS = tuple(1 << power for power in range(12, 23, 2))  # 16 KB to 16 MB in float32
_STEPS = 12  # steps of sharded models
_UPDATE_ELEMENTS = 1 << 22
_TINY_ELEMENTS = 64  # of a parameter of a tiny unit
_FEW_UNITS, _MANY_UNITS = 4, 32  # numbers of tiny units; the difference gives the time of each
_MORE = 8  # parameters of a tiny unit beside the first one
_LEAST_PER_BYTE = 1e-14  # seconds
_HALF = sw.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
# Strategy -> names of its collectives in a calibration.
_COLLECTIVES = {
    "zero2": {EventKind.GATHER: "gather", EventKind.REDUCE: "reduce"},
    "ddp": {EventKind.GATHER: "cast", EventKind.REDUCE: "all_reduce"},
}

_Point = tuple[float, float, float]  # flops, bytes, seconds


def calibrate(num_ranks: Sequence[int], report: Callable[[str], None]) -> Calibration:
    """Measure this machine with each number of local ranks; ``report`` is told what begins."""
    ranks: dict[int, RanksCalibration] = {}
    for size in num_ranks:
        report(f"{size} rank{'s' * (size > 1)}")
        ranks[size] = run_on_local_ranks(size, measure_ranks)[0]
    return calibration_of(ranks)


def calibration_of(ranks: dict[int, RanksCalibration]) -> Calibration:
    return Calibration(
        format="shardwise calibration",
        version=VERSION,
        machine=describe_machine(),
        accelerator=_accelerator(ranks),
        cores=0 if torch.cuda.is_available() else int(describe_machine()["cores"]),
        ranks=ranks,
    )


def default_ranks() -> list[int]:
    """Return 1 and the number of GPUs or, without GPUs, of cores."""
    devices = num_local_accelerators() or int(describe_machine()["cores"])
    return sorted({1, devices})


def _accelerator(ranks: dict[int, RanksCalibration]) -> dict[str, str | float | int | None]:
    """Derive the figures of a data sheet from the measurements."""
    most = ranks[max(ranks)]
    products = {key: 1 / rate.per_flop for key, rate in most.operations.items() if rate.per_flop}
    peak = max(products.get("mm/2", 0.0), products.get("mm/4", 0.0), 1.0)
    bandwidth = 1 / max(most.operations[f"{Kind.MEMORY}/4"].per_byte, _LEAST_PER_BYTE)
    gathers = most.collectives.get("gather/4")
    link = bandwidth if gathers is None else gathers.points[-1][0] / gathers.points[-1][1]
    on_gpu = torch.cuda.is_available()
    memory = (
        torch.cuda.get_device_properties(0).total_memory
        if on_gpu
        else psutil.virtual_memory().available // max(ranks)
    )
    return measured_accelerator(
        "this machine",
        peak,
        products.get("mm/4", peak),
        memory,
        bandwidth,
        link_bandwidth=link,
        num_ranks=max(ranks),
    )


# -- on every rank -------------------------------------------------------------------------------


def measure_ranks(world: World, times: int = _TIMES, steps: int = _STEPS) -> RanksCalibration:
    """Measure this machine on every rank of ``world`` at the same time.

    Each operation is timed up to ``times`` times, and sharded models are trained for ``steps``.
    """
    points: defaultdict[str, list[_Point]] = defaultdict(list)
    overhead: dict[torch.dtype, float] = {}  # per operation of the smallest model
    for dtype in DTYPES:
        for shape in _SHAPES[world.device.type]:
            step = _training_step(shape, dtype, world.device)
            operations, seconds, total = _timed(step, world, times)
            overhead.setdefault(dtype, max(0.0, total - sum(seconds)) / len(seconds))
            for operation, took in zip(operations, seconds, strict=True):
                point = operation.flops, operation.num_bytes, took
                points[f"{operation.name}/{operation.itemsize}"].append(point)
                points[f"{operation.kind}/{operation.itemsize}"].append(point)
            if max(world.gather(total)) > _LARGE_SECONDS:
                break
    return RanksCalibration(
        threads=torch.get_num_threads() if world.device.type == "cpu" else 1,
        operation_seconds=min(overhead.values()),
        **_engine_seconds(world, steps),
        operations={key: _fit(found) for key, found in points.items()},
        collectives=_collectives(world, steps),
        updates={"adamw": _update_seconds(world.device)},
    )


def _training_step(shape: Shape, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    model = _Sample(shape).to(device, dtype)
    tokens = torch.randint(0, shape.vocab, (_BATCH, shape.context + 1), device=device)

    def step() -> None:
        next_token_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return step


class _Sample(GPT):
    """A GPT with operations of other models: SiLU, RMS norms, softmax, dropout, QLoRA."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.extra_norm = nn.RMSNorm(shape.hidden)
        layer = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.adapted = LoRALinear(layer, Adapters(rank=8, quantized=True), torch.float32)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, positions)
        x = self.embedding(tokens)
        y = functional.dropout(functional.silu(self.extra_norm(x)), 0.1).relu()
        y = self.adapted(y)
        scores = torch.softmax(y @ x.transpose(1, 2), dim=-1)
        mixed: Tensor = scores @ y
        return logits + mixed.mean()


class _Timer(Recorder):  # type: ignore[no-untyped-call]
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._on_gpu = device.type == "cuda"
        self._times: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        began = self._now()
        result = func(*args, **kwargs)
        ended = self._now()
        known = len(self._operations)
        self._record(func, args, kwargs, result)
        if len(self._operations) > known:
            self._times.append((began, ended))
        return result

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def results(self) -> tuple[list[Operation], list[float]]:
        if not self._on_gpu:
            return self._operations, [ended - began for began, ended in self._times]
        torch.cuda.synchronize()
        return self._operations, [began.elapsed_time(ended) / 1e3 for began, ended in self._times]


def _timed(
    step: Callable[[], None], world: World, times: int
) -> tuple[list[Operation], list[float], float]:
    """Return the operations of a step, the median seconds of each, and the host's seconds."""
    first = _host_seconds(step, world.device)
    times = min(times, max(1, int(_SECONDS / max(world.gather(first)) / 2)))
    operations: list[Operation] = []
    totals, timed = [], []
    for _ in range(times):
        totals.append(_host_seconds(step, world.device))
        timer = _Timer(world.device)
        with timer:
            step()
        operations, seconds = timer.results()
        timed.append(seconds)
    return operations, [median(times) for times in zip(*timed, strict=True)], median(totals)


def _host_seconds(step: Callable[[], None], device: torch.device) -> float:
    clock = _clock(device)
    wait_for_device(device)
    began = clock()
    step()
    return clock() - began


def _clock(device: torch.device) -> Callable[[], float]:
    """The clock of the thread that computes; on an accelerator, backward runs on another one."""
    return time.perf_counter if is_accelerator(device) else time.thread_time


def _fit(points: Sequence[_Point]) -> Rate:
    """Fit a rate by non-negative least squares of relative errors."""
    rows = np.array(points)
    columns = np.stack([np.ones(len(rows)), rows[:, 0], rows[:, 1]], axis=1)
    seconds = np.maximum(rows[:, 2], 1e-9)
    scales = np.maximum(columns.max(axis=0), 1.0)
    weighted = columns / scales / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(rows)), rcond=None)
            error = float(((weighted[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                least, best = error, np.zeros(3)
                best[list(chosen)] = found
    start, per_flop, per_byte = (best / scales).tolist()
    return Rate(start=start, per_flop=per_flop, per_byte=per_byte)


# -- the engine ----------------------------------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self, num_elements: int, *, is_trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_elements), requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0]


class _Unit(nn.Sequential):
    """A unit with almost no compute: some layers with a trained parameter, some with a frozen one.

    As in most models, each parameter is in a module of its own.
    """

    def __init__(self, num_elements: int, trained: int = 1, frozen: int = 0) -> None:
        kinds = [True] * trained + [False] * frozen
        super().__init__(*(_Layer(num_elements, is_trained=kind) for kind in kinds))


def _engine_seconds(world: World, num_steps: int) -> dict[str, float]:
    """Measure the thread that computes: seconds by fields of `RanksCalibration`.

    The plain model has the same operations, so the difference is what the engine adds. A unit
    counts once for its forward and backward.
    """
    few, many = (_tiny(world, num_steps, units) for units in (_FEW_UNITS, _MANY_UNITS))
    trained = _tiny(world, num_steps, _MANY_UNITS, trained=1 + _MORE)
    frozen, _ = _tiny(world, num_steps, _MANY_UNITS, frozen=1)
    several, _ = _tiny(world, num_steps, _MANY_UNITS, frozen=1 + _MORE)
    count, all_more = _MANY_UNITS - _FEW_UNITS, _MANY_UNITS * _MORE
    per_frozen = max(0.0, several - frozen) / all_more
    parameter = max(0.0, trained[1] - many[1]) / all_more
    unit = max(0.0, many[0] - few[0]) / count
    return {
        "step_seconds": max(0.0, few[0] - _FEW_UNITS * unit)
        + max(0.0, few[1] - _FEW_UNITS * parameter),
        "unit_seconds": unit,
        "buffer_seconds": max(0.0, (frozen - many[0]) / _MANY_UNITS - per_frozen),
        "trained_seconds": max(0.0, trained[0] - many[0]) / all_more,
        "frozen_seconds": per_frozen,
        "parameter_seconds": parameter,
    }


def _tiny(world: World, num_steps: int, num_units: int, **parameters: int) -> tuple[float, float]:
    """Return what the engine adds to forward and backward, and the seconds of the optimizer."""
    passes, updates, clock = [], [], _clock(world.device)
    for is_sharded in (False, True):
        units = (_Unit(_TINY_ELEMENTS, **parameters) for _ in range(num_units))
        model = nn.Sequential(*units).to(world.device)
        if is_sharded:
            sw.fully_shard(model, units=_Unit)
        optimizer = fused_adamw([one for one in model.parameters() if one.requires_grad])
        x = torch.ones(1, device=world.device)
        times: list[tuple[float, float]] = []
        for _ in range(num_steps):
            wait_for_device(world.device)
            dist.barrier()
            began = clock()
            model(x).sum().backward()
            middle = clock()
            optimizer.step()
            optimizer.zero_grad()
            times.append((middle - began, clock() - middle))
        passes.append(median(one for one, _ in times))
        updates.append(median(one for _, one in times[1:]))
    return max(0.0, passes[1] - passes[0]), updates[1]


def _collectives(world: World, steps: int) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for policy in (sw.MixedPrecisionPolicy(), _HALF):
        itemsize = (policy.param_dtype or torch.float32).itemsize
        for strategy, names in _COLLECTIVES.items():
            for event, points in _spans(world, strategy, policy, steps).items():
                if event in names:
                    curves[f"{names[event]}/{itemsize}"] = Curve(points=tuple(points))
    return curves


def _spans(
    world: World, strategy: str, policy: sw.MixedPrecisionPolicy, num_steps: int
) -> dict[EventKind, list[tuple[float, float]]]:
    """Measure gathers and reductions: bytes and seconds of each unit, by kind."""
    units = [_Unit(size) for size in _UNIT_ELEMENTS]
    model = nn.Sequential(*units).to(world.device)
    model = sw.fully_shard(model, units=_Unit, strategy=strategy, prefetch=0, mp_policy=policy)
    sw.ledger(model).takes_times = True  # on an accelerator, this costs host time
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    events: list[RecordedEvent] = []
    for number in range(num_steps):
        dist.barrier()
        model(torch.ones(1, device=world.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Local processes share a clock, so the offset is zero.
        events += [recorded_event(number, record, 0.0) for record in sw.ledger(model).records()]
    sizes = {(event.event, event.unit): event.bytes for event in events if event.spans}
    found: defaultdict[EventKind, list[tuple[float, float]]] = defaultdict(list)
    for key, seconds in transfer_seconds(world.gather(events)).items():
        if sizes[key]:
            found[key[0]].append((sizes[key], seconds))
    return {kind: sorted(points) for kind, points in found.items()}


def _update_seconds(device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(_UPDATE_ELEMENTS, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = fused_adamw([parameter])
    clock, seconds = _clock(device), []
    for _ in range(_TIMES + 1):
        wait_for_device(device)
        began = clock()
        optimizer.step()
        wait_for_device(device)
        seconds.append(clock() - began)
    return median(seconds[1:]) / parameter.grad.nbytes  # the first step creates the states
