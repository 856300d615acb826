"""Pipeline schedules with sharded stages train as one process, with one collective per unit."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.features import fused_wgrad
from shardwise.pipeline import PipelineStage
from shardwise.schedule.events import EventKind
from tests.ranks import on_ranks
from tests.runtime.modules import raise_together
from tests.runtime.one_process import adamw, assert_close, full, runtime_of

WIDTH, MICROBATCHES, ROWS = 6, 4, 2  # rows of a micro-batch
FLAT = (pipelining.ScheduleGPipe, pipelining.Schedule1F1B)  # one stage on each rank
LOOPED = (pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleInterleavedZeroBubble)
V = (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV)


def nothing(*_: object) -> None:
    """A hook, which could keep its arguments."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm.bias.requires_grad_(False)
        self.down.register_forward_hook(nothing)  # as in tensor parallelism

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).tanh())
        return x + y


class Stage(nn.Module):
    """Two blocks between layers that share a weight."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stages_here(kind: type, mesh: DeviceMesh) -> list[int]:
    """This rank's stages of the schedule."""
    index, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    if kind in FLAT:
        return [index]
    return [index, 2 * size - 1 - index if kind in V else index + size]


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    for block in stage.get_submodule("blocks"):  # type: ignore[attr-defined]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def build_schedule(kind: Any, mesh: DeviceMesh, modules: dict[int, nn.Module], num: int) -> Any:
    group = mesh["pp"].get_group()
    cpu = torch.device("cpu")
    stages = [PipelineStage(module, i, num, cpu, group=group) for i, module in modules.items()]
    return kind(stages[0] if kind in FLAT else stages, MICROBATCHES, loss_fn=loss_of)


