"""The collective divides sums if that gives the same bits."""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.models import Block, Stack
from tests.ranks import on_ranks
from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Simulation

RANKS = 4


def reductions(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[list[str], list[int]]:
    """Return the operations that one backward launches, and the bits of the gradients."""
    simulation = Simulation(num_devices=2)
    with simulated(simulation):
        torch.manual_seed(0)
        model = Stack(depth=1).to(dtype)
        policy = sw.MixedPrecisionPolicy(reduce_dtype=options.pop("reduce_dtype", None))
        only_sums, factor = options.pop("only_sums", False), options.pop("factor", None)
        sharded = sw.fully_shard(model.to(DEVICE), units=Block, mp_policy=policy, **options)
        for unit in units_of(sharded):
            unit.set_force_sum_reduction_for_comms(only_sums)
            if factor is not None:
                unit.set_gradient_divide_factor(factor)
        batch = torch.randn(3, 6, dtype=dtype).to(DEVICE)
        torch.autograd.backward(sharded(batch).square().mean())
        grads: Any = [parameter.grad for parameter in sharded.parameters()]
        bits = [hash(tuple(one.to_local().float().cpu().tolist())) for one in grads]
    launched = [one.operation for one in simulation.collectives]
    return [name for name in launched if "reduce" in name and not name.endswith("max")], bits


def units_of(model: nn.Module) -> list[sw.FSDPModule]:
    return [module for module in model.modules() if isinstance(module, sw.FSDPModule)]


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"reduce_scatter avg"}),
        (
            {"strategy": "hsdp", "sharding_factor": 2},
            {"reduce_scatter sum", "all_reduce premul_sum"},
        ),
        ({"factor": 2.0}, {"reduce_scatter premul_sum"}),
        ({"dtype": torch.float32, "reduce_dtype": torch.float16}, {"reduce_scatter sum"}),
        *(
            pytest.param(*row, marks=pytest.mark.thorough)
            for row in (
                ({"strategy": "ddp"}, {"all_reduce avg"}),
                ({"factor": 3.0}, {"reduce_scatter sum"}),
                (
                    {"dtype": torch.float32, "reduce_dtype": torch.bfloat16},
                    {"reduce_scatter avg"},
                ),
            )
        ),
    ],
)
def test_a_collective_divides_and_gives_the_bits_of_a_division_after_it(
    options: dict[str, Any], expected: set[str]
) -> None:
    launched, bits = reductions(**options)
    assert set(launched) == expected
    by_sums, same_bits = reductions(**options, only_sums=True)
    assert not {name for name in by_sums if not name.endswith(" sum")}
    assert len(by_sums) == len(launched)
    assert bits == same_bits


@on_ranks(3)
def test_three_ranks_divide_after_the_sum() -> None:
    launched, _ = reductions()
    assert set(launched) == {"reduce_scatter sum"}


def gradients(strategy: str, *, carries: bool) -> list[float]:
    """Those of two micro-batches; the second may carry what the first has summed over rows."""
    with simulated(Simulation(num_devices=2)):
        torch.manual_seed(0)
        options: dict[str, Any] = {"sharding_factor": 2} if strategy == "hsdp" else {}
        model = Stack(depth=1).double().to(DEVICE)
        sharded: Any = sw.fully_shard(model, units=Block, strategy=strategy, **options)
        for is_last in (False, True):
            sharded.set_requires_all_reduce(is_last or not carries)
            batch = torch.randn(3, 6, dtype=torch.float64).to(DEVICE)
            torch.autograd.backward(sharded(batch).square().mean())
        found: Any = [parameter.grad for parameter in sharded.parameters()]
        return [x for one in found for x in one.to_local().cpu().tolist()]


@on_ranks()
@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp", 2), ("hsdp", 4)])
def test_sums_over_rows_that_are_carried_are_divided_once(strategy: str) -> None:
    expected = gradients(strategy, carries=False)
    assert gradients(strategy, carries=True) == pytest.approx(expected, rel=1e-10)
