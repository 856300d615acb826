"""Weight gradients are computed in their slots where possible, and correct elsewhere."""

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.features.fused_wgrad import InPlaceGradLinear
from shardwise.runtime.gradients import Gradients
from tests.covering import covered_first, leaving
from tests.ranks import run_on
from tests.runtime.one_process import rank, runtime_of
from tests.waiting import eventually

WIDTH = 256  # large enough for weights to use slots
VOCABULARY = 300


class Block(nn.Sequential):
    """A unit that uses its layer in one of several ways."""

    way = "once"

    def forward(self, x: Tensor) -> Tensor:
        layer = self[0]
        assert isinstance(layer, nn.Linear)
        y: Tensor = layer(x)
        match self.way:
            case "twice":
                y = layer(y.tanh())
            case "beside":
                y = y + functional.linear(x, layer.weight)
            case "penalty":
                y = y + layer.weight.square().mean()
            case "hook" if layer.weight.requires_grad and torch.is_grad_enabled():
                layer.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
            case "nested":  # a backward within the backward; a gradient is delivered in between
                y = checkpoint(
                    lambda h: h + functional.linear(h.tanh(), layer.weight), y, use_reentrant=True
                )
                y = layer(y)
            case "grad":
                with torch.enable_grad():
                    z = layer(x.detach()).sum()
                    (own,) = torch.autograd.grad(z, layer.weight)
                y = y + (own - x.detach().sum(0)).mean()  # 0 if the gradient is correct
            case "second order":
                with torch.enable_grad():
                    leaf = x.detach().requires_grad_()
                    z = layer(leaf).tanh().sum()
                    (of_input,) = torch.autograd.grad(z, leaf, create_graph=True)
                y = y + of_input
        return y


def _build(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Linear(WIDTH, WIDTH)), Block(nn.Linear(WIDTH, WIDTH))).double()
    for block in model:
        assert isinstance(block, Block)
        block.way = way
    return model


class Scaled(nn.Embedding):
    """Has its own forward, whose gradient autograd adds to that of the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class Tied(nn.Module):
    """An embedding around a unit. In most ways, the head shares its weight."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        padding = 7 if way == "padding" else None
        kind = Scaled if way == "scaled" else nn.Embedding
        self.embedding = kind(VOCABULARY, WIDTH, padding_idx=padding)
        self.block = Block(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY if way != "small head" else 3, bias=False)
        if way not in ("two tables", "small head"):
            self.head.weight = self.embedding.weight
        self.kept: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        if self.way == "rows of tokens":
            tokens = tokens.view(-1, 20).int()
        x = self.embedding(tokens)
        if self.way == "embedded twice":
            x = x + self.embedding(tokens + 1).tanh()
        x = self.block(x)
        if self.way == "use between":
            x = x + self.embedding.weight.square().mean(0)
        if self.way == "use twice between":
            x = x + self.embedding.weight.square().mean(0)
            x = self.embedding(tokens) + x
        y: Tensor = self.head(x.tanh())
        if self.way == "use after":
            y = y + self.embedding.weight.square().mean(1)
        if self.way == "kept" and y.grad_fn is not None:
            y.grad_fn.register_hook(lambda gradients, _: self.kept.extend(gradients[:2]))
            x = x + self.embedding.weight.square().mean(0)
            y = y + x.sum(-1, keepdim=True)
        return y


def _build_tied(way: str) -> Tied:
    torch.manual_seed(0)
    return Tied(way).double()


def _batch(model: nn.Module, ranks: int) -> Tensor:
    if isinstance(model, Tied):
        return torch.randint(0, VOCABULARY - 1, (ranks, 40)) // 9  # many occur several times
    return torch.randn(ranks, 3, WIDTH, dtype=torch.float64)


def _gradients(model: nn.Module, ranks: int, turns: int) -> None:
    for turn in range(turns):
        torch.manual_seed(turn)
        batch = _batch(model, ranks)
        own = batch[rank()] if isinstance(model, sw.FSDPModule) else batch.flatten(0, 1)
        loss = model(own).square().mean()
        if getattr(model, "way", None) == "called twice":
            loss = loss + model(own.flip(-1)).square().mean()
        loss.backward()


