"""What the engine allocates for itself is where it needs it, whatever the default device is.

On the meta device no value survives, so a tensor that is made there by mistake is noticed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.models import Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw
from tests.weights.memory_target import MemoryTarget


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _publish(model: nn.Module, x: Tensor, _path: Path) -> None:
    target, optimizer = MemoryTarget(), adamw(model.parameters())
    for _ in range(3):
        sw.publish(model, target)
        _step(model, optimizer, x)
    if torch.distributed.get_rank() == 0:
        assert target.manifest.base == 2, "the last version was sent as changes"


def _record(model: nn.Module, x: Tensor, path: Path) -> None:
    with sw.record(model, path):
        _step(model, adamw(model.parameters()), x)


def _join(model: nn.Module, x: Tensor, _path: Path) -> None:
    optimizer = adamw(model.parameters())
    with sw.join(model, optimizer):
        _step(model, optimizer, x)
        if torch.distributed.get_rank():
            _step(model, optimizer, x)


@pytest.mark.parametrize("use", [_publish, _record, _join])
@on_ranks(2)
def test_the_default_device_does_not_matter(
    use: Callable[[nn.Module, Tensor, Path], None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = sw.fully_shard(Stack(depth=2), units="auto")
    x = torch.randn(4, 6)
    with torch.device("meta"):
        use(model, x, tmp_path)
