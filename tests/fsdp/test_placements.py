"""Placement functions that choose the mesh of each parameter give the same as with FSDP2."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from shardwise import fsdp
from shardwise.errors import PlanError
from tests.fsdp.both import DEADLINE, run_both
from tests.ranks import on_ranks
from tests.versions import needs_meshes_of_parameters

WIDTH = 4
BF16, F32 = torch.bfloat16, torch.float32
pytestmark = needs_meshes_of_parameters


class Experts(nn.Module):
    """The experts of this rank, which other ranks of "efsdp" have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(2, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is F32 or self.up.dtype is torch.float64  # no conversion at this module
        x = x.to(self.up.dtype)
        experts: Tensor = torch.einsum("bi,eij,ejk->bk", x, self.up, self.down)
        return experts


class Block(nn.Module):
    def __init__(self, lists: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([Experts(), Experts()]) if lists else Experts()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        wide = x if x.dtype is torch.float64 else x.float()
        for experts in self.experts if isinstance(self.experts, nn.ModuleList) else [self.experts]:
            x = x + self.scale * experts(wide).tanh()
        return x


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """All four ranks, and pairs of them."""
    ranks = dist.get_world_size()
    sparse = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("efsdp", "ep"))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), sparse


def by_mesh(block: nn.Module, dense: DeviceMesh, experts: DeviceMesh) -> Callable[..., Any]:
    """What torchtitan's blocks pass as ``shard_placement_fn``."""
    chosen = {p for name, p in block.named_parameters() if "experts" in name}
    infos = [_fsdp_common.FSDPMeshInfo(one, shard_mesh_dim=0) for one in (dense, experts)]

    def place(parameter: nn.Parameter) -> Any:
        is_expert = parameter in chosen
        dim = 1 if parameter.ndim == 3 else 0
        return _fsdp_common.ShardPlacementResult(Shard(dim), infos[is_expert])

    return place


def program(f: Any, lists: bool, factor: float | None, dtype: torch.dtype) -> list[Any]:
    policy = f.MixedPrecisionPolicy(dtype, F32) if dtype is BF16 else None
    options = {} if policy is None else {"mp_policy": policy}
    dense, sparse = meshes()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(lists) for _ in range(2)), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(sparse.get_local_rank("ep"))
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter)
    model = model.to(F32 if dtype is BF16 else dtype)
    blocks: Any = list(model)[:2]
    for block in blocks:
        place = by_mesh(block, dense, sparse["efsdp"])
        f.fully_shard(block, mesh=dense, shard_placement_fn=place, **options)
    net: Any = f.fully_shard(model, mesh=dense, **options)
    if factor is not None:
        blocks[0].set_force_sum_reduction_for_comms(True)  # Gloo cannot divide
        blocks[0].set_gradient_divide_factor(factor)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    seen: list[Any] = [[(p.shape, p.placements, p.device_mesh.size()) for p in net.parameters()]]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        for micro in range(2):
            net.set_requires_gradient_sync(micro == 1)
            x = torch.randn(3, WIDTH, generator=generator, dtype=F32).to(
                F32 if dtype is BF16 else dtype
            )
            net(x).square().mean().backward()
        seen.append([p.grad.to_local().clone() for p in net.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return [*seen, [p.to_local() for p in net.parameters()]]


@on_ranks(4, deadline=DEADLINE)
@pytest.mark.parametrize(
    ("lists", "factor", "dtype"),
    [(False, None, torch.float64), (True, 1.0, torch.float64), (False, 3.0, BF16)],
)
def test_experts_on_their_own_mesh(lists: bool, factor: float | None, dtype: torch.dtype) -> None:
    options = {"lists": lists, "factor": factor, "dtype": dtype}
    run_both(program, options, 0.02 if dtype is BF16 else 1e-10)


@on_ranks(4)
def test_what_parameters_on_several_meshes_cannot_have() -> None:
    dense, sparse = meshes()
    block = Block(lists=True)
    assert isinstance(block.experts, nn.ModuleList)
    first, second = (cast("Experts", one) for one in block.experts)
    second.up = first.up
    place = by_mesh(block, dense, sparse["efsdp"])
    fsdp.fully_shard(block, mesh=dense, shard_placement_fn=place)
    with pytest.raises(PlanError, match="set_all_reduce_hook is not supported with parameters on"):
        cast("Any", block).set_all_reduce_hook(lambda _: None)
    # The experts would become units of this model, and the root would hold what they share.
    cast("Any", block).set_gradient_divide_factor(4.0)
    with pytest.raises(
        PlanError, match=r"0\.up and .*1\.up are one parameter, which is sharded over"
    ):
        fsdp.fully_shard(nn.Sequential(block), mesh=dense)


@on_ranks(4)
def test_meshes_that_a_module_cannot_have() -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = _fsdp_common.HSDPMeshInfo(square, shard_mesh_dim=1, replicate_mesh_dim=0)
    with pytest.raises(PlanError, match="has the ranks of mesh= in another shape"):
        fsdp.fully_shard(
            Block(lists=False),
            shard_placement_fn=lambda p: (
                _fsdp_common.ShardPlacementResult(None, hybrid) if p.ndim == 3 else None
            ),
        )
    dense, sparse = meshes()
    infos = [_fsdp_common.FSDPMeshInfo(m, shard_mesh_dim=0) for m in (dense, sparse["efsdp"])]

    def within(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(None, infos[parameter.ndim == 2])

    with pytest.raises(PlanError, match=r"0\.weight is on another mesh than other parameters"):
        fsdp.fully_shard(
            nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh=dense, shard_placement_fn=within
        )
    with pytest.raises(PlanError, match="all parameters of Linear are on other meshes"):
        fsdp.fully_shard(
            nn.Linear(WIDTH, WIDTH, bias=False),
            mp_policy=MixedPrecisionPolicy(),
            shard_placement_fn=within,
        )