def _train(build: Callable[[str], nn.Module], way: str, strategy: str) -> tuple[int, float]:
    """Whether each claim got a slot, and the largest error."""
    whole, model = build(way), build(way)
    sw.fully_shard(model, units=Block, strategy=strategy)
    claims: list[bool] = []
    claim = Gradients.claim

    def count(gradients: Gradients, position: int, *, in_slot: bool) -> Any:
        claimed = claim(gradients, position, in_slot=in_slot)
        slot = gradients._buffer.views[position]
        claims.append(claimed is not None and claimed[0].data_ptr() == slot.data_ptr())
        return claimed

    with mock.patch.object(Gradients, "claim", count):
        _gradients(model, 2, 2)
    _gradients(whole, 2, 2)
    assert all(kept.isfinite().all() for kept in getattr(model, "kept", [])), "it has memory"
    return sum(claims), _error(model, whole)


def _error(model: nn.Module, whole: nn.Module) -> float:
    """The largest error of any gradient, relative to the largest element of that gradient."""
    error = 0.0
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, sw.ShardedTensor)
        assert other.grad is not None
        apart = (one.grad.full_tensor() - other.grad).abs().max() / other.grad.abs().max()
        error = max(error, float(apart))
    return error


WAYS = ["once", "twice", "beside", "penalty", "hook", "grad", "second order", "nested"]


def _train_hooked(build: Callable[[str], nn.Module], way: str, strategy: str) -> tuple[int, float]:
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return _train(build, way, strategy)


@pytest.mark.parametrize("train", [_train, _train_hooked])
@pytest.mark.parametrize(("way", "strategy"), covered_first(product(WAYS, ("fsdp", "ddp"))))
def test_gradients_are_those_of_one_process(way: str, strategy: str, train: Any) -> None:
    """Also under hooks for tensors that autograd saves."""
    num_expected = {"hook": 0, "twice": 8}.get(way, 4)  # two layers, two backwards
    for num_claims, error in run_on(2, train, _build, way, strategy):
        assert error < 1e-10
        assert num_claims == num_expected


class Stack(nn.Module):
    """Blocks of two layers that are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(layers)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def _recompute() -> tuple[int, int, int, float]:
    """FLOP of the products of a step, with and without the engine; claims; the largest error."""
    torch.manual_seed(0)
    whole = Stack().double()
    model = copy.deepcopy(whole)
    sw.fully_shard(model, units=nn.Sequential)
    flops = []
    with mock.patch.object(Gradients, "claim", autospec=True, side_effect=Gradients.claim) as claim:
        for one in (model, whole):
            torch.manual_seed(0)
            batch = torch.randn(2, 3, WIDTH, dtype=torch.float64)
            own = batch[rank()] if one is model else batch.flatten(0, 1)
            with FlopCounterMode(display=False) as counter:
                one(own).square().mean().backward()
            flops.append(counter.get_total_flops() // len(own))
    return flops[0], flops[1], claim.call_count, _error(model, whole)


def test_a_checkpoint_computes_no_more_products_than_without_the_engine() -> None:
    for ours, plain, num_claims, error in run_on(2, _recompute):
        assert ours == plain
        assert num_claims == 7
        assert error < 1e-10


def _free_what_was_saved() -> bool:
    model = _build("once")
    sw.fully_shard(model, units=Block)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    gc.disable()
    try:
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            y = model(x)
        saved = weakref.ref(y.grad_fn)
        y.sum().backward()
        del y
        return eventually(lambda: saved() is None)
    finally:
        gc.enable()


def test_saved_tensors_are_freed_without_the_cycle_collector() -> None:
    assert run_on(2, _free_what_was_saved) == [True, True]


@pytest.mark.parametrize("strategy", leaving(["ddp"], ["fsdp", "ddp"]))
@pytest.mark.parametrize(
    ("way", "num_claims"),
    [
        ("tied", 3),  # of head, block and embedding
        ("padding", 3),
        ("embedded twice", 4),
        ("use between", 2),  # autograd adds it to the gradient of the head, which becomes a copy
        ("use twice between", 3),
        ("use after", 2),  # the same, but what the head leaves is added to
        ("kept", 2),
        ("rows of tokens", 3),
        ("scaled", 1),  # only that of the block
        ("called twice", 5),  # what the later call leaves is reduced before it is handed over
        ("two tables", 1),  # both wait until the unit inside is done
        ("small head", 2),
    ],
)
def test_gradients_of_a_root_are_those_of_one_process(
    way: str, num_claims: int, strategy: str
) -> None:
    for claimed, error in run_on(2, _train, _build_tied, way, strategy):
        assert error < 1e-10
        if strategy == "fsdp":  # all of them fit in `ddp`
            assert claimed == 2 * num_claims, "two backwards"


def _train_complex() -> float:
    whole, model = (nn.Sequential(_build("once")[0]).to(torch.complex128) for _ in range(2))
    sw.fully_shard(model)
    for one in (model, whole):
        torch.manual_seed(0)
        one(torch.randn(3, WIDTH, dtype=torch.complex128)).abs().square().mean().backward()
    return _error(model, whole)


def test_gradients_of_complex_weights_are_conjugates() -> None:
    assert max(run_on(2, _train_complex)) < 1e-10


def _train_in_half(reduce_dtype: torch.dtype) -> float:
    """Errors of gradients compared with float64, relative to their norms."""
    whole, model = _build_tied("tied"), _build_tied("tied").float()
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    sw.fully_shard(model, units=Block, mp_policy=policy)
    _gradients(model, 2, 2)
    _gradients(whole, 2, 2)
    apart = []
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(one.grad, sw.ShardedTensor)
        assert other.grad is not None
        apart.append(
            float((one.grad.full_tensor().double() - other.grad).norm() / other.grad.norm())
        )
    return max(apart)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_gradients_in_bfloat16(reduce_dtype: torch.dtype) -> None:
    """If they are reduced in float32, those of head and embedding are added outside the slot."""
    assert max(run_on(2, _train_in_half, reduce_dtype)) < 0.02


class Registered(nn.Linear):
    """Is notified of subclasses."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        Registered.known.append(cls.__name__)


