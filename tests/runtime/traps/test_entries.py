"""Traps: tensors of a unit's forward that are used after it: views of parameters, and losses."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import PlanError
from tests.covering import covered_first
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    assert_close,
    assert_equal_models,
    assert_equal_steps,
    own_part,
    sharded_pair,
)

STRATEGIES: list[dict[str, Any]] = [
    {},
    {"strategy": "zero2"},
    {"strategy": "ddp"},
    {"strategy": "hsdp", "sharding_factor": 1},
    {"granularity": "dim"},
    {"reshard_after_forward": True},
]


def batch(step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


# -- views of parameters ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    position: Tensor
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SlottedResult:
    position: Tensor


def _within_itself(position: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"of": [position]}
    found["again"] = found
    return found


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda w: w[0],
    "parameter": lambda w: w,
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data[0],
    "transposed": lambda w: w.t().t(),
    "expanded": lambda w: w[:1].expand(BATCH, -1),
    "tuple": lambda w: (w[0], None),
    "dict of lists": lambda w: {"of": [w[0], w]},
    "frozen dataclass": lambda w: Result(w[0], {"again": w}),
    "slots": lambda w: SlottedResult(w[0]),
    "object": lambda w: SimpleNamespace(position=w[0]),
    "within itself": lambda w: _within_itself(w[0]),
}


def first_tensor(value: Any) -> Tensor:
    match value:
        case Tensor():
            return value
        case dict():
            return first_tensor(value["of"][0])
        case tuple():
            return first_tensor(value[0])
    return first_tensor(value.position)


class Positions(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.kind = kind
        self.kept: Any = None

    def forward(self, inner: Any = None) -> Any:
        if self.kind == "attribute":
            self.kept = {"a": self.weight[0]}
            return None
        if self.kind == "argument":
            assert isinstance(inner, list)
            inner.append(self.weight[0])
            return None
        if self.kind == "inner":
            return inner()
        return RETURNS[self.kind](self.weight)

    def position(self, result: Any) -> Tensor:
        found = self.kept["a"] if self.kind == "attribute" else first_tensor(result)
        return found if found.ndim == 1 else found[0]


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Positioned(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions, self.mixer = Positions(kind), Mixer()
        self.inner = Positions("view")

    def forward(self, x: Tensor) -> Tensor:
        is_argument = self.positions.kind == "argument"
        argument: Any = [] if is_argument else self.inner
        result = self.positions(argument)
        x = self.mixer(x)  # another unit frees that of the positions
        if self.positions.kind == "inner":
            position = result
        else:
            position = argument[0] if is_argument else self.positions.position(result)
        y: Tensor = self.mixer(x + position)
        return y


@pytest.mark.parametrize("options", STRATEGIES)
@on_ranks(2)
def test_a_unit_may_return_its_parameters(options: dict[str, Any]) -> None:
    """FSDP2 reads freed memory, which kills the process."""
    for kind in (*RETURNS, "attribute", "argument", "inner"):
        reference, model = sharded_pair(
            Positioned(kind).double(), units={Positions, Mixer}, **options
        )
        for step in range(2):
            assert_equal_steps(model, reference, 1)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    found = model(own_part(batch(step)))
                    assert_close(found, own_part(reference(batch(step))), kind)


@pytest.mark.parametrize("options", STRATEGIES)
@on_ranks(2)
def test_a_parameter_that_the_root_returns_outlives_the_step(options: dict[str, Any]) -> None:
    reference, model = sharded_pair(Positions("parameter").double(), **options)
    with torch.no_grad():
        before = model()
    weight = model()
    (weight * own_part(batch())[:3]).sum().backward()
    model(), model()
    for found in (before, weight):
        assert_close(found.detach(), reference.weight.detach(), "after the step")
    model.zero_grad()
    for m, x in ((model, own_part(batch())), (reference, batch())):
        (m()[0] * x).mean().backward()
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_a_view_that_cannot_be_replaced_is_refused() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self) -> Any:
            class Locked(dict[str, Tensor]):
                def __setitem__(self, *_args: object) -> None:
                    raise TypeError("locked")

            return Locked(view=self.weight[0])

    model = nn.Sequential(Opaque())
    sw.fully_shard(model, units=Opaque)
    with pytest.raises(PlanError, match=r"the output of 0 has a view of a parameter .*clone"):
        model[0]()


# -- losses on tensors inside a unit ---------------------------------------------------------------

KEPT: list[Tensor] = []


class Featured(nn.Module):
    """Puts a tensor from its middle somewhere."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.where = where

    def forward(self, x: Tensor, found: Any = None) -> Tensor:
        middle = self.first(self.norm(x))
        match self.where:
            case "global":
                KEPT.append(middle)
            case "argument":
                found["features"].append((middle,))
            case "loss in an argument":
                found["features"].append((self.second(torch.sin(middle)),))
        y: Tensor = x + self.second(torch.tanh(middle))
        return y


