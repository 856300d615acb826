"""`fully_shard`, and the modules that it returns."""

import abc
import copy
from collections import UserDict
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.hooks import RemovableHandle

import shardwise as sw
from shardwise.runtime.nested import tensors_left_in
from tests.models import WIDTH, Block, Stack, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_equal_models,
    assert_equal_steps,
    assert_equal_training,
    own_part,
    rows,
    runtime_of,
    sharded_pair,
    squares,
    step_all,
)


@on_ranks(2)
def test_returns_the_module_and_keeps_names_ties_and_optimizers() -> None:
    model = build("gpt")
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # built too early, but works
    assert sw.fully_shard(model, units="auto") is model
    assert type(model).__name__ == "FSDPGpt"
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(isinstance(p, sw.ShardedTensor) for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    before = [p.full_tensor() for p in model.parameters()]
    model(torch.randint(0, 11, (2, 7))).backward()
    optimizer.step()
    after = [p.full_tensor() for p in model.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@on_ranks(1)
def test_classes_of_units_make_plain_modules_and_copies_are_units() -> None:
    class Abstract(nn.Linear, abc.ABC):
        """Its class is not an instance of `type` alone."""

    model = sw.fully_shard(nn.Sequential(Abstract(3, 3)), units={Abstract})
    unit = model[0]
    assert type(type(unit)(3, 3)) is Abstract
    # sentence-transformers makes another model by `__new__` and `__init__` of its class.
    made = type(unit).__new__(type(unit))
    made.__init__(3, 2)  # type: ignore[misc]
    assert isinstance(made, Abstract)
    assert made.weight.shape == (2, 3)
    twin = copy.copy(model)
    assert type(twin) is type(model)
    assert twin[0] is unit
    assert torch.equal(twin(torch.ones(1, 3)), model(torch.ones(1, 3)))


@on_ranks(2)
def test_block_by_block_and_then_the_root() -> None:
    reference, model = build("stack"), build("stack")
    for position, layer in enumerate(model.layers):
        sw.fully_shard(layer, reshard_after_forward=None if position else False)
    sw.fully_shard(model, prefetch=2)
    plan = runtime_of(model).plan
    assert [unit.label for unit in plan.units] == ["Stack", "layers.0", "layers.1", "layers.2"]
    assert [unit.reshard for unit in plan.units] == [False, False, True, True]
    assert plan.prefetch == 2
    assert_equal_steps(model, reference, make_optimizer=adamw)
    tied = build("tied")
    for layer in tied.layers:
        sw.fully_shard(layer)
    assert_equal_steps(sw.fully_shard(tied), build("tied"), 1)


@on_ranks(2)
def test_a_mesh_and_its_errors() -> None:
    assert_equal_training("stack", mesh=init_device_mesh("cpu", (2,)))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    assert_equal_training("stack", mesh=two["shard"])
    with pytest.raises(sw.PlanError, match="expects a 1D DeviceMesh"):
        sw.fully_shard(Block(), mesh=two, strategy="fsdp")


@on_ranks(4)
def test_a_mesh_of_some_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    torch.manual_seed(dist.get_rank() // 2)
    reference, model = sharded_pair(
        nn.Sequential(Block(), Block()).double(), units=Block, mesh=mesh
    )
    batch = torch.randn(4, WIDTH).double()
    model(batch.chunk(2)[mesh.get_local_rank()]).square().mean().backward()
    reference(batch).square().mean().backward()
    assert_equal_models(model, reference, 0)


@on_ranks(1)
def test_mistakes_are_told_at_the_call() -> None:
    model = build("stack")
    for options, message in [
        ({"units": nn.Conv2d}, "Conv2d matches no module of Stack.*Block"),
        ({"units": "blocks"}, "units='blocks'"),
        ({"units": 0}, "at least 1"),
        ({"units": nn.ModuleList}, "containers that do not implement forward"),
        ({"strategy": "zero9"}, "zero9.*expected one of"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"prefetch": "1"}, "prefetch='1': expected 0 or more units"),
        ({"prefetch": None}, "prefetch=None: expected 0 or more units"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward='no': expected a number"),
        ({"strategy": "hsdp", "sharding_factor": "1"}, "sharding_factor='1': expected a divisor"),
        ({"mesh": 2}, "mesh=2: expected a DeviceMesh.*init_device_mesh.*sharding_factor"),
        ({"unused": "ones"}, "unused='ones'"),
    ]:
        with pytest.raises(sw.PlanError, match=message):
            sw.fully_shard(model, **options)  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match="takes a torch"):
        sw.fully_shard("model")  # type: ignore[type-var]
    with pytest.raises(sw.PlanError, match="not sharded"):
        sw.ledger(model)
    sw.fully_shard(model, units=Block)
    with pytest.raises(sw.PlanError, match="sharded already"):
        sw.fully_shard(model)
    with pytest.raises(sw.PlanError, match="weight was sharded with a module around"):
        sw.fully_shard(model.layers[0].up)
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    with pytest.raises(sw.PlanError, match=r"^1 is a module of torch\.jit"):
        sw.fully_shard(nn.Sequential(nn.ReLU(), traced))
    with pytest.raises(sw.PlanError, match="weight has no shape yet"):
        sw.fully_shard(nn.LazyLinear(2))


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_unfreezing_later(granularity: Any) -> None:
    torch.manual_seed(0)
    reference = Stack().double()
    model = copy.deepcopy(reference)
    for m in (reference, model):
        m.layers.requires_grad_(False)
    sw.fully_shard(model, units=Block, granularity=granularity)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (reference, model)]
    for step in range(4):
        for micro_batch in range(2):
            for m in (reference, model):
                m.layers[1].requires_grad_(step != 2)
                m.layers[0].requires_grad_(step == 3 and micro_batch == 1)
            assert_equal_steps(model, reference, 1, loss=lambda m, x: m(x).pow(3).mean())
        step_all(optimizers)


@on_ranks(2)
def test_unfreezing_a_unit_in_front_of_its_forward() -> None:
    model = build("frozen")
    sw.fully_shard(model, units=Block)
    model.requires_grad_(True)
    unit = next(m for m in model.modules() if isinstance(m, Block))
    with pytest.raises(sw.PlanError, match="was frozen when it was sharded"):
        unit(torch.randn(4, WIDTH).double())


class Coded(nn.Parameter):
    """Like bitsandbytes' classes: integers, with attributes that say how to interpret them."""

    scale: float


class CodedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Coded(torch.arange(24, dtype=torch.uint8).view(6, 4), requires_grad=False)
        self.weight.scale = 0.5
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Coded
        y: Tensor = (x * self.factor) @ (self.weight.float() * self.weight.scale).T
        return y


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_the_class_and_the_attributes_of_a_frozen_parameter_reach_forward(
    granularity: Literal["element", "dim"],
) -> None:
    model: Any = nn.Sequential(CodedLinear(), CodedLinear().requires_grad_(False))
    model[1].weight = Coded(torch.ones(4, 6, dtype=torch.uint8), requires_grad=False)
    model[1].weight.scale, model[1].factor = 2.0, nn.Parameter(torch.ones(6))
    x = torch.ones(3, 4)
    expected = model(x)
    sw.fully_shard(model[0], granularity=granularity)
    sw.fully_shard(model, granularity=granularity)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert model[0].factor.grad is not None


@on_ranks(2)
def test_outputs_of_any_structure() -> None:
    unpack: dict[str, Any] = {
        "mapping": lambda out: out["y"],
        "object": lambda out: out.y,
        "set": lambda out: next(iter(out)),
        "nested": lambda out: out[1]["a"][0],
    }
    for kind, take in unpack.items():
        reference, model = sharded_pair(Wrapping(kind))

        def loss(one: Any, x: Tensor, take: Any = take) -> Any:
            return take(one(x)).square().mean()

        assert_equal_steps(model, reference, 2, loss=loss)


@on_ranks(2)
def test_two_models_side_by_side() -> None:
    pairs = [(build("stack", seed), build("stack", seed)) for seed in range(2)]
    for _, model in pairs:
        sw.fully_shard(model, units=Block)
    for step in range(3):
        batch = torch.randn(4, WIDTH).double()
        for position in (0, 1):
            out = batch
            for pair in pairs:
                out = pair[position](own_part(batch) if position and out is batch else out)
            out.square().mean().backward()  # type: ignore[no-untyped-call]
        for reference, model in pairs:
            assert_equal_models(model, reference, step)


@on_ranks(2)
@pytest.mark.parametrize("converts_first", [True, False])
def test_convolutions_in_channels_last_train_as_in_one_process(converts_first: bool) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).double()
    if converts_first:
        reference.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reference, model = sharded_pair(reference, units=nn.Conv2d)
    model.to(memory_format=torch.channels_last)
    batch = torch.randn(4, 3, 5, 5).double().to(memory_format=torch.channels_last)
    assert_equal_steps(model, reference, 1, batch=lambda: batch)


