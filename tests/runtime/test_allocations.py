"""No allocator call after the second step but for gradients: the pool has what else a step takes.

What whole gradients take is there in backward alone, for then activations go.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.plan.strategy import STRATEGIES, Strategy
from shardwise.runtime.memory import Pool
from tests.ranks import on_ranks
from tests.runtime.one_process import runtime_of, world_size
from tests.runtime.towers import SHAPES

TWO = 2
PRESETS = {strategy.name: strategy for strategy in STRATEGIES.values()}


@on_ranks(2, thorough=[4], deadline=60.0)
def test_nothing_is_allocated_after_the_second_step(world_size: int) -> None:
    names = tuple(SHAPES) if world_size == TWO else ("uneven",)
    for preset in PRESETS.values():
        for name in names:
            _train(name, preset, settled=2)
        _train("uneven", preset, settled=2, mp_policy=sw.MixedPrecisionPolicy(torch.bfloat16))
        _train("uneven", preset, settled=2, offload_policy=sw.CPUOffloadPolicy())
        _train("uneven", preset, settled=4, turns=2)


def _train(name: str, preset: Strategy, *, settled: int, turns: int = 1, **options: Any) -> None:
    """With more than one turn a step accumulates over so many, and an evaluation follows it."""
    torch.manual_seed(0)
    if preset.num_axes > 1:
        sizes = (2, world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = SHAPES[name].build()
    sw.fully_shard(model, units=SHAPES[name].units, strategy=preset, **options)
    pools = runtime_of(model).pools
    for step in range(1, 9):
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
    assert pools.gathered.allocated_bytes == pools.gradients.held_bytes == 0
    assert pools.outer_gradients.held_bytes == 0


@dataclass(frozen=True)
class _Allocated:
    """Bytes of each block of memory that pools took from their allocators."""

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
