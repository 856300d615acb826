"""C1: to the user, a sharded parameter behaves as the whole tensor does."""

import copy
import io
import math
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.models import Tiny, build
from tests.ranks import on_ranks
from tests.versions import needs_own_operators

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [(5, 3), (7,), (), (1,), (0, 4), (2, 3, 4)]


@on_ranks(1, 2, 3)
def test_reductions_are_global() -> None:
    functions: list[Callable[[Tensor], Tensor]] = [
        torch.sum, torch.mean, torch.norm, Tensor.norm, torch.linalg.vector_norm,
        lambda x: x.norm(1), lambda x: x.norm(p=3),
        lambda x: torch.linalg.vector_norm(x.float(), dtype=torch.float64),
        lambda x: x.isfinite().all(), lambda x: (x > 0).any(), lambda x: (x > 100).any(),
        lambda x: (x == x.clone()).all(),
    ]  # fmt: skip
    extremes: list[Callable[[Tensor], Tensor]] = [
        torch.max, torch.min, torch.amax, torch.amin, lambda x: x.norm(math.inf),
    ]  # fmt: skip
    for sharded, whole in _pairs():
        for function in functions + (extremes if whole.numel() else []):
            if whole.numel() or function is not torch.mean:
                _equal(function(sharded), function(whole))
    shards, wholes = zip(*_pairs(), strict=True)
    for order in (1.0, 2.0, math.inf):
        norms = torch._foreach_norm(shards, order)
        for norm, whole in zip(norms, wholes, strict=True):
            _equal(norm, torch.linalg.vector_norm(whole, order) if whole.numel() else norm * 0)


@on_ranks(1, 3)
def test_elements_of_16_bits_are_summed_in_float32() -> None:
    model = sw.fully_shard(nn.Linear(300, 300, bias=False))
    with torch.no_grad():
        shard = model.weight.fill_(1).half()
    assert shard.mean() == 1  # the sum would be infinite in float16
    assert shard.bfloat16().sum() == torch.ones(300, 300).bfloat16().sum()
    assert shard.bfloat16().sum().dtype is torch.bfloat16


@on_ranks(1, 3)
def test_elementwise_operations_equal_those_on_whole_tensors() -> None:
    for sharded, whole in _pairs():
        assert isinstance(sharded, sw.ShardedTensor)
        other = torch.randn_like(whole)
        for function in (
            lambda x, y: x + y,
            lambda x, y: y * x - 2,
            lambda x, y: torch.where(x > 0, x, y),
            lambda x, y: x.clamp(-1, 1).pow(2).lerp(y, 0.3),
            lambda x, y: x.addcmul(y, y, value=0.1),
            lambda x, _: torch.zeros_like(x) + x.clone().fill_(3.0),
            lambda x, y: x.new_zeros(x.shape) + x.new_full(x.shape, 2.0) * y,
            lambda x, _: x.to(torch.float32),
            lambda x, _: -x,
            lambda x, y: x.clone().abs_().mul_(y.sign()),
            lambda x, y: x.clone().gt_(y).add_(x.clone().copysign_(y)),
            lambda x, _: x.clone().masked_fill_(x < 0, 1.0),
        ):
            _equal(function(sharded, other), function(whole, other))
        if whole.ndim == 2 and whole.numel():
            _equal(sharded * other[:1], whole * other[:1])
            _equal(sharded * other[0], whole * other[0])
        both = sharded * sharded + sharded
        assert isinstance(both, sw.ShardedTensor)
        assert both.shape == whole.shape
        _equal(both, whole * whole + whole)
        copied = sharded.clone()
        assert isinstance(copied, sw.ShardedTensor)
        copied.copy_(other)
        _equal(copied, other)
        copied.mul_(2).add_(sharded, alpha=3)
        _equal(copied, 2 * other + 3 * whole)
        assert isinstance(copied.to_local(), Tensor)
        assert copied.to_local().ndim == 1


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "is_replicated"),
    [("ddp", [True]), ("fsdp", [False]), ("hsdp", [True, False]), ("hfsdp", [False, False])],
)
def test_placements_tell_the_dimensions_that_cut(strategy: str, is_replicated: list[bool]) -> None:
    factor = 2 if len(is_replicated) == 2 else None
    weight = sw.fully_shard(nn.Linear(3, 5), strategy=strategy, sharding_factor=factor).weight
    assert isinstance(weight, sw.ShardedTensor)
    assert [one.is_replicate() for one in weight.placements] == is_replicated