@on_ranks(2)
def test_a_change_that_would_be_lost_is_refused() -> None:
    torch.manual_seed(0)
    reference, model = sharded_pair(nn.Sequential(*(Clamping() for _ in range(3))), units=Clamping)
    for position in (0, 2):
        model[position].clamps = True
        for _ in range(2):
            with pytest.raises(sw.StepError, match=rf"{position}\.weight: changed in place"):
                squares(model, own_part(rows())).backward()
        model[position].clamps = False
        assert_equal_steps(model, reference, 1, zeroes=True)


@on_ranks(2)
def test_the_users_gradient_hooks_see_reduced_gradients() -> None:
    calls: list[str] = []
    reference, early = build("stack"), build("stack")
    late = copy.deepcopy(early)
    for model in (reference, early):
        _add_hooks(model, calls)
    for model in (early, late):
        sw.fully_shard(model, units=Block)
    _add_hooks(late, calls)
    batch = torch.randn(4, WIDTH).double()
    for step in range(2):
        reference(batch).square().mean().backward()
        for model in (early, late):
            model(own_part(batch)).square().mean().backward()
            assert_equal_models(model, reference, step)
    assert sorted(calls) == sorted(["norm.weight", "first.bias"] * 6)


@on_ranks(1)
def test_a_hook_from_before_sharding_can_be_removed() -> None:
    calls: list[str] = []
    reference, model = build("stack"), build("stack")
    handles = _add_hooks(model, calls)
    sw.fully_shard(model, units=Block)
    for handle in handles:
        handle.remove()
    batch = torch.randn(4, WIDTH).double()
    for m in (reference, model):
        m(batch).square().mean().backward()
    assert_equal_models(model, reference, 0)
    assert not calls