class Featuring(nn.Module):
    def __init__(self, where: str, checkpoints: str = "") -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Featured(where) for _ in range(3))
        self.where, self.checkpoints = where, checkpoints

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        found: dict[str, list[tuple[Tensor]]] = {"features": []}
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(block, x, found, use_reentrant=False)
            else:
                x = block(x, found)
        features = [one for (one,) in found["features"]][:3]
        return self.head(x), features


def features_of(model: Any) -> list[Tensor]:
    """The list that later forwards fill."""
    if model.where == "hook":
        kept: list[Tensor] = []
        for block in model.blocks:
            block.first.register_forward_hook(lambda _module, _args, y: kept.append(y))
        return kept
    return KEPT


USES: dict[str, Callable[[Tensor, list[Tensor]], None]] = {
    "all": lambda _, f: sum(x.square().mean() for x in f).backward(),  # type: ignore[union-attr]
    "middle": lambda _, f: f[1].square().mean().backward(),  # type: ignore[no-untyped-call]
    "with output": lambda y, f: (y.square().mean() + f[1].mean()).backward(),  # type: ignore[no-untyped-call]
    "two roots": lambda _, f: torch.autograd.backward([f[2].mean(), f[0].square().mean()]),
    "one after the other": lambda _, f: (
        f[2].mean().backward(retain_graph=True),  # type: ignore[no-untyped-call]
        f[0].square().mean().backward(),  # type: ignore[no-untyped-call]
    )[0],
}


def train_on_features(where: str, checkpoints: str, use: str, options: dict[str, Any]) -> None:
    reference, model = sharded_pair(
        Featuring(where, checkpoints).double(), units=Featured, **options
    )
    kept = {id(m): features_of(m) for m in (reference, model)}
    for step in range(3):
        for m, x in ((reference, batch(step)), (model, own_part(batch(step)))):
            m.zero_grad()
            found = kept[id(m)]
            found.clear()
            y, features = m(x)
            USES[use](y, features or found[:3])
        zeros = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
        for name, parameter in reference.named_parameters():  # a unit gives zeros for None
            sharded = model.get_parameter(name)
            if parameter.grad is None and sharded.grad is not None:
                parameter.grad = zeros[name]
        assert_equal_models(model, reference, step)
    assert sw.ledger(model).gathered_bytes == 0


@pytest.mark.parametrize(
    ("where", "options"),
    covered_first(product(("hook", "argument", "loss in an argument", "global"), STRATEGIES)),
)
@on_ranks(2)
def test_a_loss_on_tensors_inside_a_unit(where: str, options: dict[str, Any]) -> None:
    """FSDP2 is silently wrong."""
    for use in USES:
        train_on_features(where, "", use, options)


@pytest.mark.parametrize("where", ["hook", "global"])
@on_ranks(2)
def test_a_loss_on_tensors_inside_a_checkpointed_unit(where: str) -> None:
    for use in USES:
        if use != "one after the other":
            train_on_features(where, "unit", use, {})


@on_ranks(2)
def test_a_loss_that_begins_inside_a_unit_in_a_later_step_is_refused() -> None:
    """If its tensor is found nowhere. Without a check, autograd would read freed memory."""
    model = sw.fully_shard(Featuring("global").double(), units=Featured)
    for _ in range(3):
        KEPT.clear()
        model(own_part(batch()))[0].sum().backward()
    KEPT.clear()
    model(own_part(batch()))
    with pytest.raises(RuntimeError, match="is at version 1000000000"):
        KEPT[1].sum().backward()  # type: ignore[no-untyped-call]
    model(own_part(batch()))[0].sum().backward()


class Equilibrium(nn.Module):
    """Solves for its gradient in a hook, through a graph that only the hook's closure holds."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.cell(x))
        start = y.detach().requires_grad_()
        again = torch.tanh(self.cell(start) / 4)

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(3):
                (change,) = torch.autograd.grad(again, start, found, retain_graph=True)
                found = gradient + change
            return found

        y.register_hook(solve)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("options", STRATEGIES)
@on_ranks(2)
def test_a_hook_reads_a_unit_that_was_gathered_ahead(options: dict[str, Any]) -> None:
    """As in deep equilibrium models."""
    made = nn.Sequential(Equilibrium(), nn.Linear(WIDTH, WIDTH), Equilibrium()).double()
    reference, model = sharded_pair(made, units=Equilibrium, **options)
    for step in range(3):
        for m, x in ((reference, batch(step)), (model, own_part(batch(step)))):
            m.zero_grad()
            m(x).square().mean().backward()
        assert_equal_models(model, reference, step)


@on_ranks(1)
def test_a_hooked_module_has_one_hook_of_the_engine() -> None:
    model: Any = sw.fully_shard(build("stack"), units=Block)
    module = model.layers[0].up
    handle = module.register_forward_hook(lambda *_: None)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        model(torch.randn(2, 6, dtype=dtype)).sum().backward()
        assert len(module._forward_hooks) == 2
    assert len(copy.deepcopy(model).layers[0].up._forward_hooks) == 2
    handle.remove()
    model(torch.randn(2, 6).double())
    assert not module._forward_hooks