def accumulate_reference(stages: list[nn.Module], x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    """Gradients of the mean over micro-batches: each computed in ``dtype``, added in float64."""
    inputs, targets = torch.split(x, ROWS), torch.split(y, ROWS)
    computing = copy.deepcopy(nn.Sequential(*stages)).to(dtype)
    for one, target in zip(inputs, targets, strict=True):
        computing.zero_grad()
        loss_of(computing(one.to(dtype)), target).backward()  # type: ignore[no-untyped-call]
        originals = nn.Sequential(*stages).parameters()
        for mine, parameter in zip(computing.parameters(), originals, strict=True):
            if mine.grad is not None:
                gradient = mine.grad.double() / len(inputs)
                parameter.grad = gradient + (0.0 if parameter.grad is None else parameter.grad)


def record_events(modules: dict[int, nn.Module]) -> Counter[tuple[int, int, EventKind]]:
    """Count the events appended to the ledgers from now on, by stage, unit and kind."""
    counts: Counter[tuple[int, int, EventKind]] = Counter()
    for index, module in modules.items():
        ledger = runtime_of(module).scheduler.ledger
        append: Callable[[Any], None] = ledger.append

        def count(record: Any, index: int = index, append: Any = append) -> None:
            counts[index, record.event.unit, record.event.kind] += 1
            append(record)

        ledger.append = count  # type: ignore[method-assign]
    return counts


def check_training(
    kind: Any,
    mesh: DeviceMesh,
    dtype: torch.dtype = torch.float64,
    steps: int = 2,
    block: type[nn.Module] = Block,
    **options: Any,
) -> None:
    """Compare gradients and parameters with one process, and count collectives."""
    torch.manual_seed(0)
    here = stages_here(kind, mesh)
    num_stages = len(here) * mesh["pp"].size()
    reference: list[nn.Module] = [Stage(block).double() for _ in range(num_stages)]
    modules = {index: copy.deepcopy(reference[index]) for index in here}
    for module in modules.values():
        if "tp" in (mesh.mesh_dim_names or ()):
            parallelize(module, mesh["tp"])
        sw.fully_shard(module, mesh=mesh["dp"], units=Block, **options)
    schedule = build_schedule(kind, mesh, modules, num_stages)
    trained = adamw(nn.ModuleList(modules.values()).parameters())
    expected = adamw(nn.ModuleList(reference).parameters())
    counts = record_events(modules)
    for step in range(steps):
        x, y = torch.randn(2, mesh["dp"].size() * MICROBATCHES * ROWS, WIDTH).double()
        accumulate_reference(reference, x, y, dtype)
        run_step(schedule, modules, *(t.chunk(2)[mesh["dp"].get_local_rank()] for t in (x, y)))
        for index, name, one, wanted in pairs(modules, reference):
            what = f"gradient of {index}.{name} in step {step}"
            gradient = None if one.grad is None else full(one.grad)
            assert_close(gradient, wanted.grad, what)
        assert all(not sw.ledger(module).gathered_bytes for module in modules.values())
        for optimizer in (trained, expected):
            optimizer.step()
            optimizer.zero_grad()
    for index, name, one, wanted in pairs(modules, reference):
        assert_close(full(one.detach()), wanted.detach(), f"{index}.{name}")
    for (stage, unit, event), number in counts.items():
        if event in (EventKind.GATHER, EventKind.REDUCE):
            assert number == steps, f"{event} of unit {unit} of stage {stage}"


def run_step(schedule: Any, modules: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
    last = max(schedule._stages if hasattr(schedule, "_stages") else [schedule._stage],
               key=lambda stage: stage.stage_index)  # fmt: skip
    args = (x,) if 0 in modules else ()
    schedule.step(*args, **({"target": y} if last.is_last else {}))


def pairs(
    modules: dict[int, nn.Module], reference: list[nn.Module]
) -> Iterator[tuple[int, str, Any, Tensor]]:
    for index, module in modules.items():
        wanted = dict(reference[index].named_parameters())
        for name, parameter in module.named_parameters():
            yield index, name, parameter, wanted[name]


@on_ranks(4)
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", [*FLAT, *LOOPED, *V], ids=lambda kind: kind.__name__)
def test_training_equals_one_process(kind: Any, steps: int) -> None:
    check_training(kind, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), steps=steps)


@on_ranks(4)
def test_evaluation_gathers_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    reference = nn.Sequential(Stage(), Stage()).double()
    index = mesh["pp"].get_local_rank()
    modules: dict[int, nn.Module] = {index: copy.deepcopy(reference[index])}
    sw.fully_shard(modules[index], mesh=mesh["dp"], units=Block)
    schedule = build_schedule(pipelining.ScheduleGPipe, mesh, modules, 2)
    counts = record_events(modules)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH).double()
    for parameter in modules[index].parameters():  # of a step whose update is yet to come
        parameter.grad = parameter.detach().clone()
    with torch.no_grad():
        for step in range(2):
            got = schedule.eval(x) if index == 0 else schedule.eval(target=x)
            assert not sw.ledger(modules[index]).gathered_bytes
            assert counts[index, 0, EventKind.GATHER] == step + 1
        if index:
            assert_close(got, reference(x), "output")
    for name, parameter in modules[index].named_parameters():
        assert_close(full(parameter.grad), full(parameter.detach()), f"gradient of {name}")


class CheckpointedBlock(Block):
    """A module whose recomputation does not call the unit."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


@on_ranks(4)
@pytest.mark.parametrize("kind", [V[0], pytest.param(FLAT[1], marks=pytest.mark.thorough)])
def test_activation_checkpointing_equals_one_process(kind: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    check_training(kind, mesh, block=CheckpointedBlock, steps=1)


class TwoOutputs(nn.Module):
    """A module with an output that depends on parameters alone; zero-bubble schedules lose it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.alone = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: Tensor, y: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh() + y, self.alone * 2