@on_ranks(2)
def test_parametrized_modules() -> None:
    for kind in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        torch.manual_seed(0)
        layers = nn.Sequential(*(kind(nn.Linear(WIDTH, WIDTH)) for _ in range(2))).double()
        reference, model = sharded_pair(layers, units="auto")
        assert_equal_steps(model, reference, 2)


@on_ranks(2)
def test_a_loss_in_an_attribute() -> None:
    torch.manual_seed(0)
    reference, model = sharded_pair(WithAuxiliary().double(), units=Auxiliary)
    for step in range(2):
        batches = [torch.randn(4, WIDTH).double() for _ in range(2)]
        for losses in (
            [model.loss(own_part(batch)) for batch in batches],
            [reference.loss(batch) for batch in batches],
        ):
            losses[1].backward(retain_graph=True)
            for loss in losses:
                loss.backward()
        assert_equal_models(model, reference, step)


@on_ranks(2)
def test_a_configuration_is_searched_for_tensors_without_reading_attributes() -> None:
    model = sw.fully_shard(Configured(), units=Auxiliary)
    left = torch.ones(1)
    vars(model.config)["width"] = [left]
    assert any(tensor is left for tensor in tensors_left_in(model))
    model.loss(torch.randn(4, WIDTH)).backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_a_forward_that_takes_gradients_itself() -> None:
    torch.manual_seed(0)
    reference, model = sharded_pair(Forces().double(), units=Block)
    assert_equal_steps(model, reference)


class Wrapping(nn.Module):
    """Returns its output inside an object of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block().double()

    def forward(self, x: Tensor) -> Any:
        y = self.block(x)
        match self.kind:
            case "mapping":
                return UserDict(y=y)
            case "object":
                return Box(y)
            case "set":
                return frozenset([y])
            case _:
                return ([], {"a": (y, None, "text")}, 3)


class Box:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Clamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double())
        self.clamps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return torch.tanh(x @ self.weight)


def _add_hooks(model: nn.Module, calls: list[str]) -> list[RemovableHandle]:
    handles: list[RemovableHandle] = []
    for name in ("norm.weight", "first.bias"):
        parameter = model.get_parameter(name)
        handles += [
            parameter.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * 3
            ),
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _parameter, name=name: calls.append(name)
            ),
        ]
    return handles


class Auxiliary(nn.Module):
    """Leaves a loss in an attribute, with or without an output."""

    def __init__(self, *, has_output: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH))
        self.has_output = has_output
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor | None:
        y = torch.tanh(self.linear(x))
        self.losses = [(y * self.gate).sin().mean()]
        return y if self.has_output else None


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Auxiliary(has_output=i != 1) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x if y is None else y
        return x

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self(x).square().mean()
        for layer in self.layers:
            assert isinstance(layer, Auxiliary)
            loss = loss + layer.losses[0]
        return loss


@dataclass
class Guarded:
    """A configuration with an attribute that cannot be read, as in transformers."""

    width: int = WIDTH

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise RuntimeError("which width?")
        return super().__getattribute__(name)


class Configured(WithAuxiliary):
    """All of its modules hold one configuration, which also gets a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Guarded()
        for module in self.modules():
            module.config = self.config  # type: ignore[assignment]


class Forces(Stack):
    """Returns an energy and its gradient at the input, computed in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return super().forward(x + slope)
