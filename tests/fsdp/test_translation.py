"""The plans that FSDP's options are translated to, and options that are refused."""

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.api as torch_api
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwise as sw
import shardwise.fsdp as f
from shardwise.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from shardwise.plan.offload import as_offload_policy
from shardwise.plan.plan import Plan
from shardwise.plan.precision import as_precision_policy
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import EventKind
from tests.fsdp.models import Block, batch, make_net
from tests.ranks import on_ranks

FSDP = f.FullyShardedDataParallel
NO_MODULE: Any = 3


def wrapped(**options: Any) -> Any:
    return FSDP(make_net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def plan_of(model: nn.Module) -> Plan:
    return runtime_of_root(model).plan


@pytest.mark.parametrize(
    ("backward", "forward", "prefetch"),
    [(f.BackwardPrefetch.BACKWARD_PRE, False, 1), (None, True, 1), (None, False, 0)],
)
def test_prefetch_options(backward: Any, forward: bool, prefetch: int) -> None:
    model = wrapped(backward_prefetch=backward, forward_prefetch=forward)
    assert plan_of(model.module).prefetch == prefetch


@pytest.mark.parametrize(
    ("strategy", "row", "reshards"),
    [
        ("FULL_SHARD", "fsdp", True),
        ("SHARD_GRAD_OP", "fsdp", False),
        ("NO_SHARD", "ddp", False),
        ("HYBRID_SHARD", "hsdp", True),
        ("_HYBRID_SHARD_ZERO2", "hsdp", False),
    ],
)
def test_sharding_strategies(strategy: str, row: str, reshards: bool) -> None:
    plan = plan_of(wrapped(sharding_strategy=f.ShardingStrategy[strategy]).module)
    assert plan.strategy.name == row
    assert [unit.reshard for unit in plan.units] == [False, *[reshards] * 2]


@pytest.mark.parametrize("strategy", torch_fsdp.ShardingStrategy)
def test_torch_sharding_strategy(strategy: torch_fsdp.ShardingStrategy) -> None:
    expected = plan_of(wrapped(sharding_strategy=f.ShardingStrategy[strategy.name]).module)
    plan = plan_of(wrapped(sharding_strategy=strategy).module)
    assert plan.strategy == expected.strategy
    assert [unit.reshard for unit in plan.units] == [unit.reshard for unit in expected.units]


@pytest.mark.parametrize("offload", [False, True])
def test_torch_cpu_offload(offload: bool) -> None:
    plan = plan_of(wrapped(cpu_offload=torch_fsdp.CPUOffload(offload)).module)
    assert [unit.offload is not None for unit in plan.units] == [offload] * 3


@pytest.mark.parametrize("name", torch_fsdp.__all__)
def test_option_classes_are_torch_ones(name: str) -> None:
    ours, theirs = getattr(f, name), getattr(torch_fsdp, name)
    has_engine = name in (
        *("FSDPModule", "FullyShardedDataParallel"),
        *("GradientReductionHandle", "UnshardHandle"),
    )
    if has_engine or not isinstance(theirs, type):
        assert ours is not theirs
    else:
        assert issubclass(ours, theirs)


@pytest.mark.parametrize("submodule", ["api", "fully_sharded_data_parallel", "wrap"])
def test_submodules_have_the_names_of_torch(submodule: str) -> None:
    """Some programs import options from the submodules."""
    theirs = importlib.import_module(f"torch.distributed.fsdp.{submodule}")
    ours = importlib.import_module(f"shardwise.fsdp.{submodule}")
    options = torch_api.__all__ if submodule == "fully_sharded_data_parallel" else ()
    assert [name for name in (*theirs.__all__, *options) if not hasattr(ours, name)] == []


def test_torch_wrap_policies() -> None:
    policies: list[Any] = [
        torch_wrap.ModuleWrapPolicy({Block}),
        torch_wrap.CustomPolicy(lambda module: isinstance(module, Block)),
        torch_wrap.CustomPolicy(
            lambda module: {"forward_prefetch": True} if isinstance(module, Block) else False
        ),
    ]
    for policy in policies:
        model = FSDP(make_net(), auto_wrap_policy=policy)
        assert len(FSDP.fsdp_modules(model)) == 3


def test_a_module_at_two_places_is_wrapped_once_as_in_fsdp1() -> None:
    shared = nn.Linear(4, 4)
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert len(FSDP.fsdp_modules(model)) == 2


def _materialize(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Block})])
def test_ignored_parameters_stay_ignored_when_they_get_storage(policy: Any) -> None:
    with torch.device("meta"):
        net = make_net()
    names = {"embed.bias", "blocks.1.up.weight"}
    model: Any = FSDP(
        net,
        auto_wrap_policy=policy,
        ignored_states=[net.get_parameter(name) for name in names],
        param_init_fn=_materialize,
    )
    assert {name for name, p in model.named_parameters() if type(p) is nn.Parameter} == names


def test_param_init_fn_is_called_for_modules_without_parameters() -> None:
    seen = []

    def initialize(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Sequential):
            module.to_empty(device="cpu")
            for parameter in module.parameters():
                nn.init.constant_(parameter, 3.0)

    with torch.device("meta"):
        net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh(), nn.Linear(2, 1))
    model: Any = FSDP(net, param_init_fn=initialize)
    assert seen == ["Sequential", "Sequential", "Tanh", "Linear", "Linear"]  # FSDP1's order
    for parameter in model.parameters():
        assert torch.all(parameter.to_local() == 3.0)


