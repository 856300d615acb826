"""Sharding thousands of small parameters takes linear time."""

import sys
from collections.abc import Callable
from functools import partial

from torch import nn

import shardwise as sw
from tests.ranks import on_ranks

LARGE, SMALL = 80, 10  # layers
CALLS_PER_PARAMETER = 1500  # measured: 500 on one rank


@on_ranks(2, thorough=(1,))
def test_sharding_takes_linear_time() -> None:
    """Calls are counted because time depends on the machine."""
    for units in (None, nn.Linear):
        small, large = (
            _num_calls(partial(sw.fully_shard, _model(size), units=units))
            for size in (SMALL, LARGE)
        )
        assert large < CALLS_PER_PARAMETER * 4 * LARGE, f"{units}: {large:,}"
        assert large < 1.2 * small * LARGE / SMALL, f"{units}: {small:,}, {large:,}"


def _model(num_layers: int) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(num_layers))
    return nn.Sequential(*layers)


def _num_calls(function: Callable[[], object]) -> int:
    """Count the calls of Python and C functions that ``function`` makes on this thread."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
