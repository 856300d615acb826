"""`sw.gathered`: whole parameters between steps, and changes to them."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import shardwise as sw
from tests.fsdp.extended import Pair, replace_weights
from tests.models import Gpt, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import sharded_pair
from tests.waiting import eventually


def _assert_equal(model: nn.Module, reference: nn.Module) -> None:
    named = dict(reference.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(named)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert torch.equal(parameter.full_tensor(), named[name]), name


def _assign_data(model: Stack) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def _assign_parameters(model: Stack) -> None:
    model.first.weight = nn.Parameter(torch.full_like(model.first.weight, 0.25))
    model.first.bias = nn.Parameter(model.first.bias.detach() - 1)


def _vector_to_parameters(model: Stack) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 3, model.parameters())


def _load_by_assignment(model: Stack) -> None:
    state = {name: value.detach() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _change_in_place(model: Stack) -> None:
    with torch.no_grad():
        model.first.weight.mul_(-1)
        model.first.bias.data.add_(5)


CHANGES = {
    change.__name__.lstrip("_"): change
    for change in (
        _assign_data,
        _assign_parameters,
        _vector_to_parameters,
        _load_by_assignment,
        _change_in_place,
    )
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(1, 2)
def test_write_back_keeps_every_kind_of_change(change: str) -> None:
    reference, model = sharded_pair("stack")
    CHANGES[change](reference)
    with sw.gathered(model, write_back=True):
        CHANGES[change](model)
    _assert_equal(model, reference)
    with sw.gathered(model):
        _assign_data(model)
    _assert_equal(model, reference)


@on_ranks(2)
def test_write_back_keeps_the_change_of_a_tied_parameter() -> None:
    reference, model = sharded_pair("gpt")
    for root in (reference, model):
        write = sw.gathered(model, write_back=True)
        with write if root is model else torch.no_grad():
            root.embedding.weight = root.head.weight = nn.Parameter(root.head.weight.detach() * 2)
    _assert_equal(model, reference)


@pytest.mark.parametrize("granularity", ["element", "dim"])
@pytest.mark.parametrize("write_back", [False, True])
@on_ranks(2)
def test_what_is_kept_from_inside_keeps_its_memory(granularity: Any, write_back: bool) -> None:
    reference, model = sharded_pair("stack", granularity=granularity)
    with sw.gathered(model, write_back=write_back):
        if write_back:
            _change_in_place(model)
            _change_in_place(reference)
        memory = weakref.ref(model.first.bias.untyped_storage())
        parameter, data = model.first.weight, model.first.bias.data
        state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    for name, expected in reference.state_dict().items():
        assert torch.equal(state[name], expected), name
        assert torch.equal(loaded[name], expected), name
    assert torch.equal(parameter, reference.first.weight)
    assert torch.equal(data, reference.first.bias)
    _assert_equal(model, reference)
    assert memory() is not None
    gc.disable()  # nothing waits for a collection of cycles
    try:
        del parameter, data, state
        assert eventually(lambda: memory() is None)
    finally:
        gc.enable()


def _untie(model: Gpt) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _reshape(model: Gpt) -> None:
    model.head.weight = model.embedding.weight = nn.Parameter(torch.ones(3, 2).double())


def _cast(model: Gpt) -> None:
    model.half()


def _delete(model: Gpt) -> None:
    del model.head.weight


def _prune(model: Gpt) -> None:
    prune.l1_unstructured(model.get_submodule("layers.0.mlp.up"), "weight", 0.5)  # type: ignore[no-untyped-call]


def _parametrize(model: Gpt) -> None:
    weight_norm(model.get_submodule("layers.0.mlp.up"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_untie, r"embedding\.weight, head\.weight.*different tensors"),
        (_reshape, r"embedding\.weight: expected .*\(11, 8\).*got .*\(3, 2\)"),
        (_cast, r"embedding\.weight: expected .*float64.*got .*float16"),
        (_delete, r"Linear\.weight is no longer a parameter"),
    ],
)
@on_ranks(2)
def test_write_back_refuses_what_has_no_place_in_the_shards(
    change: Callable[[Gpt], None], message: str
) -> None:
    reference, model = sharded_pair("gpt")
    with pytest.raises(sw.PlanError, match=message), sw.gathered(model, write_back=True):
        change(model)
    _assert_equal(model, reference)
    tokens = torch.randint(0, 11, (2, 7))
    assert torch.equal(model(tokens), reference(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_prune, r"^Linear\.weight is no longer a parameter.* prune"),
        (_parametrize, r"^ParametrizedLinear\.weight is no longer a parameter"),
    ],
)
@on_ranks(2)
def test_a_layer_that_is_no_longer_plain_has_the_name_of_its_class(
    change: Callable[[Gpt], None], message: str
) -> None:
    _, model = sharded_pair("gpt")
    with pytest.raises(sw.PlanError, match=message), sw.gathered(model, write_back=True):
        change(model)


@on_ranks(2)
def test_an_optimizer_that_steps_shards_inside_is_refused() -> None:
    _, model = sharded_pair("stack")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(4, 6).double()).sum().backward()
    with (
        pytest.raises(sw.PlanError, match=r"first\.weight.*optimizer.*step outside"),
        sw.gathered(model, write_back=True),
    ):
        optimizer.step()
    before = copy.deepcopy(model.first.weight)
    model(torch.ones(4, 6).double()).sum().backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, before)


def _add_rank(model: Stack) -> None:
    model.first.weight.data.add_(dist.get_rank())


def _assign_rank(model: Stack) -> None:
    model.first.weight.data = model.first.weight.data + dist.get_rank()


def _shuffle(model: Stack) -> None:
    """The same elements on every rank, in another order."""
    model.first.weight.data = model.first.weight.data.roll(dist.get_rank(), 1)


@on_ranks(2)
def test_changes_that_differ_between_ranks_are_refused_on_every_rank() -> None:
    reference, model = sharded_pair("stack")
    message = r"first\.weight.*differs between ranks 0 and 1"
    for change in (_add_rank, _assign_rank, _shuffle):
        with pytest.raises(sw.PlanError, match=message), sw.gathered(model, write_back=True):
            change(model)
        _assert_equal(model, reference)
    model(torch.ones(4, 6).double()).sum().backward()


def _change_and_divide(model: Stack, divisor: int) -> None:
    _change_in_place(model)
    _ = 1 // divisor


@on_ranks(2)
def test_nothing_is_written_when_the_body_of_one_rank_raises() -> None:
    reference, model = sharded_pair("stack")
    rank = dist.get_rank()
    error = ZeroDivisionError if rank == 0 else sw.PeerAborted
    with pytest.raises(error), sw.gathered(model, write_back=True):
        _change_and_divide(model, rank)
    _assert_equal(model, reference)
    model(torch.ones(4, 6).double()).sum().backward()


@on_ranks(2)
def test_parameters_with_all_gather_extensions_cannot_be_written_back() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    weights = [layer.weight.detach().clone() for layer in model]
    replace_weights(model, lambda weight: Pair(weight, weight.clone()))
    sw.fully_shard(model, units=nn.Linear, granularity="dim")
    x = torch.randn(3, 6)
    before = model(x).a.detach()
    with sw.gathered(model):
        for layer, weight in zip(model, weights, strict=True):
            assert torch.equal(layer.weight.a, weight)
        assert torch.equal(model(x).a, before)
    with sw.gathered(model, write_back=True):
        pass
    with (
        pytest.raises(sw.PlanError, match="a Pair cannot be changed"),
        sw.gathered(model, write_back=True),
        torch.no_grad(),
    ):
        model[0].weight.mul_(2)
    assert torch.equal(model(x).a, before)
    model(x).sum().backward()
