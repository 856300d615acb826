"""``dp_mesh_dims``: parameters and inputs are DTensors on the mesh of all kinds of parallelism."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import shardwise as sw
import shardwise.fsdp
from shardwise.fsdp import DataParallelMeshDims
from tests.fsdp.both import DEADLINE, run_both
from tests.ranks import on_ranks
from tests.runtime.one_process import full

WIDTH, BATCH = 6, 8
THOROUGH = pytest.mark.thorough
# The mesh, its dims for data parallelism, and whether the last is for tensor parallelism.
CASES: dict[str, tuple[dict[str, int], Any]] = {
    "shard": ({"dp": 4}, DataParallelMeshDims(shard="dp")),
    "shard x tp": ({"dp": 2, "tp": 2}, DataParallelMeshDims(shard="dp")),
    "replicate and shard": ({"rep": 2, "dp": 2}, DataParallelMeshDims("dp", "rep")),
    "two to shard": ({"dp": 2, "cp": 2}, DataParallelMeshDims(("dp", "cp"))),
    "replicate x tp": ({"rep": 2, "tp": 2}, DataParallelMeshDims(replicate="rep")),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate parameters, except over ``tp``, which cuts columns and rows."""
    names = mesh.mesh_dim_names or ()
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = Shard(0) if "up" in path else Shard(1)
            placements: list[Placement] = [cut if dim == "tp" else Replicate() for dim in names]
            whole = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(module, name, nn.Parameter(whole))


def train(engine: Any, case: str) -> Any:
    sizes, dims = CASES[case]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    distribute(model, mesh)
    for module in (*model, model):
        engine.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
        if isinstance(module, engine.FSDPModule):  # the loss is that of the global batch
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = [Replicate() if dim == "tp" else Shard(0) for dim in sizes]
    results: list[Any] = []
    for _ in range(3):
        x = distribute_tensor(torch.randn(BATCH, WIDTH).double(), mesh, batch)
        loss = model(x).square().mean()
        loss.backward()
        results.append(loss.full_tensor().detach())
        results += [full(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    weights = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
    assert len(weights) == 4
    return [
        *results,
        *(weight.to_local().detach() for weight in weights),
        *(str(weight.placements) for weight in weights),
        *(weight.device_mesh.mesh_dim_names for weight in weights),
    ]


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="the FSDP2 of torch 2.11 has no dp_mesh_dims",
)
@on_ranks(4, deadline=DEADLINE)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "shard x tp" else THOROUGH) for case in CASES],
)
def test_training_is_that_of_fsdp2(case: str) -> None:
    run_both(train, {"case": case})


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, ()), ("a", ("a",)), (("a", "b"), ("a", "b"))],
)
def test_names_of_dims(names: Any, expected: tuple[str, ...]) -> None:
    dims = DataParallelMeshDims(names, "r")
    assert (dims.shard_names, dims.replicate_names) == (expected, ("r",))
    dims = DataParallelMeshDims("s", replicate=names)
    assert (dims.shard_names, dims.replicate_names) == (("s",), expected)


def test_no_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="DataParallelMeshDims"):
        DataParallelMeshDims()


@on_ranks(2)
def test_dims_that_do_not_fit_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(sw.PlanError, match=r"dp_mesh_dims: tp not found in .*'dp'"):
        shardwise.fsdp.fully_shard(Block(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("tp"))
    with pytest.raises(sw.PlanError, match=r"up\.weight: .*Replicate\(\) on .*a plain tensor"):
        shardwise.fsdp.fully_shard(Block(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))
