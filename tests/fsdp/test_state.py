"""State of FSDP1 models whose form differs from PyTorch's, and calls that are refused."""

import copy
import io
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import shardwise.fsdp as f
from shardwise.errors import PlanError
from shardwise.fsdp.wrap import ModuleWrapPolicy
from tests.covering import covered_first
from tests.fsdp.models import Block, batch, make_net
from tests.fsdp.programs1 import values
from tests.ranks import on_ranks

FSDP = f.FullyShardedDataParallel
HYBRID = f.ShardingStrategy.HYBRID_SHARD
LOCAL = f.StateDictType.LOCAL_STATE_DICT
SHARDED = f.StateDictType.SHARDED_STATE_DICT


def wrapped(seed: int = 0, **options: Any) -> Any:
    return FSDP(make_net(seed), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(values(f, one).items(), values(f, other).values(), strict=True):
        assert torch.equal(a, b), name


@on_ranks()
@pytest.mark.parametrize(("kind", "world_size"), covered_first(product((LOCAL, SHARDED), (2, 4))))
def test_checkpoint_of_torch(kind: f.StateDictType, tmp_path: Path) -> None:
    path = str(tmp_path)
    net, other = wrapped(), wrapped(seed=3)
    for model in (net, other):
        FSDP.set_state_dict_type(model, kind)
    saved = net.state_dict()
    names = [name for name, _ in net.named_parameters()]
    assert all(type(saved[name]) is ShardedTensor for name in names)
    save(saved, checkpoint_id=path)
    loaded = other.state_dict()
    load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded)
    assert_equal(other, net)


@on_ranks(2)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_torchs_functions_save_and_load_a_model_and_its_optimizer(
    on_mesh: bool, tmp_path: Path
) -> None:
    """Loading once said that no states were saved, and to pass strict=False, which drops them."""
    options = {"device_mesh": init_device_mesh("cpu", (2,))} if on_mesh else {}
    models = [wrapped(seed, **options) for seed in (0, 3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]

    def step(index: int, seed: int) -> None:
        models[index](batch(dist.get_rank(), seed)).square().mean().backward()
        optimizers[index].step()
        optimizers[index].zero_grad()

    step(0, 0)
    weights, states = get_state_dict(models[0], optimizers[0])
    save({"weights": weights, "states": states}, checkpoint_id=str(tmp_path))
    weights, states = get_state_dict(models[1], optimizers[1])
    loaded: dict[str, Any] = {"weights": weights, "states": states}
    load(loaded, checkpoint_id=str(tmp_path))
    set_state_dict(
        models[1],
        optimizers[1],
        model_state_dict=loaded["weights"],
        optim_state_dict=loaded["states"],
    )
    for index in range(2):
        step(index, 1)
    assert_equal(models[1], models[0])


@on_ranks(4)
def test_hybrid_shards_are_those_of_a_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    groups = mesh.get_group(1), mesh.get_group(0)
    net, other = (wrapped(seed, process_group=groups, sharding_strategy=HYBRID) for seed in (0, 3))
    assert (net.process_group, net._inter_node_pg) == groups
    assert_equal(copy.deepcopy(net), net)
    for model in (net, other):
        FSDP.set_state_dict_type(model, SHARDED)
    saved = net.state_dict()
    ranks = {shard.placement.rank() for shard in saved["head.weight"].metadata().shards_metadata}
    assert ranks == set(dist.get_process_group_ranks(groups[0]))
    other.load_state_dict(saved)
    assert_equal(other, net)


@on_ranks(4)
def test_the_ranks_of_one_replica_may_take_a_state_dict_alone() -> None:
    """The other ranks once waited for ever in the next backward."""
    mesh = init_device_mesh("cpu", (2, 2))
    groups = mesh.get_group(1), mesh.get_group(0)
    net, alone = wrapped(process_group=groups, sharding_strategy=HYBRID), make_net(0)
    FSDP.set_state_dict_type(net, SHARDED)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, alone)]
    for seed in range(2):
        if dist.get_rank() < 2:
            net.state_dict()
        net(batch(dist.get_rank(), seed)).square().mean().backward()
        losses = [alone(batch(rank, seed)).square().mean() for rank in range(4)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(alone.named_parameters())
    for name, value in values(f, net).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_shards_keep_negative_zeros_and_nans() -> None:
    net, other = wrapped(), wrapped(seed=3)
    with FSDP.summon_full_params(net), torch.no_grad():
        net.head.bias.copy_(torch.tensor([-0.0, torch.nan, torch.inf, 0.0]))
    for model in (net, other):
        FSDP.set_state_dict_type(model, SHARDED)
    other.load_state_dict(net.state_dict())
    with FSDP.summon_full_params(other):
        bits = other.head.bias.detach().clone().view(torch.int64)
    assert torch.equal(
        bits, torch.tensor([-0.0, torch.nan, torch.inf, 0.0]).double().view(torch.int64)
    )


@on_ranks(2)
def test_shards_on_other_ranks_are_refused() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    net = wrapped()
    FSDP.set_state_dict_type(net, SHARDED)
    saved = net.state_dict()
    other = wrapped(process_group=alone)
    with pytest.raises(ValueError, match=r"expected a ShardedTensor of ranks \[0\]"):
        other.load_state_dict(saved)


@on_ranks(2)
def test_optimizers_with_parameters_in_another_order_on_each_rank() -> None:
    net = wrapped()
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters[::-1] if dist.get_rank() else parameters, lr=0.01)
    net(batch(0, 0)).sum().backward()
    optimizer.step()
    before = {p: s["exp_avg"].to_local().clone() for p, s in optimizer.state.items()}
    optimizer.state["k"] = torch.tensor([3])  # type: ignore[index]  # of no parameter, as in MADGRAD
    for kind in (f.StateDictType.FULL_STATE_DICT, SHARDED):
        with FSDP.state_dict_type(net, kind):
            saved = FSDP.optim_state_dict(net, optimizer)
            del optimizer.state["k"]  # type: ignore[arg-type]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(net, optimizer, saved))
        for parameter, average in before.items():
            assert torch.equal(optimizer.state[parameter]["exp_avg"].to_local(), average)
        assert optimizer.state["k"].tolist() == [3]  # type: ignore[index]


