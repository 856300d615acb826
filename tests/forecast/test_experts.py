"""Expert parallelism: experts are sharded over the ranks that have the same ones, as in the engine.

The model is the forecast's, with experts on their own mesh as in docs/parallelism.md. The engine
runs it without the exchange of tokens, so that a rank's experts compute for its own tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.bench.traffic import watch_traffic
from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.machines.machine import Group, Machine
from shardwise.forecast.models.model import Model
from shardwise.forecast.models.parallel import ModelPart
from shardwise.forecast.models.transformer import Shape
from shardwise.forecast.planned import OwnExperts, call_of, plan_of, sharding_of
from shardwise.forecast.search.scaling import scaling_curves
from shardwise.forecast.states import hidden_matrices
from shardwise.forecast.time.groups import groups_of, ranks_of_experts
from shardwise.forecast.time.owned import PlannedOwners
from shardwise.forecast.time.step import _head_rows
from shardwise.forecast.time.traffic import sent_bytes
from shardwise.plan.plan import Plan
from shardwise.runtime.module import runtime_of_root
from tests.forecast.owned_jobs import owned_jobs
from tests.ranks import on_ranks

HIDDEN, WIDTH, BLOCKS, TIME = 32, 64, 3, 8
SHAPE = Shape(arch="llama", layers=BLOCKS, hidden=HIDDEN, heads=4, vocab=48, ffn=WIDTH, experts=4)
EXPERTS = BLOCKS * 4 * 3 * HIDDEN * WIDTH  # parameters
BASE = Configuration(sequence=TIME, compute_dtype=torch.float32)
MODEL = Model("", SHAPE)


def configuration_of(strategy: str, expert: int, **sizes: Any) -> Configuration:
    return replace(BASE, strategy=strategy, expert=expert, **sizes)


# Of four ranks: those with the same experts are in a row, in a column, in both, or there is one.
ON_FOUR = [
    configuration_of("fsdp", 2, shard_size=4),
    configuration_of("fsdp", 4, shard_size=4),
    configuration_of("zero1", 2, shard_size=4),
    configuration_of("hsdp", 2, shard_size=2, replicas=2),
    configuration_of("hsdp", 4, shard_size=2, replicas=2),
    configuration_of("hfsdp", 2, shard_size=2, replicas=2),
    configuration_of("ddp", 2, replicas=4),
]
IDS = "{0.strategy}-{0.expert}".format


def meshes_of(configuration: Configuration) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of the model, and that of the ranks that have the experts of this one."""
    near, far = configuration.expert_axes
    sizes = {
        "rows": configuration.replicas // far,
        "far": far,
        "shards": configuration.shard_size // near,
        "near": near,
        "context": configuration.context,
    }
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    found = []
    for over, within in (
        (("rows", "far"), ("shards", "near", "context")),
        (("rows",), ("shards", "context")),
    ):
        if configuration.row.num_axes == 1:
            found.append(mesh[(*over, *within)]._flatten("_".join((*over, *within))))
            continue
        names = []
        for dims in (over, within):
            names.append("_".join(dims) if len(dims) > 1 else dims[0])
            if len(dims) > 1:
                mesh[dims]._flatten(names[-1])
        found.append(mesh[tuple(names)])
    return found[0], found[1]


@contextmanager
def without_exchange() -> Iterator[None]:
    with mock.patch.object(ModelPart, "exchange_tokens", lambda _, x: x):
        yield


def sharded(configuration: Configuration, *, in_loop: bool = False) -> nn.Module:
    """Shard the forecast's model as docs/parallelism.md says, or with a call for each block."""
    with without_exchange():
        module = MODEL.build(configuration).to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    dense, of_experts = meshes_of(configuration)
    options = sharding_of(configuration) | {"sharding_factor": None}
    experts: list[Any] = [one for one in module.modules() if isinstance(one, OwnExperts)]
    for together in [[one] for one in experts] if in_loop else [experts]:
        sw.fully_shard(together, mesh=of_experts, **options | {"units": None})
    for one in experts:
        one.set_gradient_divide_factor(dense.size())
    return sw.fully_shard(module, mesh=dense, **options)


