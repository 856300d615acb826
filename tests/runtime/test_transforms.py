"""`torch.func` and forward-mode differentiation through a sharded model give one process's numbers.

Every program differentiates the model with respect to its input, and then computes gradients of the
parameters, possibly through the derivative.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.plan.strategy import STRATEGIES
from shardwise.schedule.events import EventKind
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    assert_close,
    assert_equal_models,
    options_of,
    own_part,
    rank,
    runtime_of,
    world_size,
)
from tests.versions import needs_dual_checkpoints

WIDTH, SAMPLES = 4, 8
ONE_AXIS = [name for name, strategy in STRATEGIES.items() if strategy.num_axes == 1]
LARGE = 256  # the gradient of a weight of LARGE * LARGE elements is computed in its slot


class Block(nn.Module):
    """A unit; its output may be recomputed in backward."""

    is_checkpointed = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        if self.is_checkpointed:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Any:
        return x + self.outer(torch.tanh(self.inner(x)))


def build(width: int = WIDTH, *, is_checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(width, width), Block(width), Block(width), Block(width)
    ).double()
    for block in model[1:]:
        block.is_checkpointed = is_checkpointed
    return model


def sharded(strategy: str = "fsdp", width: int = WIDTH, **options: Any) -> Any:
    is_checkpointed = options.pop("is_checkpointed", False)
    model = build(width, is_checkpointed=is_checkpointed)
    return sw.fully_shard(model, units=Block, **options_of(strategy), **options)


def batches(width: int = WIDTH) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, v = torch.randn(2, SAMPLES, width, generator=generator, dtype=torch.float64)
    return x, v


jvp: Any = torch.func.jvp  # the number of results depends on its arguments
vjp: Any = torch.func.vjp


# -- programs: for samples and directions, the results to differentiate ----------------------------


def primal_of_jvp(model: Any, x: Any, v: Any) -> Any:
    y, tangent = jvp(model, (x,), (v,))
    return (y - tangent.detach()).square()


def tangent_of_jvp(model: Any, x: Any, v: Any) -> Any:
    return jvp(model, (x,), (v,))[1].square()


def dual_numbers(model: Any, x: Any, v: Any) -> Any:
    with forward_ad.dual_level():
        y, tangent = _dual_output(model, x, v)
    return y * tangent


def vjp_in_loss(model: Any, x: Any, v: Any) -> Any:
    y, pull_back = vjp(model, x)
    (slope,) = pull_back(v)
    return y + slope.square()


def detached_vjp(model: Any, x: Any, v: Any) -> Any:
    y, pull_back = vjp(model, x)
    return y.square() + pull_back(v)[0].detach()


def slope(model: Any, x: Any, _v: Any) -> Any:
    return grad(lambda one: model(one).square().sum())(x)


def slopes_by_sample(model: Any, x: Any, v: Any) -> Any:
    return vmap(grad(lambda one, to: (model(one) * to).sum()))(x, v).square()


def mapped(model: Any, x: Any, _v: Any) -> Any:
    return vmap(model)(x).square()


def jacobian_backward(model: Any, x: Any, v: Any) -> Any:
    return (vmap(jacrev(model))(x) @ v[:, :, None]).square()


def jacobian_forward(model: Any, x: Any, v: Any) -> Any:
    return (vmap(jacfwd(model))(x) @ v[:, :, None]).square()


def curvature(model: Any, x: Any, v: Any) -> Any:
    of_sum = vmap(hessian(lambda one: model(one).square().sum()))(x)
    return of_sum @ v[:, :, None]


def forward_over_backward(model: Any, x: Any, v: Any) -> Any:
    return jvp(grad(lambda one: model(one).square().sum()), (x,), (v,))[1]


def backward_over_backward(model: Any, x: Any, v: Any) -> Any:
    def derivative(one: Any) -> Any:
        return (grad(lambda one: model(one).square().sum())(one) * v).sum()

    return grad(derivative)(x)


def no_graph(model: Any, x: Any, v: Any) -> Any:
    with torch.no_grad():
        known = jvp(model, (x,), (v,))[1] + grad(lambda one: model(one).square().sum())(x)
    return model(x) * known


PROGRAMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    program.__name__: program
    for program in (
        primal_of_jvp,
        tangent_of_jvp,
        dual_numbers,
        vjp_in_loss,
        detached_vjp,
        slope,
        slopes_by_sample,
        mapped,
        jacobian_backward,
        jacobian_forward,
        curvature,
        forward_over_backward,
        backward_over_backward,
        no_graph,
    )
}


def assert_equal_step(program: str, model: Any, reference: Any) -> None:
    """One step of ``program``, and a plain step that adds its gradients."""
    x, v = batches(next(reference.parameters()).shape[1])
    for run in (PROGRAMS[program], lambda model, x, _v: model(x).square()):
        expected, actual = run(reference, x, v), run(model, own_part(x), own_part(v))
        assert_close(actual, own_part(expected), "result")
        expected.mean().backward()
        actual.mean().backward()
        assert_equal_models(model, reference, 0)


FIRST = {  # every program with fsdp, and every other strategy with some of them
    (program, strategy)
    for number, program in enumerate(PROGRAMS)
    for strategy in ("fsdp", ONE_AXIS[number % len(ONE_AXIS)])
}


@pytest.mark.parametrize(
    ("program", "strategy"),
    [
        pytest.param(*row, marks=() if row in FIRST else pytest.mark.thorough)
        for row in product(PROGRAMS, ONE_AXIS)
    ],
)
@on_ranks(2)
def test_equals_one_process(program: str, strategy: str) -> None:
    model, reference = sharded(strategy), build()
    for _ in range(2):
        assert_equal_step(program, model, reference)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ONE_AXIS])
@on_ranks(4)
def test_equals_one_process_on_two_axes(strategy: str) -> None:
    model, reference = sharded(strategy), build()
    for program in ("tangent_of_jvp", "slope", "dual_numbers"):
        assert_equal_step(program, model, reference)


OPTIONS: dict[str, dict[str, Any]] = {
    "stays gathered": {"reshard_after_forward": False},
    "subgroups": {"reshard_after_forward": 1},
    "no prefetch": {"prefetch": 0},
    "dim": {"granularity": "dim"},
    "offload": {"offload_policy": sw.CPUOffloadPolicy()},
    "large weights": {"width": LARGE},
}


@pytest.mark.parametrize("option", OPTIONS)
@on_ranks(2)
def test_options(option: str) -> None:
    options = OPTIONS[option]
    model, reference = sharded(**options), build(options.get("width", WIDTH))
    for program in ("tangent_of_jvp", "slope", "dual_numbers"):
        assert_equal_step(program, model, reference)


@on_ranks(2)
def test_micro_batches_without_synchronization() -> None:
    model, reference = sharded(), build()
    x, v = batches()
    for number, program in enumerate((slope, tangent_of_jvp, vjp_in_loss)):
        program(reference, x, v).mean().backward()
        model.set_requires_gradient_sync(number == 2)
        program(model, own_part(x), own_part(v)).mean().backward()
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_steps_in_backward_are_taken_once() -> None:
    model, reference = sharded(), build()
    sw.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for program in (slope, slopes_by_sample, vjp_in_loss):
        program(model, *map(own_part, batches())).mean().backward()
        program(reference, *batches()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_inputs_in_attributes() -> None:
    model, reference = (Conditioned(one) for one in (sharded(), build()))
    x, v = batches()
    model.slope(own_part(x), own_part(v)).mean().backward()
    reference.slope(x, v).mean().backward()
    assert_equal_models(model.inner, reference.inner, 0)


@on_ranks(2)
def test_transforms_gather_and_reduce_no_more_than_needed() -> None:
    """A tangent costs a step's collectives; a transform's own backward reduces nothing."""
    model = sharded()
    counts = []
    for program in ("mapped", "tangent_of_jvp", "slope"):
        for _ in range(3):  # the order of units is known from the second step on
            PROGRAMS[program](model, *map(own_part, batches())).mean().backward()
        names = Counter(event.kind for event in sw.ledger(model).events())
        counts.append((names[EventKind.GATHER], names[EventKind.REDUCE]))
    num_units = len(runtime_of(model).units)
    assert counts[0] == counts[1]
    assert [reduces for _, reduces in counts] == [num_units] * 3


@needs_dual_checkpoints
@pytest.mark.parametrize("program", ["slope", "tangent_of_jvp", "dual_numbers", "mapped"])
@on_ranks(2)
def test_checkpoints_work_where_torch_supports_them(program: str) -> None:
    """torch recomputes only forward-mode differentiation, if backward is inside ``dual_level``."""
    reference, model = build(is_checkpointed=True), sharded(is_checkpointed=True)

    def compute(one: Any, x: Any, v: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            PROGRAMS[program](one, x, v).mean().backward()
        is_own = not isinstance(caught.value, sw.ShardwiseError)
        assert is_own or isinstance(caught.value, sw.PeerAborted), "or by that of another rank"
        one.zero_grad()
        with forward_ad.dual_level():
            y, tangent = _dual_output(one, x, v)
            (y * tangent).mean().backward()
        one(x).square().mean().backward()

    compute(reference, *batches())
    compute(model, *map(own_part, batches()))
    assert_equal_models(model, reference, 0)


def grad_of_sum(model: Any, x: Any, _v: Any) -> Any:
    return grad(lambda one: model(one).sum())(x)


@pytest.mark.parametrize("program", [grad_of_sum, mapped, tangent_of_jvp, dual_numbers])
@on_ranks(2)
def test_an_exception_in_a_transform(program: Callable[[Any, Any, Any], Any]) -> None:
    """Every rank raises, and the next steps are right."""
    model, reference = sharded(), build()
    hook = model[2].register_forward_hook(_raise_on_last_rank)
    with pytest.raises((_StopError, sw.StepError)) as caught:
        program(model, *map(own_part, batches()))
    is_last = rank() == world_size() - 1
    assert isinstance(caught.value, _StopError if is_last else sw.PeerAborted)
    hook.remove()
    for name in ("slope", "tangent_of_jvp"):
        assert_equal_step(name, model, reference)


@on_ranks(2)
def test_functional_call_needs_whole_parameters() -> None:
    model, reference = sharded(), build()
    x, _ = map(own_part, batches())

    def loss(parameters: dict[str, Tensor], model: nn.Module = model, x: Tensor = x) -> Tensor:
        y: Tensor = functional_call(model, parameters, (x,))
        return y.square().sum()

    whole = {name: p.detach().clone() for name, p in reference.named_parameters()}
    with pytest.raises(sw.PlanError, match=r"functional_call .* need whole tensors; .*sw.gathered"):
        grad(loss)(whole)
    with sw.gathered(model):
        actual = grad(loss)({name: p.detach().clone() for name, p in model.named_parameters()})
        many = vmap(partial(loss, x=x))({name: torch.stack([p, p]) for name, p in whole.items()})
        with pytest.raises(sw.StepError, match=r"0.weight: received a gradient inside sw.gathered"):
            model[0].weight.square().sum().backward()
    expected = grad(partial(loss, model=reference))(whole)
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name)
    assert_close(many, loss(whole, reference).expand(2), "outputs of two sets of parameters")
    assert_equal_step("slope", model, reference)


class Conditioned(nn.Module):
    """Gives its model an input through an attribute."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        inner.register_forward_pre_hook(lambda module, args: (args[0] + module.condition,))

    def slope(self, x: Any, condition: Any) -> Any:
        def compute(condition: Any) -> Any:
            self.inner.condition = condition
            return self.inner(x).square().sum()

        return grad(compute)(condition)