@on_ranks(2)
def test_state_dict_of_an_optimizer_is_local() -> None:
    net, other = wrapped(), wrapped()
    first, second = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (net, other))
    net(batch(0, 0)).sum().backward()
    first.step()
    first.state["k"] = torch.tensor([3])  # type: ignore[index]  # of no parameter, as in MADGRAD
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    states = torch.load(saved)
    assert type(states["state"][0]["exp_avg"]) is torch.Tensor
    assert states["state"][0]["exp_avg"].shape == next(net.parameters()).to_local().shape
    second.load_state_dict(states)
    assert second.state["k"].tolist() == [3]  # type: ignore[index]
    other.load_state_dict(net.state_dict())
    for model, optimizer in ((net, first), (other, second)):
        optimizer.zero_grad()
        model(batch(1, 0)).sum().backward()
        optimizer.step()
    assert_equal(other, net)


@on_ranks(2)
def test_states_that_a_rank_lacks_are_refused() -> None:
    net = wrapped()
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters[: len(parameters) - dist.get_rank()])
    net(batch(0, 0)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"rank 1 has none of head\.bias"):
        FSDP.full_optim_state_dict(net, optimizer)


def test_ignored_modules_stay_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = FSDP(net, device_id=torch.device("cpu"), ignored_modules=[net[0]])
    assert [p.device.type for p in model.parameters()] == ["meta"] * 2 + ["cpu"] * 2


@pytest.mark.parametrize("kind", [f.StateDictType.FULL_STATE_DICT, SHARDED])
def test_buffers_are_saved_in_the_dtype_of_the_model(kind: f.StateDictType) -> None:
    half = f.MixedPrecision(buffer_dtype=torch.float16)
    net = nn.ModuleList([nn.BatchNorm1d(2) for _ in range(3)])
    model = FSDP(
        nn.Sequential(FSDP(net[0], mixed_precision=half), net[1], net[2]),
        mixed_precision=half,
        ignored_modules=[net[2]],
    )
    with FSDP.state_dict_type(model, kind):
        saved = model.state_dict()
    assert {saved[f"{i}.running_mean"].dtype for i in range(3)} == {torch.float32}
    in_use = [norm.running_mean.dtype for norm in net]
    assert in_use == [torch.float16, torch.float16, torch.float32]


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([3.0]))

    def forward(self) -> torch.Tensor:
        return self.value


@on_ranks(2)
def test_a_module_that_returns_its_parameter() -> None:
    net = FSDP(Constant())
    for step in range(1, 3):
        net().square().sum().backward()
        assert net.value.grad.full_tensor() == 6.0 * step


@on_ranks(2)
def test_a_module_that_is_wrapped_again() -> None:
    net = make_net(0)
    first = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}))
    first(batch(0, 0)).sum().backward()
    again = FSDP(net)
    assert torch.equal(again(batch(1, 0)), first(batch(1, 0)))


