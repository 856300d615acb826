"""The optimizers of pytorch_optimizer step shards as they step whole parameters, or are refused.

pytorch_optimizer is not a dependency of the tests: install it (``pip install pytorch_optimizer``,
release 4.1) to run this.
"""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.models import CASES, build
from tests.ranks import on_ranks
from tests.runtime.one_process import own_part

optimizers: Any = pytest.importorskip(
    "pytorch_optimizer", reason="pytorch_optimizer is not installed"
)
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

# They draw random numbers, multiply or transpose matrices, index, or write to factors of a state.
REFUSED = {
    "adalite", "alice", "conda", "dash", "demo", "emofact", "flashadamw", "kron", "lorarite",
    "nero", "rose", "sara", "scion", "scionlight", "shampoo", "sm3", "soap", "spam", "splus",
    "stablespam",
}  # fmt: skip
CASE = CASES["stack"]
STEPS = 4


@on_ranks(2, deadline=500)
def test_no_optimizer_gives_other_results_than_on_whole_parameters() -> None:
    ran, refused, different, num_equal = set(), set(), {}, 0
    for name in sorted(optimizers.get_supported_optimizers()):
        try:
            expected = _losses(name, build("stack"), is_sharded=False)
        except Exception:  # noqa: BLE001 - it needs more than parameters, or another package
            continue
        ran.add(name)
        try:
            found = _losses(name, sw.fully_shard(build("stack"), units=CASE.units), is_sharded=True)
        except (sw.ShardedTensorError, sw.PlanError):
            refused.add(name)
            continue
        num_equal += found == pytest.approx(expected, rel=1e-9)
        if found != pytest.approx(expected, rel=1e-9):
            different[name] = found, expected
    assert not different
    assert sorted(refused) == sorted(REFUSED & ran)
    assert num_equal == 91


def _losses(name: str, model: nn.Module, *, is_sharded: bool) -> list[float]:
    optimizer = optimizers.load_optimizer(name)(list(model.parameters()))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        whole = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        CASE.loss(model(own_part(whole) if is_sharded else whole)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            losses.append(CASE.loss(model(whole)).item())
    return losses