@on_ranks(2)
def test_unsupported_operations_are_refused() -> None:
    (sharded, whole), *_ = _pairs()
    for function in (
        lambda x: x @ x.T,
        lambda x: x.max(dim=0),
        lambda x: x[0],
        lambda x: x.expand(2, *x.shape),
        lambda x: nn.functional.linear(whole, x),
        lambda x: torch.cat([x, x]),
        lambda x: x.sort(),
        lambda x: whole.clone().add_(x),
        lambda x: x + torch.ones(2, 9).double(),
    ):
        with pytest.raises(sw.ShardedTensorError, match=r"values\.0|full_tensor"):
            function(sharded)
    model = build("stack")
    sw.fully_shard(model, units="auto")
    with pytest.raises(sw.ShardedTensorError, match=r"first\.weight.*through its unit"):
        model.first(torch.randn(2, 6).double())


@on_ranks(2)
def test_torchs_own_clipping_and_grad_scaler() -> None:
    sharded, whole = _gradients()
    norms = [torch.nn.utils.clip_grad_norm_(ps, 0.5) for ps in (sharded, whole)]
    _equal(norms[0], norms[1])
    for p, q in zip(sharded, whole, strict=True):
        assert p.grad is not None
        assert q.grad is not None
        _equal(p.grad, q.grad)
    assert torch.nn.utils.get_total_norm([p.grad for p in sharded if p.grad is not None])
    parameters, _ = _gradients()
    gradient = parameters[-1].grad  # rank 1 stores a part of it
    assert isinstance(gradient, sw.ShardedTensor)
    if torch.distributed.get_rank() == 1:
        gradient.to_local()[-1] = math.inf
    found = torch.zeros(1)
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
    assert found.item() == 1, "every rank sees an overflow on one rank"


