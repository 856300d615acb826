"""Traps: torch.compile around a sharded model."""

import copy

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import shardwise as sw
from tests.models import WIDTH
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_models, own_part


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


@on_ranks(2, deadline=120.0)
def test_a_compiled_model_breaks_at_its_units() -> None:
    reference = nn.Sequential(*(Block() for _ in range(3))).double()
    model = copy.deepcopy(reference)
    sw.fully_shard(model, units=Block)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    for step in range(2):
        x = torch.randn(8, WIDTH).double()
        compiled(own_part(x)).square().mean().backward()
        reference(x).square().mean().backward()
        assert_equal_models(model, reference, step)
    assert backend.frame_count <= len(model), "one graph for each block, none for the engine"
    assert backend.op_count == 5 * backend.frame_count, "norm, up, relu, down and the sum"
