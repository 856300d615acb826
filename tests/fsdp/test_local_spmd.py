"""Plain parameters with types of the package ``spmd_types``, as torchtitan makes by default."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw
import shardwise.fsdp
from shardwise.fsdp import DataParallelMeshDims
from tests.ranks import on_ranks
from tests.runtime.one_process import full

spmd: Any = pytest.importorskip("spmd_types", reason="spmd_types is not installed")

WIDTH, BATCH, STEPS = 6, 8, 3


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a group; its gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return gradients[0], None


class SameOnRanks(torch.autograd.Function):
    """The inverse: ``x``, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Block(nn.Module):
    """Computes with this rank's columns of ``up`` and rows of ``down``."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = None
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self.up.weight, DTensor)
        x = self._apply_on_ranks(SameOnRanks, x)
        x = self.down(self.up(x * self.scale).relu())
        return self.bias + self._apply_on_ranks(SumOverRanks, x)

    def _apply_on_ranks(self, function: Any, x: Tensor) -> Tensor:
        result: Tensor = x if self.group is None else function.apply(x, self.group)
        return result


def annotate(block: Block, mesh: DeviceMesh) -> None:
    """Leave this rank's part of each parameter, with its type on the mesh axis `model`."""
    block.group = mesh.get_group("model")
    rank, size = mesh.get_local_rank("model"), mesh.size(1)
    for linear, dim in ((block.up, 0), (block.down, 1)):
        part = linear.weight.detach().chunk(size, dim)[rank].contiguous()
        linear.weight = nn.Parameter(part)
    types = {"scale": spmd.R, "bias": spmd.I, "up.weight": spmd.S(0), "down.weight": spmd.S(1)}
    for name, parameter in block.named_parameters():
        spmd.assert_type(parameter, {block.group: types[name]})


def train(model: nn.Module, part: slice) -> list[Any]:
    """The gradients of each step, and the parameters after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator, results = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)[part]
        model(x).square().mean().backward()
        results.append([full(p.grad) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        results.append([full(p).detach().clone() for p in model.parameters()])
    return results


@on_ranks(4)
@pytest.mark.parametrize("on_meta", [False, True], ids=["values", "meta"])
def test_training_is_that_of_one_process(on_meta: bool) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block()).double()
    values = {name: value.clone() for name, value in reference.state_dict().items()}
    expected = train(reference, slice(None))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(Block(), Block()).double()
    for block in model:
        assert isinstance(block, Block)
        annotate(block, mesh)
    dims = DataParallelMeshDims(shard="data")
    for module in (*model, model):
        shardwise.fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    if on_meta:
        model.to_empty(device="cpu")
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    weight = model[0].bias
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0), Replicate())
    rank = mesh.get_local_rank("data")
    found = train(model, slice(rank * BATCH // 2, (rank + 1) * BATCH // 2))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@on_ranks(4)
def test_ties_hooks_and_optimizers_of_before_are_kept() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block()).double()
    copies = [copy.deepcopy(reference), reference]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    found, hooked = [], []
    for model in copies:
        blocks: Any = list(model)
        if model is not reference:
            for block in blocks:
                annotate(block, mesh)
        blocks[1].scale = blocks[0].scale
        blocks[1].up.weight = blocks[0].up.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        blocks[0].up.weight.register_post_accumulate_grad_hook(lambda _: hooked.append(1))
        part = slice(None)
        if model is not reference:
            for module in (*blocks, model):
                shardwise.fsdp.fully_shard(
                    module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data")
                )
            assert blocks[1].up.weight is blocks[0].up.weight
            rank = mesh.get_local_rank("data")
            part = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)[part]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([full(p).detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert len(hooked) == 2 * STEPS


@on_ranks(2)
@pytest.mark.parametrize("fully_shard", [shardwise.fsdp.fully_shard, sw.fully_shard])
def test_types_need_dp_mesh_dims(fully_shard: Any) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    linear = nn.Linear(2, 2, bias=False)
    spmd.assert_type(linear.weight, {mesh.get_group(): spmd.R})
    with pytest.raises(sw.PlanError, match=r"weight has spmd_types .* pass .* dp_mesh_dims="):
        fully_shard(linear, mesh=mesh)


@on_ranks(4)
def test_types_of_all_other_dims_are_needed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    linear = nn.Linear(2, 2, bias=False)
    spmd.assert_type(linear.weight, {mesh.get_group("data"): spmd.R})
    with pytest.raises(sw.PlanError, match=r"weight: its spmd_types .* do not name dim 'model'"):
        shardwise.fsdp.fully_shard(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("data"))