@on_ranks(3)
def test_state_dict_round_trip_and_whole_values() -> None:
    reference, model = build("gpt"), build("gpt", seed=1)
    sw.fully_shard(model, units="auto")
    model.load_state_dict(reference.state_dict())
    for (name, value), (other, expected) in zip(
        model.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert name == other
        _equal(value, expected)
    tokens = torch.randint(0, 11, (2, 7))
    _equal(model(tokens).detach(), reference(tokens).detach())
    tiny = Tiny()
    sw.fully_shard(tiny, units="auto")
    assert [p.shape for p in tiny.parameters()] == [p.shape for p in Tiny().parameters()]


@on_ranks(3)
def test_norms_of_complex_parameters_that_some_ranks_hold_no_part_of() -> None:
    whole = nn.ParameterList([torch.randn(2, dtype=torch.complex128), torch.randn(1).double()])
    sharded = copy.deepcopy(nn.Sequential(whole))
    sw.fully_shard(sharded)
    for found, values in zip(sharded.parameters(), whole.parameters(), strict=True):
        _equal(found.detach().norm(), values.detach().norm())
    norms = torch._foreach_norm([p.detach() for p in sharded.parameters()])
    for norm, values in zip(norms, whole.parameters(), strict=True):
        _equal(norm, values.detach().norm())


_OPTIMIZERS = [
    torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop,
]  # fmt: skip


@pytest.mark.parametrize("granularity", ["element", "row"])
@on_ranks(3)
def test_optimizers_of_complex_parameters(granularity: Literal["element", "row"]) -> None:
    for kind, foreach in product(_OPTIMIZERS, (False, True)):
        whole = nn.ParameterList([torch.randn(5, 3, dtype=torch.complex128)])
        sharded = sw.fully_shard(copy.deepcopy(nn.Sequential(whole)), granularity=granularity)
        [parameter], [expected] = sharded.parameters(), whole.parameters()
        steps = [kind([each], lr=0.1, foreach=foreach) for each in (parameter, expected)]
        for _ in range(2):
            expected.grad = torch.randn_like(expected)
            parameter.grad = torch.zeros_like(parameter).copy_(expected.grad)
            for step in steps:
                step.step()
        _equal(parameter.detach(), expected.detach())
    with pytest.raises(sw.ShardedTensorError, match=r"under torch.no_grad"):
        torch.view_as_real(parameter)


@on_ranks(2)
def test_results_in_inference_mode() -> None:
    pairs = _pairs()
    with torch.inference_mode():
        for sharded, whole in pairs:
            _equal(sharded.norm(), whole.norm())
            assert isinstance(sharded, sw.ShardedTensor)
            _equal(sharded.full_tensor(), whole)


@on_ranks(1, 2, 3)
def test_reductions_over_dims_are_global() -> None:
    functions: list[Callable[..., Tensor]] = [
        Tensor.sum, Tensor.mean, Tensor.norm, torch.linalg.vector_norm,
        partial(Tensor.norm, p=1), partial(Tensor.norm, p=3), partial(Tensor.norm, p=0),
        lambda x, **dims: (x > 0).any(**dims), lambda x, **dims: (x > 0).all(**dims),
        lambda x, **dims: (x > 0).sum(**dims),
        lambda x, **dims: (x > 0).sum(dtype=torch.int32, **dims),
        lambda x, **dims: x.float().mean(dtype=torch.float64, **dims),
        lambda x, **dims: x.bfloat16().sum(**dims),
    ]  # fmt: skip
    extremes: list[Callable[..., Tensor]] = [
        Tensor.amax, Tensor.amin, partial(Tensor.norm, p=math.inf),
        partial(Tensor.norm, p=-math.inf), Tensor.var, partial(Tensor.std, correction=0),
        lambda x, **dims: (x * 10).long().amax(**dims), lambda x, **dims: (x > 0).amax(**dims),
    ]  # fmt: skip
    for sharded, whole in _pairs():
        usual = functions + (extremes if whole.numel() else [])
        for size in range(whole.ndim):
            for dims, keepdim in product(combinations(range(-1, whole.ndim - 1), size), (0, 1)):
                for function in usual if dims else ():
                    options = {"dim": dims, "keepdim": bool(keepdim)}
                    found, expected = function(sharded, **options), function(whole, **options)
                    assert type(found) is Tensor
                    is_rounded = expected.dtype is torch.bfloat16
                    torch.testing.assert_close(
                        found, expected, rtol=1e-2 if is_rounded else 1e-12, atol=1e-2 * is_rounded,
                        equal_nan=True,
                    )  # fmt: skip
        if whole.ndim < 2 and whole.numel():
            _equal(sharded.sum(dim=0), whole.sum(dim=0))
            _equal(sharded.norm(dim=-1, keepdim=True), whole.norm(dim=-1, keepdim=True))
        if whole.numel() > 1:
            _equal(sharded.std(), whole.std())
            _equal(sharded.var(correction=0), whole.var(correction=0))
            _equal(nn.functional.normalize(sharded, dim=0), nn.functional.normalize(whole, dim=0))


@on_ranks(1, 2, 3)
def test_other_shapes_share_the_memory_of_the_shard() -> None:
    for sharded, whole in _pairs():
        for function in (
            lambda x: x.view(-1),
            torch.flatten,
            lambda x: x.unsqueeze(-1),
            lambda x: x.reshape(1, *x.shape),
            lambda x: x.view(*x.shape[::-1]) if x.ndim else x.view(1, 1),
            torch.squeeze,
            lambda x: x[:] if x.ndim else x,
        ):
            _equal(function(sharded), function(whole))
        flat, other = sharded.flatten(), torch.randn(whole.numel(), dtype=torch.float64)
        _equal(torch.dot(flat, flat), torch.dot(whole.flatten(), whole.flatten()))
        _equal(flat.dot(other), whole.flatten().dot(other))
        with pytest.raises(RuntimeError, match="inconsistent tensor size"):
            flat.dot(torch.ones(3 * flat.numel() + 2).double())
        version = sharded._version
        flat.mul_(2)
        _equal(sharded, whole * 2)
        assert sharded._version > version


@on_ranks(2)
def test_versions_are_counted() -> None:
    (sharded, _), *_ = _pairs()
    before = sharded._version
    sharded.add_(1)
    torch._foreach_mul_([sharded], 2.0)
    assert sharded._version >= before + 2


@needs_own_operators
@on_ranks(2)
def test_penalty_on_sharded_parameters() -> None:
    models = [build("stack"), build("stack")]
    sw.fully_shard(models[1], units="auto")
    for model in models:
        kinds = (Tensor.sum, Tensor.norm, Tensor.mean, Tensor.max)
        terms = [kind(p.square()) for p in model.parameters() for kind in kinds]
        over_rows = (Tensor.sum, Tensor.norm, Tensor.mean, Tensor.var, Tensor.amax)
        weights = [p for p in model.parameters() if p.ndim > 1]
        terms += [kind(p, dim=1).square().sum() for p in weights for kind in over_rows]
        terms += [torch.dot(p.flatten(), p.flatten()) + p.view(-1).sum() for p in weights]
        penalty = torch.stack(terms).sum()
        (penalty * 0.1 + model(torch.ones(4, 6).double()).square().mean()).backward()
    for p, q in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        _equal(p.grad, q.grad)


@on_ranks(1, 3)
def test_assigning_data_changes_the_shard() -> None:
    for (sharded, whole), (second, _) in zip(_parameters(), _parameters(), strict=True):
        sharded.data = sharded.data * 2
        _equal(sharded.detach(), whole.detach() * 2)
        sharded.data = whole.detach() - 1
        _equal(sharded.detach(), whole.detach() - 1)
        sharded.data.add_(1)
        _equal(sharded.detach(), whole.detach())
        local = sharded.to_local()
        second.grad = torch.ones_like(second)
        second.grad.data = second.grad.data * 3
        _equal(second.grad, torch.full_like(whole, 3))
        with pytest.raises(sw.ShardedTensorError, match=r"values\.\d.*expected.*float64.*float32"):
            sharded.data = sharded.data.float()
        with pytest.raises(sw.ShardedTensorError, match=r"values\.\d.*expected.*got.*\(9, 9\)"):
            sharded.data = torch.ones(9, 9).double()
        assert sharded.to_local() is local, "it still shares memory with the flat shard"


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_what_was_detached_keeps_its_values_when_data_is_assigned(granularity: Any) -> None:
    model = build("stack")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sw.fully_shard(model, units="auto", granularity=granularity)
    for _ in range(2):
        detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
        state = model.state_dict()
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        for name, parameter in model.named_parameters():
            _equal(parameter.full_tensor(), expected[name] * 2)
            parameter.data = detached[name]
        for parameter in model.parameters():
            parameter.data = parameter.data * 3
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            _equal(value.full_tensor(), expected[name])


class Steps(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = super().forward(x)
            yield x


@on_ranks(2)
def test_a_forward_that_is_a_generator_is_named() -> None:
    model = sw.fully_shard(Steps(4, 4))
    with pytest.raises(sw.ShardedTensorError, match=r"forward is a generator.*return a list"):
        list(model(torch.ones(2, 4)))


@on_ranks(2)
def test_access_to_whole_memory_is_refused_with_a_hint(tmp_path: Path) -> None:
    model = build("stack")
    sw.fully_shard(model, units="auto")
    parameter = next(model.parameters()).detach()
    for function in (
        parameter.numpy,
        parameter.tolist,
        parameter.untyped_storage,
        parameter.share_memory_,
        lambda: np.asarray(parameter),
        lambda: np.from_dlpack(parameter),
        lambda: torch.utils.dlpack.from_dlpack(parameter),
        lambda: safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors"),
        lambda: safetensors.torch.save_model(model, str(tmp_path / "model.safetensors")),
    ):
        with pytest.raises(sw.ShardedTensorError, match=r"first\.weight.*sw\.gathered\(model\)"):
            function()
    assert not (tmp_path / "model.safetensors").exists()
    with sw.gathered(model):
        safetensors.torch.save(model.state_dict())


@on_ranks(2)
def test_memory_that_a_dtensor_lacks_is_not_read() -> None:
    """torch reads at address 0 for these, and the process ends."""
    model = build("stack")
    sw.fully_shard(model, units="auto", granularity="dim")
    parameter = next(model.parameters())
    for function in (
        model.share_memory,
        parameter.share_memory_,
        lambda: np.from_dlpack(parameter.detach()),
        lambda: torch.utils.dlpack.from_dlpack(parameter.detach()),
    ):
        with pytest.raises(sw.ShardedTensorError, match=r"memory.*to_local.*full_tensor"):
            function()


@pytest.mark.parametrize("options", [{}, {"granularity": sw.block(2), "reproducible": 4}])
@on_ranks(2)
def test_a_pickled_state_dict_has_the_shards_of_this_rank(options: dict[str, Any]) -> None:
    """As with torch's own DTensors."""
    model = build("stack")
    sw.fully_shard(model, units="auto", **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for one in sharded_parameters(model):
        one.grad = torch.ones_like(one)
    optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    values, states = torch.load(file, weights_only=True)
    expected = [
        (p.full_tensor(), optimizer.state[p]["exp_avg"].full_tensor())
        for p in sharded_parameters(model)
    ]
    with torch.no_grad():
        for parameter in sharded_parameters(model):
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    model.load_state_dict(values)
    optimizer.load_state_dict(states)
    for parameter, pair in zip(sharded_parameters(model), expected, strict=True):
        assert torch.equal(parameter.full_tensor(), pair[0])
        state = optimizer.state[parameter]["exp_avg"]
        assert isinstance(state, ShardedTensor)
        assert state.sharding.matches(parameter.sharding)
        assert torch.equal(state.full_tensor(), pair[1])


def sharded_parameters(model: nn.Module) -> list[ShardedTensor]:
    return [p for p in model.parameters() if isinstance(p, ShardedTensor)]


@on_ranks(2)
def test_tensors_of_one_element_broadcast_like_numbers() -> None:
    for sharded, whole in _pairs():
        for shape in [(1,) * ndim for ndim in range(whole.ndim + 1)]:
            one = torch.full(shape, 2.0).double()
            _equal(sharded * one, whole * one)
            copied = sharded.clone()
            copied.add_(one)
            _equal(copied, whole + one)
        with pytest.raises(sw.ShardedTensorError, match=r"values\.\d"):
            sharded.mul(torch.ones((1,) * (whole.ndim + 1)).double())


@on_ranks(2, 3)
def test_an_output_of_one_element_keeps_its_run() -> None:
    for sharded, whole in _pairs():
        if whole.numel() != 1:
            continue
        assert isinstance(sharded, sw.ShardedTensor)
        one, before = torch.full(whole.shape, 3.0).double(), sharded.clone()
        torch.mul(one, one, out=sharded)
        assert len(sharded.to_local()) == len(sharded.sharding.run)  # 0 on some ranks
        torch.div(before, sharded, out=sharded)
        _equal(sharded, whole / (one * one))


@on_ranks(2)
def test_whole_tensors_of_ranks_that_name_parameters_differently() -> None:
    own = [nn.Linear(2, 2) for _ in range(1 + dist.get_rank())]
    torch.manual_seed(1)
    whole = [torch.randn(shape) for shape in SHAPES]
    parameters = [nn.Parameter(one.clone()) for one in whole]
    model = nn.Sequential(*own, nn.ParameterList(parameters))
    ignored = [parameter for module in own for parameter in module.parameters()]
    with pytest.warns(UserWarning, match="Only names of parameters differ"):
        sw.fully_shard(model, ignored_params=ignored, on_different_values="warn")
    for sharded, expected in zip(model[-1].parameters(), whole, strict=True):
        _equal(sharded, expected)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.randn(shape).double() for shape in SHAPES)

    def forward(self) -> Tensor:
        return torch.stack([value.sum() for value in self.values]).sum()


def _pairs() -> list[tuple[Tensor, Tensor]]:
    return [(p.detach(), q.detach()) for p, q in _parameters()]


def _parameters() -> list[tuple[sw.ShardedTensor, Tensor]]:
    whole, holder = Holder(), Holder()
    holder.load_state_dict(whole.state_dict())
    sw.fully_shard(holder)
    return list(zip(holder.values, whole.values, strict=True))


def _equal(actual: Tensor, expected: Tensor) -> None:
    actual = actual.full_tensor() if isinstance(actual, sw.ShardedTensor) else actual
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _gradients() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(0)
    models = [Holder(), Holder()]
    models[0].load_state_dict(models[1].state_dict())
    sw.fully_shard(models[0])
    for model in models:
        (model() * 3).backward()
    return list(models[0].parameters()), list(models[1].parameters())


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_averages_inside_a_model_work_or_name_the_way_out(granularity: Any) -> None:
    """The parameters of BYOL's target and online networks are in one unit."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 3)).double()
    expected = [q.detach().lerp(p.detach(), 0.1) for p, q in _online_and_target(model)]
    sw.fully_shard(model, granularity=granularity)
    if granularity == "element":
        with pytest.raises(sw.ShardedTensorError, match=r'cut differently.*granularity="dim"'):
            _average(model)
        return
    _average(model)
    for (_, target), wanted in zip(_online_and_target(model), expected, strict=True):
        torch.testing.assert_close(target.detach().full_tensor(), wanted)


def _online_and_target(model: nn.Module) -> list[tuple[Any, Any]]:
    networks = (model.get_submodule(name).parameters() for name in ("0", "1"))
    return list(zip(*networks, strict=True))


@torch.no_grad()
def _average(model: nn.Module) -> None:
    for online, target in _online_and_target(model):
        target.lerp_(online, 0.1)
