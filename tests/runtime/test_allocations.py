"""After the second step only gradients are allocated, and addresses are the same in each step.

Memory for whole gradients exists only in backward, when activations are freed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.plan.strategy import STRATEGIES, Strategy
from shardwise.runtime.memory import Pool
from tests.covering import covered_first
from tests.ranks import on_ranks
from tests.runtime.one_process import runtime_of, world_size
from tests.runtime.towers import SHAPES
from tests.versions import needs_swap

PRESETS = {strategy.name: strategy for strategy in STRATEGIES.values()}


VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{name} layers": {"name": name} for name in SHAPES},
    "bfloat16": {"mp_policy": sw.MixedPrecisionPolicy(torch.bfloat16)},
    "offload": {"offload_policy": sw.CPUOffloadPolicy()},
    "accumulation": {"settled": 4, "turns": 2},
}


@needs_swap
@on_ranks()
@pytest.mark.parametrize(
    ("preset", "variant", "world_size"),
    [
        *covered_first((preset, variant, 2) for preset, variant in product(PRESETS, VARIANTS)),
        *(pytest.param(p, "uneven layers", 4, marks=pytest.mark.thorough) for p in PRESETS),
    ],
)
def test_nothing_is_allocated_after_the_second_step(preset: str, variant: str) -> None:
    _train(PRESETS[preset], **VARIANTS[variant])


def _train(
    preset: Strategy, name: str = "uneven", *, settled: int = 2, turns: int = 1, **options: Any
) -> None:
    """With several turns, a step accumulates over them and an evaluation follows it."""
    torch.manual_seed(0)
    if preset.num_axes > 1:
        sizes = (2, world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = SHAPES[name].build()
    sw.fully_shard(model, units=SHAPES[name].units, strategy=preset, **options)
    pools = runtime_of(model).pools
    addresses = _watch_addresses(model)
    before_step: list[int] = []
    for step in range(1, 7):
        for _ in range(turns):
            with _counted() as forward:
                loss = model(torch.ones(1, 16)).mean()
            before = pools.gathered.held_bytes
            with _counted() as backward:
                loss.backward()
            what = f"{name}, {preset.name}, {turns} turns, step {step}: {forward}, {backward}"
            if step > settled:
                assert forward == _Allocated([], []), what
                assert not backward.to_keep, what
                assert pools.gathered.held_bytes == before, what
                once = pools.gradients.peak_bytes if name == "even" else math.inf
                assert sum(backward.to_free) <= once, what
        with _counted() as evaluation, torch.no_grad():
            _ = model(torch.ones(1, 16)) if turns > 1 else None
        assert step <= settled or evaluation == _Allocated([], []), f"{what}: {evaluation}"
        model.zero_grad()
        assert step <= settled or addresses == before_step, f"{what}: gathered elsewhere"
        before_step, addresses[:] = list(addresses), []
    assert pools.gathered.allocated_bytes == pools.gradients.held_bytes == 0
    assert pools.enclosing_gradients.held_bytes == 0


def _watch_addresses(model: nn.Module) -> list[int]:
    """Return a list to which the addresses of parameters are added when modules use them."""
    addresses: list[int] = []

    def record(module: nn.Module) -> None:
        addresses.extend(parameter.data_ptr() for parameter in module.parameters(recurse=False))

    def in_forward(module: nn.Module, _: object, output: Tensor) -> None:
        record(module)
        if output.requires_grad:
            output.register_hook(lambda _: record(module))  # type: ignore[no-untyped-call]

    for module in model.modules():
        module.register_forward_hook(in_forward)
    return addresses


@dataclass(frozen=True)
class _Allocated:
    """The bytes of each block that pools took from their allocators."""

    to_keep: list[int]
    to_free: list[int]  # when backward ends


@contextmanager
def _counted() -> Iterator[_Allocated]:
    allocated = _Allocated([], [])
    allocate = Pool._new_block

    def count(pool: Pool, num_bytes: int) -> torch.UntypedStorage:
        (allocated.to_keep if pool._keep else allocated.to_free).append(num_bytes)
        return allocate(pool, num_bytes)

    with mock.patch.object(Pool, "_new_block", count):
        yield allocated