def planned(configuration: Configuration) -> Plan:
    return plan_of(MODEL.build(configuration), configuration)


@on_ranks(4)
@pytest.mark.parametrize("configuration", ON_FOUR, ids=IDS)
def test_the_engine_has_the_plan_and_sends_its_bytes(configuration: Configuration) -> None:
    model = sharded(configuration)
    plan = runtime_of_root(model).plan
    assert plan == planned(configuration)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(1, TIME, dtype=torch.long)
    for _ in range(2):
        with watch_traffic(model) as traffic:
            model(tokens, tokens).backward()
            gradients = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    assert sw.ledger(model).sent_bytes() == sent_bytes(plan)
    assert traffic.sent_bytes == sent_bytes(plan).total
    memory = Forecaster(MODEL, machine_of("4xA100")).memory(configuration).memory
    shards: list[Any] = list(model.parameters())
    padding = plan.shard_bytes - sum(one.to_local().nbytes for one in shards)
    assert 0 <= padding < 0.01 * plan.shard_bytes
    first, last = memory.timeline[0], memory.timeline[-1]
    assert first.parameters == plan.shard_bytes
    held = sum(unit.gradient_bytes for unit in plan.units if unit.holds_gradients)
    assert last.gradients == sum(one.nbytes for one in gradients) + padding + held
    states = [state for of in optimizer.state.values() for state in of.values() if state.dim()]
    assert first.optimizer == sum(one.to_local().nbytes for one in states) + 2 * padding


@on_ranks(4)
def test_ranks_of_a_sequence_have_the_same_experts() -> None:
    for strategy, expert, sizes in (
        ("fsdp", 2, {"shard_size": 2}),
        ("hsdp", 2, {"replicas": 2}),
        ("ddp", 2, {"replicas": 2}),
    ):
        configuration = configuration_of(strategy, expert, context=2, **sizes)
        plan = runtime_of_root(sharded(configuration)).plan
        assert plan == planned(configuration)
        assert {unit.options.num_ranks for unit in plan.units if unit.has_own_ranks} == {2}


@on_ranks(4)
@pytest.mark.parametrize("configuration", ON_FOUR[:1] + ON_FOUR[3:], ids=IDS)
def test_owners_of_experts_are_among_the_ranks_that_have_them(
    configuration: Configuration,
) -> None:
    model = sharded(configuration)
    plan = runtime_of_root(model).plan
    for name, kind in (("muon", sw.optim.Muon), ("soap", sw.optim.SOAP)):
        optimizer: Any = kind(sw.optim.parameter_groups(model, matrices=["*.experts.*"]))
        found = [PlannedOwners(plan, name, 4, own_ranks) for own_ranks in (False, True)]
        jobs = [owned_jobs(one) for one in found]
        owners = optimizer.owners()
        for one, owned in zip(found, jobs, strict=True):
            names = [extent.parameter.name for _, extent in one.placed]
            assert tuple(owners[name] for name in names) == owned.owners
            assert any(".experts." in name for name in names) == one.own_ranks
        sent = [
            owned.sent_bytes(owned.batches(range(len(owned.jobs))), rank)
            for owned, rank in zip(jobs, own_numbers(configuration), strict=True)
        ]
        assert sent[0] + sent[1] == optimizer.sent_bytes()


@on_ranks(4)
def test_matrices_of_experts_that_a_loop_shards_are_balanced_together() -> None:
    optimizers: list[sw.optim.Muon] = []
    for in_loop in (False, True):
        model = sharded(ON_FOUR[0], in_loop=in_loop)
        groups = sw.optim.parameter_groups(model, matrices=["*.experts.*"])
        optimizers.append(sw.optim.Muon(groups))
    expected, found = optimizers
    assert found.owners() == expected.owners()
    assert found.sent_bytes() == expected.sent_bytes()


