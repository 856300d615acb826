"""Sharding thousands of small parameters takes linear time."""

from functools import partial

from torch import nn

import shardwise as sw
from tests.counting import num_calls
from tests.ranks import on_ranks

LARGE, SMALL = 80, 10  # layers
CALLS_PER_PARAMETER = 1500  # measured: 500 on one rank


@on_ranks(2, thorough=(1,))
def test_sharding_takes_linear_time() -> None:
    """Calls are counted because time depends on the machine."""
    for units in (None, nn.Linear):
        small, large = (
            num_calls(partial(sw.fully_shard, _model(size), units=units)) for size in (SMALL, LARGE)
        )
        assert large < CALLS_PER_PARAMETER * 4 * LARGE, f"{units}: {large:,}"
        assert large < 1.2 * small * LARGE / SMALL, f"{units}: {small:,}, {large:,}"


def _model(num_layers: int) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(num_layers))
    return nn.Sequential(*layers)