def loss_of_two(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return loss_of(outputs[0], target) + outputs[1].square().mean()


@on_ranks(2)
def test_an_output_of_parameters_alone_gets_gradients() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    reference: list[nn.Module] = [TwoOutputs().double() for _ in range(4)]
    modules = {i: copy.deepcopy(reference[i]) for i in stages_here(LOOPED[1], mesh)}
    for module in modules.values():
        sw.fully_shard(module, mesh=mesh["dp"])
    schedule = build_schedule(LOOPED[1], mesh, modules, 4)
    schedule._loss_fn = loss_of_two
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH).double()
    run_step(schedule, modules, x, y)
    for one, target in zip(torch.split(x, ROWS), torch.split(y, ROWS), strict=True):
        outputs: Any = (one,)
        for module in reference:
            outputs = module(*outputs)
        (loss_of_two(outputs, target) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
    for index, name, parameter, wanted in pairs(modules, reference):
        assert_close(full(parameter.grad), wanted.grad, f"gradient of {index}.{name}")


def fail_once(limit: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that raises when it is computed the ``limit``-th time."""
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == limit:
            raise_together(ValueError("no loss"), dist.group.WORLD)
        return loss_of(output, target)

    return loss


@on_ranks(2)
@pytest.mark.parametrize("kind", FLAT, ids=lambda kind: kind.__name__)
def test_a_step_after_one_that_failed_equals_one_process(kind: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    reference = Stage().double()
    model = sw.fully_shard(copy.deepcopy(reference), mesh=mesh["dp"], units=Block)
    schedule = build_schedule(kind, mesh, {0: model}, 1)
    schedule._loss_fn = fail_once(3)
    x, y = torch.randn(2, 2 * MICROBATCHES * ROWS, WIDTH).double()
    own, target = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in (x, y))
    with pytest.raises(ValueError, match="no loss"):
        schedule.step(own, target=target)
    with pytest.raises(sw.StepError, match="stage 0: the schedule still has losses of an earlier"):
        schedule.step(own, target=target)
    build_schedule(kind, mesh, {0: model}, 1).step(own, target=target)
    accumulate_reference([reference], x, y, torch.float64)
    for _, name, parameter, wanted in pairs({0: model}, [reference]):
        gradient = None if parameter.grad is None else full(parameter.grad)
        assert_close(gradient, wanted.grad, name)


@on_ranks(2)
def test_stages_that_cannot_run_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    index = mesh["pp"].get_local_rank()
    module = Stage().double()
    schedule = build_schedule(pipelining.ScheduleGPipe, mesh, {index: module}, 2)
    sw.fully_shard(module.blocks[0], mesh=mesh["dp"])
    with pytest.raises(sw.PlanError, match=rf"stage {index}: blocks\.0 is sharded and Stage"):
        schedule.step()
    sw.fully_shard(module, mesh=mesh["dp"])
    refusal = pytest.raises(sw.PlanError, match=rf"stage {index}: sw.transaction around a step")
    with refusal, sw.transaction(module):
        schedule.step()
    with pytest.raises(sw.PlanError, match=r"sw\.join around a pipeline"), sw.join(module):
        schedule.step()
    sw.optimizer_in_backward(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(sw.PlanError, match="would step before the schedule divides"):
        schedule.step()


@pytest.mark.thorough
@on_ranks(8)
@pytest.mark.parametrize("kind", [*FLAT, *LOOPED, *V], ids=lambda kind: kind.__name__)
def test_training_with_tensor_parallelism_equals_one_process(kind: Any) -> None:
    check_training(kind, init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp")))


@on_ranks(4)
@pytest.mark.parametrize("kind", [V[0], pytest.param(FLAT[1], marks=pytest.mark.thorough)])
def test_gradients_computed_in_their_slots_equal_one_process(kind: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_wgrad, "_LEAST_ELEMENTS", 0)  # layers of any size
        check_training(kind, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))


@on_ranks(4)
@pytest.mark.parametrize("kind", [FLAT[1], pytest.param(V[0], marks=pytest.mark.thorough)])
def test_mixed_precision_equals_one_process(kind: Any) -> None:
    """Compute in float32, and add gradients in float64."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    check_training(kind, mesh, torch.float32, mp_policy=policy, granularity="dim")


@on_ranks(4)
def test_backwards_that_torch_would_divide_wrongly_stay_whole() -> None:
    """As before torch 2.13."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with mock.patch("shardwise.pipeline.can_divide_backwards", return_value=False):
        check_training(pipelining.ScheduleInterleavedZeroBubble, mesh, steps=1)
