"""8-bit Adam equals its definition and torchao, with the same bits on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardwise as sw
from shardwise.blockwise import Blocks
from shardwise.tensor.sharding import sharding_of
from tests.optim.checkpoints import load_one, save_both
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
    # Rows of whole blocks, other rows, and a parameter that keeps float32 states.
    return nn.Sequential(nn.Linear(40, 128), nn.Linear(128, 300, bias=False), nn.Linear(300, 7))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Adam8bit(model.parameters(), lr=1e-2, block=64, min_elements=2000)


def make_sharded(granularity: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sw.fully_shard(make_model(), granularity=GRANULARITIES[granularity])
    return model, make_optimizer(model)


def train(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    """Train on gradients that are the same on any number of ranks."""
    optimizer = make_optimizer(model)
    step(model, optimizer, range(steps))
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
    model, optimizer = make_sharded(granularity)
    step(model, optimizer, range(3))
    return states_of(optimizer)


@pytest.mark.parametrize(
    ("granularity", "sizes"),
    [
        ("row", (3,)),
        ("blocks", (4,)),
        ("tensor", (2,)),
        ("dim", (3,)),
        *(pytest.param(name, (2, 3, 4), marks=pytest.mark.thorough) for name in GRANULARITIES),
    ],
)
def test_states_have_the_same_bits_on_any_number_of_ranks(
    granularity: str, sizes: tuple[int, ...]
) -> None:
    alone, *others = (run_on(n, trained_states, granularity)[0] for n in (1, *sizes))
    assert alone[0]["exp_avg"].dtype is torch.uint8
    assert alone[1]["exp_avg"].dtype is torch.float32
    for found in others:
        assert_equal_states(alone, found)


def save_trained(path: Path, granularity: str) -> None:
    model, optimizer = make_sharded(granularity)
    step(model, optimizer, range(2))
    save_both(path, model, optimizer)


def load_and_train(path: Path, granularity: str, by_torch: bool) -> list[dict[str, Tensor]]:
    model, optimizer = make_sharded(granularity)
    load_one(path, model, optimizer, by_torch=by_torch)
    step(model, optimizer, [2])
    return states_of(optimizer)


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [("row", "dim", (2, 3)), ("blocks", "blocks", (4, 1)), ("tensor", "tensor", (3, 2))],
)
def test_checkpoints_load_on_any_number_of_ranks(
    before: str, after: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    """With `sw.save` and `torch.distributed.checkpoint`. "dim" cuts between rows, as "row" does."""
    run_on(ranks[0], save_trained, tmp_path, before)
    whole = run_on(2, trained_states, before)[0]
    for by_torch in (False, True):
        loaded = run_on(ranks[1], load_and_train, tmp_path, after, by_torch)[0]
        assert_equal_states(whole, loaded)


def assert_equal_states(states: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> None:
    for one, other in zip(states, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert all(one[key].dtype is other[key].dtype for key in one)


@on_ranks(2)
def test_states_of_other_blocks_are_refused(tmp_path: Path) -> None:
    save_trained(tmp_path, "row")
    words = (
        r"0.weight: .*scales of shape \[128, 1\], expected \[86\]: .* in other blocks; shard with"
    )
    model, optimizer = make_sharded("blocks")
    with pytest.raises(sw.CheckpointError, match=words):
        sw.load(tmp_path / "ours", model=model, optimizer=optimizer)
    states = train(make_sharded("row")[0]).state_dict()
    with pytest.raises(sw.CheckpointError, match=words):
        optimizer.load_state_dict(states)


@on_ranks(2)
def test_the_block_size_of_the_checkpoint_is_used(tmp_path: Path) -> None:
    """Two sizes divide rows into the same number of blocks, but only one is correct."""
    save_trained(tmp_path, "row")
    model, other = make_sharded("row")
    step(model, other, range(2))
    twin = make_sharded("row")[0]
    optimizer = sw.optim.Adam8bit(twin.parameters(), lr=1e-2, block=66, min_elements=2000)
    sw.load(tmp_path / "ours", model=twin, optimizer=optimizer)
    for one, its in ((model, other), (twin, optimizer)):
        step(one, its, [2])
    assert_equal_states(states_of(other), states_of(optimizer))


def whole_states(granularity: str) -> Any:
    model, optimizer = make_sharded(granularity)
    step(model, optimizer, range(2))
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def reload_whole(states: Any, sends: bool) -> Any:
    model, optimizer = make_sharded("dim")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
    is_read = not sends or dist.get_rank() == 0
    set_optimizer_state_dict(model, optimizer, states if is_read else {}, options=options)
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_whole_states_of_torch(ranks: int) -> None:
    states = run_on(2, whole_states, "row")[0]
    for sends in (False, True):
        loaded = run_on(ranks, reload_whole, states, sends)[0]
        assert_equal_states([*states["state"].values()], [*loaded["state"].values()])


def test_state_dicts_keep_dtypes() -> None:
    model = make_model().bfloat16()
    optimizer = train(model)
    other = sw.optim.Adam8bit(model.parameters(), block=64, min_elements=2000)
    other.load_state_dict(optimizer.state_dict())
    assert_equal_states(states_of(optimizer), states_of(other))


def test_a_step_equals_the_definition() -> None:
    """AdamW on the dequantized averages, which are then quantized again."""
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
            assert near.max() <= 1  # differences in AdamW's last bit
            assert near.float().mean() < 1e-3
            assert torch.allclose(state[f"{key}_scale"], scales)
            wanted.copy_(
                blocks.dequantize(state[key].flatten(), state[f"{key}_scale"]).view_as(wanted)
            )


@pytest.mark.thorough
def test_each_step_equals_that_of_torchao() -> None:
    """With the same blocks. Codes differ by at most 1, where the last bit decides."""
    low_bit = pytest.importorskip("torchao.optim")
    generator = torch.Generator().manual_seed(0)
    ours = nn.Parameter(torch.randn(64, 256, generator=generator))
    other = nn.Parameter(ours.detach().clone())
    both = ours, other
    optimizers = [
        sw.optim.Adam8bit([ours], lr=1e-2, weight_decay=0.1),
        low_bit.AdamW8bit([other], lr=1e-2, weight_decay=0.1, block_size=256),
    ]
    state, theirs = (optimizer.state[p] for optimizer, p in zip(optimizers, both, strict=True))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(10):
            before = ours.detach().clone()
            gradient = torch.randn(64, 256, generator=generator)
            gradient *= 10 ** (4 * torch.rand(64, 256, generator=generator) - 3)
            for one, optimizer in zip(both, optimizers, strict=True):
                one.grad = gradient.clone()
                optimizer.step()
            assert torch.allclose(ours - before, other - before, rtol=1e-3, atol=1e-6)
            for key in ("exp_avg", "exp_avg_sq"):
                apart = (state[key].int() - theirs[key].codes.view(64, 256).int()).abs()
                assert apart.max() <= 1
                assert apart.float().mean() < 1e-3
                scale = theirs[key].scale.view(1, -1)
                assert torch.allclose(state[f"{key}_scale"], scale)
                state[key].copy_(theirs[key].codes.view(64, 256))
                state[f"{key}_scale"].copy_(scale)
            ours.detach().copy_(other)


@on_ranks(2)
def test_parameters_whose_blocks_would_be_divided_are_refused() -> None:
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
    whole = make_model()
    optimizer = sw.optim.Adam8bit(whole.parameters())
    sw.fully_shard(whole)
    with pytest.raises(sw.PlanError, match=r"0\.weight: cut by element"):
        step(whole, optimizer, [0])


@on_ranks(2)
def test_a_step_that_raises_leaves_states_as_they_were() -> None:
    model = sw.fully_shard(make_model(), granularity="row")
    optimizer = train(model, 2)
    before = states_of(optimizer)
    with pytest.raises((ZeroDivisionError, sw.PeerAborted)):
        _step_and_raise(model, optimizer)
    assert_equal_states(before, states_of(optimizer))


def _step_and_raise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with sw.transaction(model, optimizer):
        model(own_part(torch.ones(4, 40))).sum().backward()
        optimizer.step()
        if dist.get_rank() == 1:
            raise ZeroDivisionError


def test_a_parameter_without_elements_is_stepped() -> None:
    parameter = nn.Parameter(torch.zeros(0, 3))
    parameter.grad = torch.zeros(0, 3)
    sw.optim.Adam8bit([parameter], min_elements=0).step()