class Plain(nn.Linear):
    """Adds nothing."""


def _classes() -> tuple[str, str, bool, list[str]]:
    model = nn.Sequential(Plain(WIDTH, WIDTH), Registered(WIDTH, WIDTH))
    model = sw.fully_shard(model)
    plain, registered = model
    loss = model(torch.randn(3, WIDTH)).sum()
    loss.backward()
    return (
        type(plain).__qualname__,
        type(registered).__qualname__,
        isinstance(plain, Plain) and isinstance(plain, InPlaceGradLinear),
        Registered.known,
    )


def test_subclasses_that_inherit_forward_use_slots_unless_subclassing_has_side_effects() -> None:
    assert run_on(2, _classes) == [("Plain", "Registered", True, [])] * 2


def test_a_backward_to_inputs_computes_no_weight_gradient() -> None:
    """Nor does one to weights compute that of the input: zero-bubble schedules run both halves."""
    model: Any = sw.fully_shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))
    x = torch.randn(2, WIDTH, requires_grad=True)
    loss = model(x).sum()
    weights = [parameter.dense for parameter in runtime_of(model).units[0].parameters]
    for wanted, products in (([x], 2), (weights, 3)):
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss, wanted, retain_graph=True)
        assert counter.get_total_flops() == products * 2 * x.numel() * WIDTH


class Tagged:
    """Not a tensor, but works with torch's functions."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.tensor if isinstance(one, Tagged) else one for one in args]
        return cls(func(*plain, **(kwargs or {})))


class TensorOfClass(Tensor):
    pass


KINDS = [Tagged, lambda x: x.as_subclass(TensorOfClass), Tensor.to_sparse]


@pytest.mark.parametrize("wrap", KINDS)
def test_inputs_that_are_no_plain_tensors_take_the_path_of_torch(wrap: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH, bias=wrap is not Tensor.to_sparse).double()
    model: Any = sw.fully_shard(nn.Sequential(copy.deepcopy(plain)))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    results = [m(wrap(x)) for m in (plain, model)]
    for result in results:
        getattr(result, "tensor", result).square().sum().backward()
    expected, got = (getattr(result, "tensor", result) for result in results)
    assert torch.equal(got, expected)
    gradient = next(model.parameters()).grad.full_tensor()
    torch.testing.assert_close(gradient, plain.weight.grad, rtol=1e-12, atol=0)


def test_none_is_refused_as_by_torch() -> None:
    model: Any = sw.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        model(None)
