"""C3: a rank holds the planned memory, to 2 %; all tensors that are alive are counted."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.comm.api import Work
from shardwise.comm.communicator import communicator
from shardwise.features.host_collectives import HostCollectives
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory.step import memory_certificate
from shardwise.host.shared_memory import SharedMemory
from shardwise.plan.offload import NO_OFFLOAD
from shardwise.plan.strategy import STRATEGIES, Level, Strategy
from shardwise.runtime.buffers import FlatBuffer
from shardwise.runtime.codecs import HostCodec
from shardwise.runtime.engine import Runtime
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.memory import CAN_SWAP, Arena, Pool
from shardwise.runtime.scheduler import Scheduler
from shardwise.runtime.unit import Unit
from shardwise.schedule.events import EventKind
from tests.covering import covered_first
from tests.ranks import on_ranks
from tests.runtime.one_process import options_of, runtime_of, world_size
from tests.runtime.towers import SHAPES, Shape
from tests.watching import without_frames

# The last values cover most rows below, and a 1D mesh has two ranks instead of four.
PRESETS = {row.name: row for row in sorted(STRATEGIES.values(), key=lambda row: row.num_axes)}
SIZES = {name: 2 * row.num_axes for name, row in PRESETS.items()}
TOLERANCE = 0.02


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in SHAPES},
    "even, accumulates": {"accumulates": True},
    **{f"{name}, holds": {"num_held": 1} for name in ("uneven", "large root", "tied")},
    "even, holds two": {"num_held": 2},
    **{f"{name}, bfloat16": {"is_half": True} for name in ("even", "tied", "wide")},
    "even, accumulates, bfloat16": {"accumulates": True, "is_half": True},
}
# With its own memory for whole gradients: the plan does not contain gradients that autograd still
# holds, and autograd holds the head's gradient until it has the embedding's.
ROWS = [
    (preset, variant)
    for preset, variant in product(PRESETS, VARIANTS)
    if not (variant == "tied, holds" and PRESETS[preset].inner is Level.OPTIMIZER)
    and (CAN_SWAP or preset != "ddp")  # gradients are not reduced in place
]


@on_ranks()
@pytest.mark.parametrize(
    ("preset", "variant", "world_size"),
    [
        *covered_first((*row, SIZES[row[0]]) for row in ROWS),
        *(pytest.param(*row, 6 - SIZES[row[0]], marks=pytest.mark.thorough) for row in ROWS),
    ],
)
def test_live_bytes_are_those_of_the_plan(preset: str, variant: str) -> None:
    _measure_variant(PRESETS[preset], variant, NO_OFFLOAD)


@on_ranks()
@pytest.mark.parametrize(
    ("preset", "variant", "parameters", "world_size"),
    [
        ("fsdp", "even, accumulates, bfloat16", True, 2),
        ("zero1", "uneven, holds", False, 2),
        ("ddp", "tied", True, 2),
        ("hfsdp", "wide", True, 4),
        *(
            pytest.param(*row, parameters, 4, marks=pytest.mark.thorough)
            for row, parameters in product(ROWS, (True, False))
            if row[0] in ("fsdp", "zero1", "ddp", "hfsdp")
            and (*row, parameters) != ("hfsdp", "wide", True)  # is above
        ),
    ],
)
def test_live_bytes_with_offload(preset: str, variant: str, parameters: bool) -> None:
    _measure_variant(PRESETS[preset], variant, sw.CPUOffloadPolicy(parameters=parameters))


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero2", marks=pytest.mark.thorough)])
def test_live_bytes_with_steps_in_backward(strategy: str) -> None:
    for policy in (NO_OFFLOAD, sw.CPUOffloadPolicy()):
        options = {"strategy": strategy, "offload_policy": policy}
        _measure("even", SHAPES["even"], options, steps_in_backward=True)


@on_ranks()
@pytest.mark.parametrize(
    ("preset", "shape", "per_rank", "world_size"),
    [
        ("fsdp", "uneven", 8, 2),
        ("zero2", "even", 4, 2),
        ("hsdp", "large root", 4, 4),
        *(
            pytest.param(preset, shape, per_rank, 4, marks=pytest.mark.thorough)
            for preset, shape, per_rank in product(PRESETS, ("even", "uneven"), (1, 2, 8))
            if CAN_SWAP or preset != "ddp"
        ),
    ],
)
def test_sums_in_a_binary_tree(preset: str, shape: str, per_rank: int) -> None:
    """A rank holds log2(V / N) sums of whole gradients, and parameters are cut between blocks."""
    torch.set_num_threads(1)
    options = {"reproducible": per_rank * world_size(), **options_of(preset)}
    # One sum too many would be more than this. With one micro-batch a rank holds none, and its
    # activations, which are not planned here, count for more.
    tolerance = 0.005 if per_rank > 1 else TOLERANCE
    _measure(shape, SHAPES[shape], options, num_held=per_rank - 1, tolerance=tolerance)


@on_ranks()
@pytest.mark.parametrize(
    ("preset", "world_size"),
    [("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.thorough)],
)
def test_what_a_wire_keeps_is_in_the_plan(preset: str) -> None:
    """Encoded tensors exist only while they are sent, so bytes are compared between steps."""
    gc.collect()
    gc.freeze()
    model = SHAPES["even"].build()
    options = options_of(preset)
    wire = sw.Wire("int8", "int4", error_feedback=True)
    sw.fully_shard(model, units=SHAPES["even"].units, wire=wire, **options)
    for _ in range(2):
        _step(model, num_held=0)
        model.zero_grad()
    runtime = runtime_of(model)
    planned = memory_certificate(runtime.plan, None, Configuration(), on_cpu=True)
    kept = sum(unit.feedback_bytes for unit in runtime.plan.units)
    assert kept > planned.between_steps_bytes / 3
    assert _least_live_bytes(runtime) == pytest.approx(planned.between_steps_bytes, rel=TOLERANCE)


@on_ranks(4)
@pytest.mark.parametrize("sums", ["wholes", "rows"])
def test_no_memory_of_gradients_is_idle_between_micro_batches(sums: str) -> None:
    shape = SHAPES["large root"]
    model: Any = shape.build()
    sw.fully_shard(model, units=shape.units, **options_of("hsdp"))
    hold = model.set_requires_gradient_sync if sums == "wholes" else model.set_requires_all_reduce
    hold(False)
    pools = runtime_of(model).pools
    for _ in range(3):
        model(torch.ones(1, 16)).mean().backward()
        for pool in (pools.gradients, pools.enclosing_gradients):
            assert pool.held_bytes == pool.allocated_bytes > 0


def _measure_variant(strategy: Strategy, variant: str, offload_policy: sw.OffloadPolicy) -> None:
    options: dict[str, Any] = {"strategy": strategy, "offload_policy": offload_policy}
    if strategy.num_axes > 1:
        sizes = (2, world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    name = variant.partition(",")[0]
    loop = dict(VARIANTS[variant])
    if loop.pop("is_half", False):
        options["mp_policy"] = sw.MixedPrecisionPolicy(torch.bfloat16)  # so sums are cast
    _measure(name, SHAPES[name], options, **loop)


def _measure(
    name: str,
    shape: Shape,
    options: dict[str, Any],
    *,
    accumulates: bool = False,
    num_held: int = 0,
    steps_in_backward: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    gc.collect()
    gc.freeze()  # `gc.get_objects` then omits existing objects, which are many and slow to check
    torch.manual_seed(0)
    model = shape.build()
    sw.fully_shard(model, units=shape.units, **options)
    runtime = runtime_of(model)
    if steps_in_backward:
        sw.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(2):
        _step(model, num_held=num_held)
        if not accumulates:
            model.zero_grad()
    with without_frames():
        between = _least_live_bytes(runtime)
        with _sampled(lambda: _live_bytes(runtime)) as samples:
            _step(model, num_held=num_held)
    loop = Configuration(
        optimizer="sgd",
        accumulation=2 if accumulates else 1 + num_held,
        accumulate="whole" if num_held else "shards",
        step_in_backward=steps_in_backward,
    )
    planned = memory_certificate(runtime.plan, None, loop, on_cpu=True)
    what = f"{name}, {accumulates=}, {num_held=}, {steps_in_backward=}"
    assert between == pytest.approx(
        planned.between_steps_bytes + planned.offloaded.parameters + planned.offloaded.gradients,
        rel=tolerance,
    ), what
    assert max(samples) == pytest.approx(planned.total_peak_bytes, rel=tolerance), what
    idle = runtime.pools.gathered.held_bytes
    assert idle <= planned.transient_bytes * (1 + tolerance), f"{what}: the pool keeps too much"
    for pool in (runtime.pools.gradients, runtime.pools.enclosing_gradients):
        assert pool.held_bytes == 0, f"{what}: and whole gradients stay"


def _step(model: Any, *, num_held: int) -> None:
    is_reproducible = runtime_of(model).plan.leaves is not None  # then the engine holds gradients
    for _ in range(num_held):
        if not is_reproducible:
            model.set_requires_gradient_sync(False)
        model(torch.ones(1, 16)).mean().backward()
    if not is_reproducible:
        model.set_requires_gradient_sync(True)
    model(torch.ones(1, 16)).mean().backward()


@contextmanager
def _sampled(held_bytes: Callable[[], int]) -> Iterator[list[int]]:
    """Sample ``held_bytes()`` around every event, and when buffers and gradients get memory."""
    samples: list[int] = []
    do, hand_over = Scheduler._do, Gradients._hand_over

    def sample(scheduler: Scheduler, kind: EventKind, unit: Unit) -> tuple[Work, ...]:
        samples.append(held_bytes())
        marks = do(scheduler, kind, unit)
        samples.append(held_bytes())
        return marks

    def sample_handing(gradients: Gradients, reduced: Tensor) -> None:
        hand_over(gradients, reduced)
        samples.append(held_bytes())

    acquire = FlatBuffer.acquire

    def sample_acquiring(buffer: FlatBuffer, memory: torch.UntypedStorage | None = None) -> None:
        acquire(buffer, memory)
        samples.append(held_bytes())

    with (
        mock.patch.object(FlatBuffer, "acquire", sample_acquiring),
        mock.patch.object(Scheduler, "_do", sample),
        mock.patch.object(Gradients, "_hand_over", sample_handing),
    ):
        yield samples


def _pools_of(runtime: Runtime) -> list[Pool]:
    """All pools of a step, on the device and on the host."""
    flats = [flat for unit in runtime.units for flat in unit.flats]
    hosts = [flat.codec.offloader for flat in flats if isinstance(flat.codec, HostCodec)]
    staging = {id(one): one.staging for one in hosts}
    return [*runtime.pools, *staging.values()]


def _idle_storages(pool: Pool) -> list[torch.UntypedStorage]:
    """Storages through which no tensor sees memory now."""
    if not isinstance(pool, Arena):
        return pool._idle
    whole = [] if pool._whole is None else [pool._whole]
    ranges = [s for owner, s in pool._ranges.items() if owner not in pool._alive.values()]
    return [*pool._idle, *whole, *ranges]


def _least_live_bytes(runtime: Runtime) -> int:
    """Live bytes between steps, without those of a frame that the heartbeat still holds."""
    samples = [_live_bytes(runtime)]
    for _ in range(3):
        time.sleep(0.01)
        samples.append(_live_bytes(runtime))
    return min(samples)


def _live_bytes(runtime: Runtime) -> int:
    """Bytes of all tensors of this test, without idle pool memory and a window of the sums."""
    live: dict[int, int] = {}
    idle = {storage._cdata for pool in _pools_of(runtime) for storage in _idle_storages(pool)}
    reduce = communicator(runtime.mesh.world, runtime.pools.device).reduce
    assert isinstance(reduce, HostCollectives)
    window = reduce.point_to_point._window
    assert window.nbytes < 1 << 20, "for the pieces of all reductions together"
    idle.add(window.untyped_storage()._cdata)
    objects = gc.get_objects()
    kinds = {kind for kind in {*map(type, objects)} if _has_memory(kind)}
    for thing in objects:
        if type(thing) not in kinds:
            continue
        storage = thing.untyped_storage() if isinstance(thing, Tensor) else thing
        if storage._cdata not in idle:
            live[storage.data_ptr()] = storage.nbytes()
    # A collective may be moving a buffer now, so shared memory is counted by buffer.
    for start, num_bytes in _in_common(runtime.pools.gathered):
        for address in [one for one in live if start <= one < start + num_bytes]:
            del live[address]
    buffers = [flat.codec.buffer for unit in runtime.scheduler.units for flat in unit.flats]
    in_buffers = sum(
        one.flat.nbytes
        for one in buffers
        if isinstance(one, FlatBuffer) and one.is_acquired and one._pool.shared
    )
    return in_buffers + sum(live.values())


def _has_memory(kind: type) -> bool:
    if issubclass(kind, sw.ShardedTensor):
        return False
    return issubclass(kind, (torch.UntypedStorage, Tensor))


def _in_common(pool: Pool) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of its mapped shared memory."""
    if isinstance(pool.shared, SharedMemory):
        opened = [one[1] for one in list(pool.shared._opened.values())]  # a thread changes it
        for memory in (*pool.shared._own.values(), *opened):
            yield torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory)
