"""8-bit Adam: its definition, another implementation, and the same bits at any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.blockwise import Blocks
from shardwise.tensor.sharding import sharding_of
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import full, own_part

GRANULARITIES: dict[str, Any] = {
    "row": "row",
    "blocks": sw.block(3),
    "tensor": "tensor",
    "dim": "dim",
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    # Rows that blocks divide, rows that they do not, and some that keep float32.
    return nn.Sequential(nn.Linear(40, 128), nn.Linear(128, 300, bias=False), nn.Linear(300, 7))


def train(model: nn.Module, steps: int = 3, first: int = 0) -> torch.optim.Optimizer:
    """On batches of integers, whose gradients are the same however they are added up."""
    optimizer = sw.optim.Adam8bit(model.parameters(), lr=1e-2, block=64, min_elements=2000)
    step(model, optimizer, range(first, first + steps))
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Any) -> None:
    for number in numbers:
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * number + seed)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(distributed_like(gradient, parameter))
        optimizer.step()


def distributed_like(whole: Tensor, parameter: Tensor) -> Tensor:
    sharding = sharding_of(parameter)
    return (
        whole
        if sharding is None
        else sharding.wrap(sharding.own_part_of(whole).reshape(-1).clone())
    )


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [
        {key: full(value).reshape(-1) for key, value in optimizer.state[parameter].items()}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def trained_states(granularity: str) -> list[dict[str, Tensor]]:
    model = sw.fully_shard(make_model(), granularity=GRANULARITIES[granularity])
    return states_of(train(model))


@pytest.mark.parametrize("granularity", list(GRANULARITIES))
def test_states_have_the_same_bits_on_any_number_of_ranks(granularity: str) -> None:
    alone, *others = (run_on(n, trained_states, granularity)[0] for n in (1, 2, 3, 4))
    assert alone[0]["exp_avg"].dtype is torch.uint8
    assert alone[1]["exp_avg"].dtype is torch.float32
    for found in others:
        for one, other in zip(alone, found, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)


def save_trained(path: str) -> None:
    model = sw.fully_shard(make_model(), granularity="row")
    sw.save(path, model=model, optimizer=train(model, 2))


def load_and_train(path: str, granularity: str) -> list[dict[str, Tensor]]:
    model = sw.fully_shard(make_model(), granularity=GRANULARITIES[granularity])
    optimizer = sw.optim.Adam8bit(model.parameters(), lr=1e-2, block=64, min_elements=2000)
    sw.load(path, model=model, optimizer=optimizer)
    step(model, optimizer, [2])
    return states_of(optimizer)


@pytest.mark.parametrize("ranks", [(2, 3), (4, 1)])
def test_checkpoints_are_for_any_number_of_ranks(ranks: tuple[int, int], tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    run_on(ranks[0], save_trained, path)
    loaded = run_on(ranks[1], load_and_train, path, "row")[0]
    for one, other in zip(run_on(2, trained_states, "row")[0], loaded, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_state_dicts_keep_dtypes() -> None:
    model = make_model().bfloat16()
    optimizer = train(model)
    other = sw.optim.Adam8bit(model.parameters(), block=64, min_elements=2000)
    other.load_state_dict(optimizer.state_dict())
    for one, loaded in zip(states_of(optimizer), states_of(other), strict=True):
        assert all(torch.equal(one[key], loaded[key]) for key in one)
        assert all(one[key].dtype is loaded[key].dtype for key in one)


def test_a_step_is_that_of_the_definition() -> None:
    """AdamW of what the codes stand for; then both averages are quantized again."""
    parameter = nn.Parameter(torch.randn(40, 100))
    optimizer = sw.optim.Adam8bit([parameter], lr=0.1, weight_decay=0.2, min_elements=1)
    exact = nn.Parameter(parameter.detach().clone())
    reference = torch.optim.AdamW([exact], lr=0.1, weight_decay=0.2)
    signed, unsigned = Blocks("dynamic", 256), Blocks("dynamic_unsigned", 256)
    for _ in range(5):
        gradient = torch.randn(40, 100)
        parameter.grad, exact.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
        assert torch.allclose(parameter, exact, atol=1e-6)
        for key, blocks in (("exp_avg", signed), ("exp_avg_sq", unsigned)):
            state, wanted = optimizer.state[parameter], reference.state[exact][key]
            codes, scales = blocks.quantize(wanted.flatten())
            near = (state[key].flatten().int() - codes.int()).abs()
            assert near.max() <= 1  # where AdamW's last bit decides
            assert near.float().mean() < 1e-3
            assert torch.allclose(state[f"{key}_scale"], scales)
            wanted.copy_(
                blocks.dequantize(state[key].flatten(), state[f"{key}_scale"]).view_as(wanted)
            )


@pytest.mark.thorough
def test_it_is_near_another_implementation() -> None:
    """torchao's, of the same blocks and, but for rounding between two of them, the same codes."""
    low_bit = pytest.importorskip("torchao.optim")
    parameter = nn.Parameter(torch.randn(64, 256))
    other = nn.Parameter(parameter.detach().clone())
    optimizers = [
        sw.optim.Adam8bit([parameter], lr=1e-2, weight_decay=0.1),
        low_bit.AdamW8bit([other], lr=1e-2, weight_decay=0.1, block_size=256),
    ]
    start = parameter.detach().clone()
    with torch.compiler.set_stance("force_eager"):
        for _ in range(10):
            gradient = torch.randn(64, 256)
            parameter.grad, other.grad = gradient.clone(), gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
    moved = (other - start).norm()
    assert (parameter - other).norm() < 0.02 * moved


@on_ranks(2)
def test_blocks_that_would_be_cut_are_refused() -> None:
    model = sw.fully_shard(make_model())
    with pytest.raises(
        sw.PlanError, match=r'0.weight: cut by element.*granularity="row", or sw.bl'
    ):
        sw.optim.Adam8bit(model.parameters())
    groups = [{"params": list(model.parameters()), "state_bits": 32}]
    optimizer = sw.optim.Adam8bit(groups)
    step(model, optimizer, [0])
    assert {one["exp_avg"].dtype for one in states_of(optimizer)} == {torch.float32}
    with pytest.raises(sw.PlanError, match=r"state_bits=4\): expected 8 or 32"):
        sw.optim.Adam8bit(model.parameters(), state_bits=4)


@on_ranks(2)
def test_a_step_that_raises_leaves_states_as_they_were() -> None:
    model = sw.fully_shard(make_model(), granularity="row")
    optimizer = train(model, 2)
    before = states_of(optimizer)
    with pytest.raises((ZeroDivisionError, sw.PeerAborted)):
        _step_and_raise(model, optimizer)
    for one, other in zip(before, states_of(optimizer), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def _step_and_raise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with sw.transaction(model, optimizer):
        model(own_part(torch.ones(4, 40))).sum().backward()
        optimizer.step()
        if dist.get_rank() == 1:
            raise ZeroDivisionError
