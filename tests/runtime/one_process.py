"""Training in one process on the global batch, and comparisons of ranks with it."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise.comm.communicator import Communicator, communicator
from shardwise.plan.strategy import STRATEGIES
from shardwise.runtime.engine import Runtime
from shardwise.schedule.events import EventKind
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.models import CASES, WIDTH, build

TOLERANCE = 1e-10
BATCH = 12  # divides by 1, 2, 3 and 4 ranks

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    # With a small eps, Adam would turn a gradient that is only rounding error into a step.
    # Fused, because the loop over parameters takes longest in these small models.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)


def step_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def options_of(strategy: str) -> dict[str, Any]:
    """Options for the strategy, with a mesh of two rows if it has two axes."""
    if STRATEGIES[strategy].num_axes == 1:
        return {"strategy": strategy}
    shape = (2, world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return {"strategy": strategy, "mesh": mesh}


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model."""
    runtime = model.__dict__["_shardwise"].runtime
    assert isinstance(runtime, Runtime)
    return runtime


def comm_of(model: nn.Module) -> Communicator:
    """The communicator of a sharded model, which exists since its first step."""
    runtime = runtime_of(model)
    return communicator(runtime.mesh.world, runtime.pools.device)


def assert_reduced_once(model: nn.Module) -> None:
    """Each unit was reduced once in the last step, and gathered for forward and for backward."""
    events = [record.event for record in sw.ledger(model).records()]
    counts = Counter((event.unit, event.kind) for event in events)
    for index, unit in enumerate(runtime_of(model).units):
        assert counts[index, EventKind.REDUCE] == 1, unit
        assert 1 <= counts[index, EventKind.GATHER] <= 2, unit


def own_part(batch: Tensor) -> Tensor:
    """This rank's share of the global batch."""
    return batch.chunk(world_size())[rank()].clone()


def mean_over_ranks(loss: Tensor) -> Tensor:
    total = loss.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total / world_size()