def test_custom_policy_as_units() -> None:
    policy = CustomPolicy(lambda module: isinstance(module, Block))
    assert len(plan_of(sw.fully_shard(make_net(), units=policy)).units) == 3


@pytest.mark.parametrize(
    ("given", "parameters"),
    [({"offload_params": True}, True), ({"offload_optimizer": True}, False)],
)
def test_cpu_offload(given: dict[str, bool], parameters: bool) -> None:
    plan = plan_of(wrapped(cpu_offload=f.CPUOffload(**given)).module)
    assert {unit.offload for unit in plan.units} == {sw.CPUOffloadPolicy(parameters=parameters)}


@on_ranks(2)
def test_no_sync_reduces_nothing() -> None:
    model = wrapped()
    for is_last in (False, True):
        if is_last:
            model(batch(0, 0)).sum().backward()
        else:
            with model.no_sync():
                model(batch(0, 0)).sum().backward()
        kinds = {event.kind for event in sw.ledger(model.module).events()}
        assert (EventKind.REDUCE in kinds) == is_last


@on_ranks(2)
def test_optimizer_states_are_loaded_only_if_load_directly() -> None:
    model = wrapped()
    config = f.FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, f.StateDictType.FULL_STATE_DICT, optim_state_dict_config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    states = FSDP.optim_state_dict(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    FSDP.optim_state_dict_to_load(model, other, states)
    assert not other.state
    FSDP.optim_state_dict_to_load(model, other, states, load_directly=True)
    assert len(other.state) == len(optimizer.state)


@on_ranks(2)
def test_an_outer_wrapper_may_cut_parameters_differently() -> None:
    torch.manual_seed(0)
    inner: Any = FSDP(nn.Linear(5, 3))
    expected = {name: p.full_tensor() for name, p in inner.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    model: Any = FSDP(inner, device_mesh=mesh)
    for name, parameter in model.named_parameters():
        assert parameter.placements == (Shard(0),)
        assert torch.equal(parameter.full_tensor(), expected[name])
    model(torch.ones(2, 5)).sum().backward()


def test_fully_shard_is_one_function() -> None:
    assert inspect.unwrap(f.fully_shard) is sw.fully_shard
    theirs = inspect.signature(torch_fsdp.fully_shard).parameters
    assert set(theirs) <= set(inspect.signature(sw.fully_shard).parameters)


class StandIn:
    """An object with only a size and a rank, which programs pass to inspect wrapping."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def test_models_are_built_without_a_job() -> None:
    group: Any = StandIn()
    model = FSDP(nn.Linear(4, 2), group)
    assert (model.rank, model.world_size) == (1, 2)
    assert model.process_group is group
    assert [tuple(p.shape) for p in model.params] == [(2, 4), (2,)]


@pytest.mark.parametrize("cast_forward_inputs", [False, True])
def test_torch_policies(cast_forward_inputs: bool) -> None:
    given: dict[str, Any] = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "output_dtype": torch.float64,
        "cast_forward_inputs": cast_forward_inputs,
    }
    expected = sw.MixedPrecisionPolicy(**given, master_dtype="keep")
    assert as_precision_policy(torch_fsdp.MixedPrecisionPolicy(**given)) == expected
    assert as_offload_policy(torch_fsdp.CPUOffloadPolicy(False)) == sw.CPUOffloadPolicy(False)
    assert as_offload_policy(torch_fsdp.OffloadPolicy()) == sw.OffloadPolicy()


def test_fully_shard_of_the_drop_in_keeps_dtypes() -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16())

    kept = [p.dtype for p in f.fully_shard(mixed()).parameters()]
    assert kept == [torch.float16] * 2 + [torch.bfloat16] * 2
    assert {p.dtype for p in sw.fully_shard(mixed()).parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: wrapped().blocks[0].no_sync().__enter__(),
            "no_sync.. should only be called on the root",
        ),
        (lambda: wrapped().register_comm_hook(None, 3), "expected a callable hook, got 3"),
        (lambda: f.fully_shard({nn.Linear(2, 2)}), "takes a torch.nn.Module .*, got set"),  # type: ignore[type-var]
        (lambda: f.fully_shard([nn.Linear(2, 2), NO_MODULE]), "takes a torch.nn.M.*, got int"),
        (
            lambda: sw.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Shard(2)),
            r"shard_placement_fn: weight \(2, 2\): expected None or Shard of one of its dims",
        ),
        (lambda: sw.fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16), "mp_policy: expected"),  # type: ignore[arg-type]
        (lambda: sw.fully_shard(nn.Linear(2, 2), offload_policy=True), "offload_policy: expected"),  # type: ignore[arg-type]
        (
            lambda: f.fully_shard(make_net()).set_custom_all_gather(print),  # type: ignore[operator]
            "set_custom_all_gather is not supported",
        ),
        (
            lambda: f.fully_shard(make_net()).set_keep_unsharded_storage(True),  # type: ignore[operator]
            r"set_keep_unsharded_storage\(True\) is not supported, .*set_reshard_after_forward",
        ),
    ],
)
def test_unsupported_options_are_refused(call: Any, message: str) -> None:
    with pytest.raises(sw.PlanError, match=message):
        call()