def _dual_output(model: Any, x: Any, v: Any) -> Any:
    """The output and its tangent, inside a dual level."""
    return forward_ad.unpack_dual(model(forward_ad.make_dual(x, v)))  # type: ignore[no-untyped-call]


class _StopError(Exception):
    pass


def _raise_on_last_rank(*_: object) -> None:
    if rank() == world_size() - 1:
        raise _StopError


class WithDerivative(nn.Module):
    """A unit whose forward differentiates a function of its parameters, as chunked losses do."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.linear, self.transform = nn.Linear(WIDTH, WIDTH), transform

    def forward(self, x: Tensor) -> Any:
        weight = self.linear.weight.detach()

        def loss(x: Tensor, weight: Tensor) -> Tensor:
            return torch.tanh(x @ weight).square().sum()

        if self.transform == "grad_and_value":
            derivative, _ = torch.func.grad_and_value(loss)(x.detach(), weight)
        elif self.transform == "vjp":
            value, pullback = vjp(loss, x.detach(), weight)
            derivative = pullback(torch.ones_like(value))[0]
        else:
            derivative = vmap(jacrev(loss), in_dims=(0, None))(x.detach(), weight)
        return self.linear(x + derivative)


@on_ranks(2)
@pytest.mark.parametrize("transform", ["grad_and_value", "vjp", "jacrev"])
def test_transforms_inside_the_forward_of_a_unit(transform: str) -> None:
    models = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Linear(WIDTH, WIDTH), *(WithDerivative(transform) for _ in range(2))]
        models.append(nn.Sequential(*blocks).double())
        if is_sharded:
            sw.fully_shard(models[1], units=WithDerivative)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    x, _ = batches()
    for step in range(4):  # the first two watch what autograd saves
        for model, optimizer, part in zip(models, optimizers, (x, own_part(x)), strict=True):
            model(part + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_models(models[1], models[0], 4)