def assert_close(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Compare the elements that this rank has of a sharded tensor, without communication."""
    if expected is None or actual is None:
        assert actual is None, f"{what}: expected None, got {actual}"
        assert expected is None, f"{what}: got None, expected {expected}"
        return
    assert actual.shape == expected.shape, what
    whole, parts = expected, 1
    if isinstance(actual, ShardedTensor):
        run = actual.sharding.run
        parts = actual.sharding.mesh.size
        actual, expected = actual.to_local(), expected.flatten()[run.start : run.stop]
    elif isinstance(actual, DTensor) and {*map(type, actual.placements)} <= {Shard, Replicate}:
        mesh, placements = actual.device_mesh, actual.placements
        parts = mesh.size()
        cut = distribute_tensor(expected.detach(), mesh, placements, src_data_rank=None)
        actual, expected = actual.to_local(), cut.to_local()
        assert actual.shape == expected.shape, what
    difference = full(actual).detach().double() - expected.detach().double()
    error = torch.linalg.vector_norm(difference).item()
    if error <= TOLERANCE / parts:  # so that all parts together are within the tolerance
        return
    scale = max(1.0, whole.double().norm().item()) / parts
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.2e} of {scale:.2e}"


@dataclass(frozen=True)
class Step:
    """The results of one process in a step, before its update."""

    batches: Sequence[Tensor]
    losses: Sequence[Tensor]
    parameters: Mapping[str, nn.Parameter]  # with their gradients
    norm: Tensor | None  # of all gradients, if they are clipped


@lru_cache(maxsize=64)
def train_alone(
    name: str,
    steps: int,
    accumulate: int,
    make_optimizer: MakeOptimizer,
    set_to_none: bool,
    clip: float | None,
) -> Sequence[Step]:
    """Train a case in one process. Returns ``steps`` steps, and one with the final parameters."""
    case, model = CASES[name], build(name)
    optimizer = make_optimizer(model.parameters())
    recorded = []
    for _ in range(steps):
        batches = [case.batch(BATCH) for _ in range(accumulate)]
        losses = []
        for batch in batches:
            loss = case.loss(model(batch.clone())) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        parameters = _copies(model)
        norm = None if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip)
        recorded.append(Step(batches, losses, parameters, norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [*recorded, Step((), (), _copies(model), None)]


def _copies(model: nn.Module) -> dict[str, nn.Parameter]:
    copies = {}
    for name, parameter in model.named_parameters():
        copies[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        copies[name].grad = None if parameter.grad is None else parameter.grad.clone()
    return copies


def assert_equal_training(
    name: str,
    steps: int = 2,
    accumulate: int = 1,
    make_optimizer: MakeOptimizer = adamw,
    set_to_none: bool = True,
    clip: float | None = None,
    **options: Any,
) -> Any:
    """Train a case sharded and in one process; compare loss, gradients and parameters."""
    case = CASES[name]
    *recorded, last = train_alone(name, steps, accumulate, make_optimizer, set_to_none, clip)
    model = build(name)
    sw.fully_shard(model, **{"units": case.units, **options})
    optimizer = make_optimizer(model.parameters())
    for number, step in enumerate(recorded):
        for batch, expected in zip(step.batches, step.losses, strict=True):
            loss = case.loss(model(own_part(batch))) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            assert_close(mean_over_ranks(loss), expected, f"loss of step {number}")
        assert_equal_parameters(model, step.parameters, number)
        if clip is not None:
            clipped = sw.clip_grad_norm_(model.parameters(), clip)
            assert_close(full(clipped), step.norm, "norm")
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert_equal_parameters(model, last.parameters, steps)
    whole = [*zip(model.parameters(), last.parameters.values(), strict=True)]
    for parameter, wanted in (whole[0], whole[-1]):  # the others were compared by parts
        assert_close(full(parameter.detach()), wanted.detach(), "the whole of one at the end")
    return model


def sharded_pair(model: str | nn.Module, **options: Any) -> tuple[Any, Any]:
    """A model, given itself or by the name of its case, and a copy of it that is sharded."""
    if isinstance(model, str):
        options = {"units": CASES[model].units, **options}
    alone: nn.Module = build(model) if isinstance(model, str) else model
    return alone, sw.fully_shard(copy.deepcopy(alone), **options)


def squares(model: Any, x: Tensor) -> Any:
    return model(x).square().mean()


def rows(number: int = BATCH) -> Tensor:
    """A global batch, the same on all ranks."""
    return torch.randn(number, WIDTH).double()


def assert_equal_steps(
    model: nn.Module,
    reference: nn.Module,
    steps: int = 3,
    *,
    loss: Callable[[Any, Tensor], Any] = squares,
    batch: Callable[[], Tensor] = rows,
    make_optimizer: MakeOptimizer | None = None,
    zeroes: bool = False,
) -> None:
    """Run both on the same batches; compare gradients and parameters after each backward.

    Gradients add up over the steps, unless there is an optimizer or ``zeroes``, which drops those
    of before.
    """
    both: Any = [(model, own_part), (reference, Tensor.clone)]
    optimizers = [make_optimizer(one.parameters()) for one, _ in both if make_optimizer]
    for step in range(steps):
        whole = batch()
        for one, part in both:
            if zeroes:
                one.zero_grad()
            loss(one, part(whole)).backward()
        assert_equal_models(model, reference, step)
        step_all(optimizers)


def assert_equal_models(model: nn.Module, reference: nn.Module, step: int) -> None:
    assert_equal_parameters(model, dict(reference.named_parameters()), step)


def assert_equal_whole(model: nn.Module, reference: nn.Module, step: int) -> None:
    """Compare gathered parameters and gradients, for placements that `assert_close` does not cut.

    The modules may have them in different orders.
    """
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name)
        gradient = None if parameter.grad is None else full(parameter.grad)
        assert_close(gradient, expected.grad, f"gradient of {name} in step {step}")
        assert_close(full(parameter.detach()), expected.detach(), f"{name} after step {step}")


def assert_equal_parameters(
    model: nn.Module, reference: Mapping[str, nn.Parameter], step: int
) -> None:
    """Compare parameters and their gradients."""
    pairs = zip(model.named_parameters(), reference.items(), strict=True)
    for (name, parameter), (expected_name, expected) in pairs:
        assert name == expected_name
        assert parameter.shape == expected.shape
        assert parameter.requires_grad == expected.requires_grad
        assert_close(parameter.grad, expected.grad, f"gradient of {name} in step {step}")
        assert_close(parameter.detach(), expected.detach(), f"{name} after step {step}")
