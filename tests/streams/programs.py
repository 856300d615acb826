"""Training on a simulated device, compared with one process."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

import shardwise as sw
from shardwise.comm.api import MemoryKind
from shardwise.plan.strategy import STRATEGIES
from shardwise.tensor.sharding import local_of
from tests.fuzz.optimizers import make_optimizer
from tests.runtime.one_process import adamw, assert_equal_models, own_part
from tests.streams.install import simulated
from tests.streams.models import CASES, build
from tests.streams.simulation import Problem, Simulation

__all__ = [
    "DEVICE",
    "Program",
    "assert_trains_as_in_one_process",
    "digest",
    "digest_of_training",
    "train",
]

DEVICE = torch.device("cuda", 1)
BATCH = 12
_SHOWN = 5  # problems
_WARM_UP = 1  # steps


@dataclass(frozen=True)
class Program:
    """A model, the options with which it is sharded, and its training step."""

    name: str = "small"
    strategy: str = "fsdp"
    prefetch: int = 1
    accumulate: int = 1
    in_rows: bool = False  # only the last backward of a step reduces over the columns of the mesh
    steps: int = 2
    # "all"; "copies": the device keeps copies of the shards; "device": it runs the optimizer
    offload: str | None = None
    low_precision: bool = False
    is_permuted: bool = False  # the ranks of the mesh are permuted
    clip: float | None = None
    granularity: str = "element"
    unused: str = "none"
    offloads_activations: bool = False
    memory: MemoryKind = MemoryKind.OWN  # of the buffers of collectives
    optimizer: str = "adamw"  # or "muon", "soap", "adam8bit"
    steps_in_backward: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def shard(self, model: nn.Module) -> Any:
        policy = None
        if self.low_precision:
            policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        offload = None
        if self.offload is not None:
            step: Literal["host", "device"] = "device" if self.offload == "device" else "host"
            offload = sw.CPUOffloadPolicy(parameters=self.offload != "copies", step=step)
        options = {
            "units": CASES[self.name].units,
            "strategy": self.strategy,
            "prefetch": self.prefetch,
            "mp_policy": policy,
            "offload_policy": offload,
            "granularity": self.granularity,
            "unused": self.unused,
            "mesh": self.mesh(),
            **self.options,
        }
        with _deterministic("reproducible" in self.options):
            sharded: Any = sw.fully_shard(
                model, **{k: v for k, v in options.items() if v is not None}
            )
        if self.memory is MemoryKind.SYMMETRIC:
            sharded.set_symm_mem_for_comm()
        elif self.memory is MemoryKind.REGISTERED:
            sharded.set_allocate_memory_from_process_group_for_comm(True)
        return sharded

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return adamw(model.parameters())
        return make_optimizer(self.optimizer, list(model.parameters()))

    def mesh(self) -> DeviceMesh | None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size == 1:
            return None
        ranks = torch.arange(size)
        if self.is_permuted:
            ranks = ranks.flip(0)
        if STRATEGIES[self.strategy].num_axes == 1:
            return DeviceMesh("cuda", ranks) if self.is_permuted else None
        return DeviceMesh(
            "cuda", ranks.view(2, -1), mesh_dim_names=("replicate", "shard"), _init_backend=False
        )


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Use deterministic kernels, which a reproducible model on a device requires."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train(
    program: Program,
    simulation: Simulation,
    model: nn.Module,
    after_step: Callable[[nn.Module, int], None] = lambda _model, _step: None,
) -> nn.Module:
    """Move ``model`` to the device, shard it and train it."""
    case = CASES[program.name]
    simulation.current_device = DEVICE.index
    sharded = program.shard(model.to(DEVICE))
    optimizer = program.make_optimizer(model)
    if program.steps_in_backward:
        sw.optimizer_in_backward(model, optimizer)
    simulation.current_device = 0
    for step in range(program.steps):
        batches = [batch_of(program, step, i).to(DEVICE) for i in range(program.accumulate)]
        simulation.is_steady = step >= _WARM_UP
        simulation.is_planned = step > _WARM_UP  # the first two gather in different orders
        for part, batch in enumerate(batches, start=1):
            if program.in_rows:
                sharded.set_requires_all_reduce(part == program.accumulate)
            offloads = (
                sw.offload_activations(model) if program.offloads_activations else nullcontext()
            )
            with offloads:
                loss = case.loss(model(batch)) / program.accumulate
            torch.autograd.backward(loss)
        after_step(model, step)
        if program.clip is not None:
            sw.clip_grad_norm_(model.parameters(), program.clip)
        optimizer.step()
        optimizer.zero_grad()
        simulation.is_steady = simulation.is_planned = False
    return model


def batch_of(program: Program, step: int, part: int) -> Tensor:
    """This rank's part of the global batch, on the host."""
    torch.manual_seed(1000 * step + part)
    return own_part(CASES[program.name].batch(BATCH))


def assert_trains_as_in_one_process(program: Program) -> None:
    """Train on late streams; compare the numbers, and check that there are no problems."""
    case = CASES[program.name]
    reference, model = build(program.name), build(program.name)
    optimizer = program.make_optimizer(reference)

    def compare(model: nn.Module, step: int) -> None:
        with _disable_current_modes():
            for part in range(program.accumulate):
                torch.manual_seed(1000 * step + part)
                loss = case.loss(reference(case.batch(BATCH))) / program.accumulate
                torch.autograd.backward(loss)
            assert_equal_models(model, reference, step)
            if program.clip is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), program.clip)
            optimizer.step()
            optimizer.zero_grad()

    simulation = Simulation(is_late=True)
    with simulated(simulation):
        train(program, simulation, model, compare)
        with _disable_current_modes():
            assert_equal_models(model, reference, program.steps)
        del model
    found = [str(one) for one in simulation.found if one.problem is not Problem.SYNC]
    assert not found, "\n".join(found[:_SHOWN])


def digest_of_training(program: Program, *, is_late: bool) -> int:
    """Train and return a digest of this rank's shards."""
    simulation = Simulation(is_late=is_late)
    with simulated(simulation):
        return digest(train(program, simulation, build(program.name)))


def digest(model: nn.Module) -> int:
    """Return a digest of this rank's shards."""
    parts = [
        (local_of(p) if isinstance(p, DTensor) else p).detach().reshape(-1).view(torch.uint8)
        for p in model.parameters()
    ]
    return zlib.crc32(b"".join(bytes(part.tolist()) for part in parts))