def own_numbers(configuration: Configuration) -> tuple[int, int]:
    """Return this rank's number among all, and among those with its experts."""
    near, far = configuration.expert_axes
    row, position = divmod(dist.get_rank(), configuration.shard_size)
    num_shards = configuration.shard_size // near
    return dist.get_rank(), row // far * num_shards + position // near


@pytest.mark.parametrize(
    ("configuration", "copies"),
    [
        (configuration_of("fsdp", 4, shard_size=8), (1, 1)),
        (configuration_of("fsdp", 4, shard_size=4, context=2), (1, 1)),
        (configuration_of("hsdp", 4, shard_size=4, replicas=2), (2, 2)),
        (configuration_of("hsdp", 4, shard_size=2, replicas=4), (4, 2)),
        (configuration_of("hsdp", 4, shard_size=2, replicas=2, context=2), (2, 1)),
        (configuration_of("hfsdp", 4, shard_size=4, replicas=2), (1, 1)),
        (configuration_of("ddp", 4, replicas=8), (8, 2)),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_eight_ranks_hold_all_copies_together(
    configuration: Configuration, copies: tuple[int, int], optimizer: str
) -> None:
    """Two have the same expert; ``copies`` are those of dense parameters, and of experts."""
    configuration = replace(configuration, optimizer=optimizer)
    whole, apart = (
        Forecaster(MODEL, machine_of("8xA100")).forecast(replace(configuration, expert=expert))
        for expert in (1, 4)
    )
    dense, first = MODEL.num_parameters - EXPERTS, apart.memory.timeline[0]
    expected = 4 * (dense * copies[0] + EXPERTS * copies[1]) / 8
    assert first.parameters == pytest.approx(expected, rel=0.01)
    if optimizer == "adamw":
        assert first.optimizer == pytest.approx(2 * expected, rel=0.01)
    else:  # AdamW's for the embedding, the head and norms
        outside = 4 * (2 * 48 + 2 * BLOCKS + 1) * HIDDEN * copies[0] / 8
        assert first.optimizer == pytest.approx(expected + outside, rel=0.01)
    most = [max(moment.gathered for moment in one.memory.timeline) for one in (whole, apart)]
    assert most[1] <= most[0]
    assert apart.step.model_flops == pytest.approx(whole.step.model_flops)


def test_states_of_owners_are_shared_by_the_ranks_that_have_the_matrices() -> None:
    """SOAP keeps two moments and, of a matrix of m x n, four squares of the sides."""
    configuration = replace(configuration_of("hsdp", 4, shard_size=4, replicas=2), optimizer="soap")
    found = [
        Forecaster(MODEL, machine_of("8xA100")).memory(replace(configuration, expert=expert))
        for expert in (1, 4)
    ]
    whole, apart = (one.memory.timeline[0].optimizer for one in found)
    each = 4 * (2 * HIDDEN * WIDTH + 2 * (HIDDEN**2 + WIDTH**2))
    total = 3 * BLOCKS * 4 * each  # of all experts
    assert whole - apart == pytest.approx(total / 8 - total / 4 / 2, abs=8)
    assert apart > total / 8


@pytest.mark.parametrize("per_node", [2, 4, 8])
@pytest.mark.parametrize(
    "configuration",
    [
        configuration_of("fsdp", 4, shard_size=16),
        configuration_of("fsdp", 4, shard_size=8, context=2),
        configuration_of("fsdp", 8, shard_size=8, context=4, tensor=2),
        configuration_of("hsdp", 2, shard_size=4, replicas=4),
        configuration_of("hsdp", 8, shard_size=4, replicas=4, context=2),
        configuration_of("hfsdp", 2, shard_size=4, replicas=4, context=2),
        configuration_of("ddp", 4, replicas=8, context=2),
        configuration_of("ddp", 4, shard_size=8, tensor=2),
    ],
)
def test_ranks_of_experts_are_as_far_apart_as_in_the_mesh(
    configuration: Configuration, per_node: int
) -> None:
    one, (near, far) = configuration, configuration.expert_axes
    places = list(product(*map(range, (one.replicas, one.shard_size, one.context, one.tensor))))

    def is_like_the_first(place: tuple[int, ...], *fixed: int) -> bool:
        return not any(place[dim] for dim in (*fixed, 3))

    same = [  # whose experts are those of the first rank
        number
        for number, place in enumerate(places)
        if is_like_the_first(place) and not place[0] % far and not place[1] % near
    ]
    row = [number for number in same if one.row.shards and not places[number][0]] or same[:1]
    column = [n for n in same if is_like_the_first(places[n], 1, 2)] if one.row.shards else same
    exchanging = [
        number
        for number, place in enumerate(places)
        if is_like_the_first(place, 2) and place[0] < far and place[1] < near
    ]
    model = Model("", replace(SHAPE, experts=8))
    plan = plan_of(model.build(configuration), configuration)
    unit = next(unit for unit in plan.units if unit.has_own_ranks)
    groups = groups_of(plan, unit, configuration)
    shards = same if plan.strategy.is_two_level else row
    for group, ranks in (
        (groups.world, same),
        (groups.all, shards),
        (groups.row, row),
        (groups.column, column),
        (ranks_of_experts(configuration), exchanging),
    ):
        assert group.size == len(ranks)
        assert group.in_node(per_node) == sum(rank < per_node for rank in ranks)
    assert groups.all.size == unit.options.world_size
    root = groups_of(plan, plan.units[0], configuration)
    assert root.world == Group(len(places) // one.tensor, one.tensor)


def test_experts_on_other_nodes_are_gathered_over_the_network() -> None:
    """Of 16 ranks with 16 experts in all, ranks with the same ones are on different nodes."""
    model = Model("", replace(SHAPE, hidden=1024, ffn=4096, experts=16))
    base = replace(BASE, shard_size=32)
    slow = machine_of("32xA100-40GB/8:100")
    fast = replace(slow, cluster=replace(slow.cluster, node_bandwidth=1e15))
    seconds = {}
    for expert, machine in product((8, 16), (slow, fast)):
        forecaster = Forecaster(model, machine)
        found = forecaster.forecast(replace(base, expert=expert)).step
        plan = forecaster.plan(replace(base, expert=expert))
        events = [
            event
            for event in found.replayed.events[0]
            if event.spans and plan.units[event.unit].has_own_ranks
        ]
        seconds[expert, machine is slow] = sum(
            ended - began for event in events for began, ended in event.spans
        )
    assert seconds[8, True] > 10 * seconds[8, False], "four nodes have a rank each"


def test_blocks_with_experts_are_blocks() -> None:
    """Their matrices have owners, are gathered in 8 bits, and are not the head."""
    one = replace(BASE, shard_size=4, compute_dtype=torch.bfloat16)
    several = replace(one, expert=2)
    whole, apart = planned(one), planned(several)
    names = [
        {
            extent.parameter.name
            for own in (False, True)
            for _, extent in hidden_matrices(p, own_ranks=own)
        }
        for p in (whole, apart)
    ]
    assert names[0] == names[1]
    assert _head_rows(whole) == _head_rows(apart) == 48
    for configuration, plan in ((one, whole), (several, apart)):
        narrow = planned(replace(configuration, float8="tensorwise", float8_gather=True))
        assert 2 * sum(u.gathered_bytes for u in narrow.units[1:]) == sum(
            u.gathered_bytes for u in plan.units[1:]
        )
        assert narrow.units[0] == plan.units[0]


def test_without_blocks_experts_are_units_as_well() -> None:
    configuration = replace(BASE, shard_size=4, expert=2, units=None, optimizer="muon")
    forecaster = Forecaster(MODEL, machine_of("4xA100"))
    units = forecaster.plan(configuration).units
    assert [unit.has_own_ranks for unit in units] == [False, *[True] * BLOCKS]
    assert forecaster.forecast(configuration).memory.timeline[0].parameters == sum(
        unit.shard_bytes for unit in units
    )


def test_the_curve_gathers_the_largest_unit_over_its_ranks() -> None:
    forecaster = Forecaster(Model("", replace(SHAPE, ffn=1 << 14)), machine_of("8xA100"))
    configuration = replace(BASE, shard_size=8, expert=4)
    curve = scaling_curves(forecaster, configuration)[0]
    for point, gather in zip(curve.points, curve.gathers, strict=True):
        machine, ranks = Machine.of(point.cluster), point.cluster.num_devices
        assert gather.num_bytes == 4 * 3 * HIDDEN << 14, "of one expert"
        apart = Group(ranks // 4, 4)
        assert gather.seconds == machine.all_gather_seconds(gather.num_bytes, apart)


def test_the_curve_gathers_blocks_if_experts_need_no_gather() -> None:
    """Each rank of a node has other experts, so they are whole on it."""
    forecaster = Forecaster(Model("", replace(SHAPE, experts=8)), machine_of("8xA100"))
    configuration = replace(BASE, strategy="hsdp", shard_size=8, expert=8)
    hybrid = scaling_curves(forecaster, configuration)[1]
    dense = forecaster.plan(configuration).units[1]
    assert not dense.has_own_ranks
    assert {gather.num_bytes for gather in hybrid.gathers} == {dense.gathered_bytes}
    assert all(gather.seconds > 0 for gather in hybrid.gathers)


def test_the_curve_leaves_out_ranks_that_subgroups_do_not_divide() -> None:
    forecaster = Forecaster(Model("", replace(SHAPE, experts=8)), machine_of("8xA100"))
    configuration = replace(BASE, shard_size=64, expert=8, reshard_after_forward=8)
    curve = scaling_curves(forecaster, configuration)[0]
    assert min(point.cluster.num_devices for point in curve.points) == 64


@pytest.mark.parametrize("expert", [2, 4])
def test_compiled_blocks_save_the_same_activations(expert: int) -> None:
    forecaster = Forecaster(MODEL, machine_of("4xA100"))
    compiled = replace(BASE, shard_size=4, compiled=True, compute_dtype=torch.bfloat16)
    whole, apart = (
        next(
            moment.activations
            for moment in forecaster.memory(replace(compiled, expert=one)).memory.timeline
            if moment.label.startswith("backward")
        )
        for one in (1, expert)
    )
    assert apart == whole > 0


def test_reproducible_steps_and_plans_of_checkpoints_are_refused() -> None:
    forecaster = Forecaster(MODEL, machine_of("4xA100"))
    configuration = replace(BASE, shard_size=4, expert=2)
    message = r"layers\.0\.mlp\.experts has other ranks than the model"
    with pytest.raises(PlanError, match=f"reproducible=4: {message}"):
        forecaster.memory(replace(configuration, reproducible=4))
    for one in (configuration, configuration_of("ddp", 2, replicas=4)):
        with pytest.raises(PlanError, match=f"{message}; checkpoints can be planned only"):
            forecaster.checkpoint(one)


def test_the_call_says_that_experts_are_sharded_first() -> None:
    configuration = replace(BASE, shard_size=4, expert=2, context=2)
    assert "set_gradient_divide_factor(8)" in call_of(configuration)
    assert "expert" not in call_of(replace(configuration, expert=1))


def test_gradients_of_a_block_wait_from_the_end_of_its_first_segment() -> None:
    """Those of the embedding, which autograd holds meanwhile, are not taken off them."""
    model = Model("", replace(SHAPE, vocab=8192))
    forecaster = Forecaster(model, machine_of("4xA100"))
    configuration = replace(BASE, shard_size=4, expert=2)
    timeline = forecaster.memory(configuration).memory.timeline
    begun = [one for one in timeline if one.label == "backward layers.2"]
    unit = next(u for u in forecaster.plan(configuration).units if u.name == "layers.2")
    waiting = sum(4 * parameter.num_elements for parameter in unit.parameters)
    assert [after.communication - one.communication for one, after in pairwise(begun)] == [waiting]