def test_states_without_groups() -> None:
    net = wrapped()
    optimizer = torch.optim.Adam(net.parameters())
    net(batch(0, 0)).sum().backward()
    optimizer.step()
    states = {"state": optimizer.state_dict()["state"]}
    saved = FSDP.optim_state_dict(net, optimizer, states)
    assert list(saved) == ["state"]
    assert list(FSDP.optim_state_dict_to_load(net, optimizer, saved)) == ["state"]


@on_ranks(2)
def test_states_with_empty_groups() -> None:
    net = wrapped()

    def optimizer_of(*rates: float) -> torch.optim.Optimizer:
        empty, full, last = ({"params": [], "lr": rate} for rate in rates)
        return torch.optim.Adam([empty, {**full, "params": [*net.parameters()]}, last])

    optimizer, other = optimizer_of(0.5, 0.25, 0.125), optimizer_of(0.1, 0.1, 0.1)
    net(batch(0, 0)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(net, optimizer)
    other.load_state_dict(FSDP.optim_state_dict_to_load(net, other, saved))
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.25, 0.125]
    assert len(other.state) == len(optimizer.state)
    saved["param_groups"].pop()
    with pytest.raises(PlanError, match="an empty group: expected in a parameter group"):
        FSDP.optim_state_dict_to_load(net, other, saved)


def test_types_of_state_dicts_are_deprecated() -> None:
    with pytest.warns(FutureWarning, match=r"FSDP.state_dict_type\(\) and .* being deprecated"):
        FSDP.set_state_dict_type(wrapped(), SHARDED)


def test_optim_input_is_deprecated() -> None:
    net = wrapped()
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.warns(FutureWarning, match="optim_input"):
        FSDP.full_optim_state_dict(net, optimizer, list(net.parameters()))


@on_ranks(2)
def test_local_state_dicts_of_a_mesh_are_refused() -> None:
    net = wrapped(device_mesh=init_device_mesh("cpu", (2,)))
    FSDP.set_state_dict_type(net, LOCAL)
    with pytest.raises(RuntimeError, match="LOCAL_STATE_DICT"):
        net.state_dict()


def test_config_of_another_type_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
        FSDP.set_state_dict_type(wrapped(), SHARDED, f.FullStateDictConfig())


def test_apply_inside_summon_is_refused() -> None:
    net = wrapped()
    with (
        FSDP.summon_full_params(net),
        pytest.raises(ValueError, match="expected to be in states"),
    ):
        net.apply(lambda _: None)


@pytest.mark.parametrize(
    "flags",
    [{"rank0_only": True}, {"offload_to_cpu": True, "with_grads": True}],
)
def test_flags_of_summon_that_are_refused(flags: dict[str, bool]) -> None:
    with (
        pytest.raises(NotImplementedError, match="is not supported"),
        FSDP.summon_full_params(wrapped(), **flags),
    ):
        pass


def test_summon_in_a_step_is_refused() -> None:
    net = wrapped()

    def summon(_: torch.Tensor) -> None:
        with FSDP.summon_full_params(net):
            pass

    output = net(batch(0, 0))
    output.register_hook(summon)
    with pytest.raises(AssertionError, match="forward/backward"):
        output.sum().backward()


@on_ranks(2)
def test_a_parameter_of_another_shape_is_refused() -> None:
    net = wrapped()
    net.module.head.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="Cannot writeback"), FSDP.summon_full_params(net):
        pass


@on_ranks(2)
@pytest.mark.parametrize("strategy", [HYBRID, f.ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_strategies_need_groups(strategy: f.ShardingStrategy) -> None:
    with pytest.raises(ValueError, match="process group or device_mesh"):
        FSDP(make_net(), sharding_strategy=strategy)
    with pytest.raises(ValueError, match="Expected process_group to be passed in"):
        wrapped(sharding_strategy=strategy, process_group=dist.group.WORLD)
    assert wrapped(sharding_strategy=strategy)._inter_node_pg.size() == 1


@on_ranks(2)
def test_a_single_rank_causes_a_warning() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.warns(UserWarning, match=r"NO_SHARD.* since the world size is 1"):
        net = wrapped(process_group=alone)
    assert net.sharding_strategy is f.ShardingStrategy.NO_SHARD


def test_loading_reports_the_keys_of_the_module() -> None:
    net = wrapped()
    states = net.state_dict() | {"blocks.0.other": torch.zeros(1)}
    del states["blocks.0.norm.weight"]
    missing, unexpected = net.load_state_dict(states, strict=False)
    assert (missing, unexpected) == (["blocks.0.norm.weight"], ["blocks.0.other"])


def test_a_container_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match="do not implement forward"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_module_on_the_cpu_of_an_accelerator_machine_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match="passed-in `module` is on CPU.* pass device_id"):
        FSDP(nn.Linear(2, 2))
    with warnings.catch_warnings(action="error"):
        FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"))
