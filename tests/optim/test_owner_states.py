"""States of owners are saved, and loaded on other numbers of ranks and other owners."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise._private import FakeTensorMode
from tests.models import CASES, build
from tests.optim.checkpoints import load_one, save_both
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import assert_equal_models, options_of, own_part

Make = Callable[[Iterator[nn.Parameter]], Optimizer]


def muon(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return sw.optim.Muon(matrix_groups(parameters), eps=1e-3, adamw_eps=1e-3)


def soap(parameters: Iterator[nn.Parameter]) -> Optimizer:
    options: Any = {"precondition_frequency": 2, "damping": 1e-3}
    return sw.optim.SOAP(matrix_groups(parameters), eps=1e-3, adamw_eps=1e-3, **options)


def _sharded(make: Make, strategy: str) -> tuple[nn.Module, Optimizer]:
    model = build("gpt")
    sw.fully_shard(model, units=CASES["gpt"].units, **options_of(strategy))
    return model, make(model.parameters())


def _train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        batch = CASES["gpt"].batch(12)
        part = own_part(batch) if isinstance(model, sw.FSDPModule) else batch
        CASES["gpt"].loss(model(part)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _save(make: Make, strategy: str, path: Path) -> None:
    model, optimizer = _sharded(make, strategy)
    _train(model, optimizer, range(3))
    save_both(path, model, optimizer)


def _load_and_continue(make: Make, strategy: str, path: Path, by_torch: bool) -> None:
    reference = build("gpt")
    of_reference = make(reference.parameters())
    _train(reference, of_reference, range(6))
    model, optimizer = _sharded(make, strategy)
    load_one(path, model, optimizer, by_torch=by_torch)
    _train(model, optimizer, range(3, 6))
    assert_equal_models(model, reference, 6)


@pytest.mark.parametrize(
    ("make", "before", "after", "ranks"),
    [(muon, "fsdp", "hsdp", (2, 4)), (soap, "hsdp", "fsdp", (4, 3)), (soap, "fsdp", "ddp", (2, 1))],
)
def test_another_number_of_ranks_continues(
    make: Make, before: str, after: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    run_on(ranks[0], _save, make, before, tmp_path)
    for by_torch in (False, True):
        run_on(ranks[1], _load_and_continue, make, after, tmp_path, by_torch)


@pytest.mark.parametrize("make", [muon, soap])
def test_state_dicts_of_torch(make: Make) -> None:
    run_on(2, _reload, make)


def _reload(make: Make) -> None:
    (model, optimizer), (twin, other) = (_sharded(make, "fsdp") for _ in range(2))
    _train(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copies = copy.deepcopy((model, optimizer))
    for one, its in ((model, optimizer), (twin, other), copies):
        _train(one, its, range(3, 5))
    for loaded in (twin, copies[0]):
        for parameter, value in zip(model.parameters(), loaded.parameters(), strict=True):
            assert parameter.equal(value)


@pytest.mark.parametrize("make", [muon, soap])
@on_ranks(3)
def test_matrices_are_frozen_unfrozen_and_added_between_steps(make: Make) -> None:
    """Matrices that have states keep their owners."""

    def trained(*, shards: bool) -> Any:
        model = build("gpt")
        added = list(model.layers[1].parameters())
        frozen = model.layers[0].requires_grad_(False)
        if shards:
            sw.fully_shard(model, units=CASES["gpt"].units)
            added = list(model.layers[1].parameters())
        late = {id(parameter) for parameter in added}
        optimizer = make(p for p in model.parameters() if id(p) not in late)
        _train(model, optimizer, range(2))
        frozen.requires_grad_(True)
        _train(model, optimizer, range(2, 4))
        for group in matrix_groups(iter(added)):
            optimizer.add_param_group({"method": optimizer.defaults["method"], **group})
        _train(model, optimizer, range(4, 6))
        model.embedding.requires_grad_(False)
        _train(model, optimizer, range(6, 8))
        return model

    assert_equal_models(trained(shards=True), trained(shards=False), 8)


@pytest.mark.parametrize("make", [muon, soap])
@on_ranks(2)
def test_a_state_dict_of_other_owners_is_loaded(make: Make) -> None:
    """The states were made while another part of the model was frozen."""
    (model, optimizer), (twin, other) = (_sharded(make, "fsdp") for _ in range(2))
    twin.layers[0].requires_grad_(False)  # type: ignore[index]
    _train(twin, other, range(1))
    twin.layers[0].requires_grad_(True)  # type: ignore[index]
    _train(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (twin, other)):
        _train(one, its, range(3, 5))
    for parameter, loaded in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.equal(loaded)


def test_the_steps_of_matrices_stay_on_the_host() -> None:
    """torch moves them to the parameters' device, as their groups are fused."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = sw.optim.SOAP(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        other = nn.Linear(4, 3, bias=False)
        loaded = sw.optim.SOAP(other.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    (state,) = loaded.state.values()
    assert state["step"].device.type == "cpu"
    empty = loaded.empty_state(other.weight, "step", (), torch.float32)  # for `sw.load`
    assert empty is not None
    assert empty.device.type == "cpu"


@pytest.mark.parametrize("make", [sw.optim.Muon, sw.optim.SOAP, sw.optim.Adam8bit])
def test_a_state_dict_of_another_optimizer_is_refused(make: Any) -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    saved = torch.optim.SGD([parameter], lr=0.1).state_dict()
    expected = rf"expected the state_dict\(\) of {make.__name__}"
    with pytest.raises(sw.CheckpointError, match=expected):
        make([parameter]).load_state_dict(saved)


@pytest.mark.parametrize("make", [muon, soap])
@on_ranks(2)
def test_a_state_dict_of_one_process_is_refused(make: Make) -> None:
    model = build("gpt")
    alone = make(model.parameters())
    _train(model, alone, range(2))
    _, optimizer = _sharded(make, "fsdp")
    with pytest.raises(sw.CheckpointError, match=r"on each rank, expected a shard; load whole"):
        optimizer.load_state_dict(alone.state_dict())


def test_states_stay_on_the_device_of_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """With shards in host memory, owners work on the accelerator."""
    monkeypatch.setattr(sw.optim.SOAP, "_device_of", lambda *_: torch.device("cuda", 0))
    with FakeTensorMode():
        parameter = nn.Parameter(torch.ones(4, 3))
        optimizer = sw.optim.SOAP([parameter])
        moments = optimizer.empty_state(parameter, "exp_avg", (4, 3), torch.float32)
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": moments}
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[parameter]["exp_avg"].device.type == "cuda"


def test_states_keep_their_dtype() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    optimizer, other = (sw.optim.Muon([parameter], momentum_dtype=torch.bfloat16) for _ in range(2))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for _ in range(2):  # the first load changes the defaults of the optimizer
        other.load_state_dict(optimizer.state_dict())
    assert other.state[parameter]["momentum_buffer"].dtype is torch.bfloat16
