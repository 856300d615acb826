"""The outer optimizer of replicas in one world."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.tensor.sharding import local_of
from tests.covering import covered_first
from tests.models import Block, Stack
from tests.ranks import on_ranks
from tests.replicas.diloco import Simulation, train

AVERAGE = partial(torch.optim.SGD, lr=1.0)


def two_replicas() -> DeviceMesh:
    return init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )


def replica_of(
    outer: sw.Outer, mesh: DeviceMesh, lr: float = 0.05, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, sw.OuterOptimizer]:
    torch.manual_seed(3)
    model = sw.fully_shard(Stack().double(), mesh=mesh["shard"], units=Block, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    group = mesh.get_group("replicate")
    return model, optimizer, sw.outer_optimizer(model, optimizer, outer, group=group)


def whole(parameters: list[Tensor]) -> list[Tensor]:
    return [p.full_tensor().detach() for p in parameters]  # type: ignore[attr-defined]


def shared_of(outer: sw.OuterOptimizer) -> list[Tensor]:
    return whole([state["anchor"] for state in outer.state.values()])


OUTER = {
    "diloco": sw.Outer(every=4, dtype="float64"),
    "streaming": sw.Outer(every=6, fragments=3, delay=2, mixing=0.5, dtype="float64"),
}


@on_ranks()
@pytest.mark.parametrize(("name", "world_size"), covered_first(product(OUTER, (2, 4))))
def test_replicas_equal_diloco_in_one_process(name: str) -> None:
    outer = OUTER[name]
    mesh = two_replicas()
    model, optimizer, handle = replica_of(outer, mesh)
    simulation = Simulation(
        outer, 0.05, partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    )
    positions = {id(p): index for index, p in enumerate(model.parameters())}
    members = [[positions[id(p)] for p in one.parameters] for one in handle.fragments]
    replica = mesh.get_local_rank("replicate")
    for step in range(14):
        train(model, optimizer, replica, range(step, step + 1))
        simulation.run(range(step, step + 1), members)
    own = whole(list(model.parameters()))
    for parameter, expected in zip(own, simulation.replicas[replica].parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)
    for parameter, expected in zip(shared_of(handle), simulation.shared, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)


@on_ranks(4, thorough=(2,))
def test_every_step_with_sgd_is_the_average_of_parameters() -> None:
    """Exactly equal, because the sums are exact in float32. Includes complex parameters."""
    mesh = two_replicas()
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.register_parameter("turned", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    expected = [torch.zeros_like(p) for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    sw.fully_shard(model, mesh=mesh["shard"], units=nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = sw.Outer(every=1, dtype="float32", optimizer=AVERAGE)
    sw.outer_optimizer(model, optimizer, outer, group=mesh.get_group("replicate"))
    replica = mesh.get_local_rank("replicate")
    for step in range(3):
        for index, p in enumerate(model.parameters()):
            factor = 1 + 2j if p.is_complex() else 1.0
            p.grad = torch.full_like(p, factor * (step + index + 3 * replica))
            expected[index] -= factor * 0.5 * (step + index + 1.5)
        optimizer.step()
        for found, value in zip(whole(list(model.parameters())), expected, strict=True):
            assert torch.equal(found, value)


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["int4", "int8", "bfloat16", "float32"])
def test_shared_parameters_are_the_same_bits_after_each_fragment(dtype: str) -> None:
    mesh = two_replicas()
    outer = sw.Outer(every=2, fragments=2, delay=1, mixing=0.25, dtype=dtype)
    model, optimizer, handle = replica_of(outer, mesh)
    first = shared_of(handle)
    for step in range(5):
        train(model, optimizer, mesh.get_local_rank("replicate"), range(step, step + 1))
        for shared in shared_of(handle):
            other = [torch.empty_like(shared) for _ in range(2)]
            dist.all_gather(other, shared, group=mesh.get_group("replicate"))
            assert torch.equal(*other)
    assert all(not torch.equal(*pair) for pair in zip(first, shared_of(handle), strict=True))


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size"), covered_first(product(("ddp", "zero2", "fsdp"), (2, 4)))
)
def test_planned_bytes_are_those_that_were_sent(strategy: str) -> None:
    mesh = two_replicas()
    outer = sw.Outer(every=4, fragments=2, dtype="bfloat16")
    model, optimizer, handle = replica_of(outer, mesh, strategy=strategy)
    for step in range(8):
        before = handle.sent_bytes
        train(model, optimizer, 0, range(step, step + 1))
        sent = handle.sent_bytes - before
        assert sent == handle.planned_bytes(step + 1) == sw.ledger(model).sent_bytes().outer
    assert sw.ledger(model).outer_bytes == handle.sent_bytes > 0


@on_ranks(4)
@pytest.mark.parametrize(
    "outer",
    [
        sw.Outer(every=2, fragments=2, dtype="float64"),
        # After three steps, the difference of the first fragment is in transit.
        sw.Outer(every=4, fragments=2, delay=2, mixing=0.25, dtype="float64"),
    ],
    ids=["between rounds", "during a round"],
)
def test_checkpoints_carry_the_shared_parameters_and_their_momentum(
    outer: sw.Outer, tmp_path: Path
) -> None:
    mesh = two_replicas()
    model, optimizer, handle = replica_of(outer, mesh)
    replica = mesh.get_local_rank("replicate")
    train(model, optimizer, replica, range(3))
    path = tmp_path / f"replica-{replica}"
    sw.save(path, model=model, optimizer=optimizer, outer=handle)
    dist.barrier()
    # Four replicas of one rank each; two of them load each checkpoint.
    torch.manual_seed(5)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    other, other_optimizer, other_handle = replica_of(outer, alone, lr=1.0)
    for p in other.parameters():  # so that everything differs
        local_of(p).data.fill_(7)
    other_replica = dist.get_rank() // 2
    sw.load(
        tmp_path / f"replica-{other_replica}",
        model=other,
        optimizer=other_optimizer,
        outer=other_handle,
    )
    assert other_handle.local_steps == 3
    train(model, optimizer, replica, range(3, 8))
    train(other, other_optimizer, other_replica, range(3, 8))
    for pair in zip(shared_of(handle), shared_of(other_handle), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
    # Its own parameters equal those of the replica whose checkpoint it has loaded.
    locals_ = whole(list(model.parameters()))
    expected: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(expected, locals_)
    for pair in zip(whole(list(other.parameters())), expected[2 * other_replica], strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)
    momenta = [state["momentum_buffer"] for state in other_handle.state.values()]
    assert all(type(one) is type(p) for one, p in zip(momenta, other.parameters(), strict=True))
    # The names are those of earlier checkpoints.
    names = {"anchor", "momentum_buffer"}
    assert all(names <= state.keys() <= names | {"sent"} for state in other_handle.state.values())
    assert {"local_steps", "rounds", "history", "lr"} <= other_handle.param_groups[0].keys()


@on_ranks(2)
@pytest.mark.parametrize(("dtype", "largest"), [("int4", 7), ("int8", 127)])
def test_what_rounding_takes_from_a_difference_is_in_the_next_ones(
    dtype: str, largest: int
) -> None:
    """So the sum of the differences that were sent stays near the true sum, however many they are.

    A rounding error r is at most (1 + r) / (2 * largest), with differences of at most 1.
    """
    mesh = two_replicas()
    generator = torch.Generator().manual_seed(4)
    differences = (
        2 * torch.rand(2, 90, dtype=torch.float64, generator=generator) - 1
    )  # [replicas, n]
    own = differences[mesh.get_local_rank("replicate")]
    bound = 1 / (2 * largest - 1)
    outer = sw.Outer(every=1, dtype=dtype, optimizer=AVERAGE)

    def errors_of(*, forgets: bool) -> list[float]:
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.zeros(90, dtype=torch.float64)))
        sw.fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle = sw.outer_optimizer(model, optimizer, outer, group=mesh.get_group("replicate"))
        errors = []
        for number in range(1, 41):
            local_of(model.weight).data.sub_(own)  # type: ignore[arg-type]
            optimizer.step()  # without gradients
            errors.append(float((shared_of(handle)[0] + number * differences.mean(0)).abs().max()))
            for state in handle.state.values() if forgets else ():
                state.pop("residual")
        return errors

    assert max(errors_of(forgets=False)) <= bound * (1 + 1e-6)  # scales are in single precision
    assert errors_of(forgets=True)[-1] > 10 * bound  # the same is lost each time


@on_ranks(2)
def test_checkpoints_carry_the_errors_of_rounding(tmp_path: Path) -> None:
    mesh = two_replicas()
    outer = sw.Outer(every=4, fragments=2, delay=1, mixing=0.25)
    replica = mesh.get_local_rank("replicate")
    model, optimizer, handle = replica_of(outer, mesh)
    train(model, optimizer, replica, range(6))
    path = tmp_path / f"replica-{replica}"
    sw.save(path, model=model, optimizer=optimizer, outer=handle)
    other, other_optimizer, other_handle = replica_of(outer, mesh, lr=1.0)
    sw.load(path, model=other, optimizer=other_optimizer, outer=other_handle)
    train(model, optimizer, replica, range(6, 11))
    train(other, other_optimizer, replica, range(6, 11))
    for pair in zip(shared_of(handle), shared_of(other_handle), strict=True):
        assert torch.equal(*pair)


def test_options_outside_their_ranges_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Outer\(dtype='int5'\): expected one of int4"):
        sw.Outer(dtype="int5")
    with pytest.raises(PlanError, match=r"Outer\(fragments=5\): expected an integer, 1 to 4"):
        sw.Outer(every=4, fragments=5)
    with pytest.raises(PlanError, match=r"Outer\(delay=4\)"):
        sw.Outer(every=4, delay=4)


def test_more_fragments_than_units_are_refused() -> None:
    model = sw.fully_shard(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(PlanError, match="the model has 1 units with trainable parameters"):
        sw.OuterOptimizer(model, optimizer, sw.Outer(fragments=2), None)
