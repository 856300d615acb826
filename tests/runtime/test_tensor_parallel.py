"""Tensor parallelism on one mesh dim, with shards on the other, trains as in one process."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import shardwise as sw
from tests.covering import covered_first
from tests.lossless import lossless_wires
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_close, assert_equal_whole, full, step_all

WIDTH, TOKENS, BATCH = 8, 4, 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"strategy": "zero2"},
    {"strategy": "ddp"},
    {"wire": sw.Wire("int8", "int4", block=8)},  # in a format that rounds nothing
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # without tensor parallelism
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def parallelize(block: nn.Module, mesh: DeviceMesh, kind: str) -> None:
    if kind == "tensor":
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return
    inner = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(block, mesh, inner)
    into = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    out_of = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    for style in (into, out_of):
        parallelize_module(block, mesh, style)


@on_ranks(2)
def test_sums_over_tensor_parallel_ranks_have_the_dtype_of_reductions() -> None:
    """FSDP2 adds the gradients of a norm in the dtype of compute (pytorch#190626)."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sw.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    own = 1.0 if mesh["tp"].get_local_rank() else 2**-9  # their sum has more bits than bfloat16
    x = torch.randn(BATCH, 1, WIDTH, dtype=torch.bfloat16)
    loss = model(DTensor.from_local(x, mesh["tp"], [Shard(1)])).to_local()[0].sum() * own
    loss.backward()
    bias = model.get_parameter("0.bias")
    assert bias.grad is not None
    assert torch.equal(full(bias.grad), torch.full((WIDTH,), 1 + 2**-9))


@on_ranks(4)
@pytest.mark.parametrize(
    ("options", "kind"), covered_first(product(OPTIONS, ("tensor", "sequence")))
)
def test_training_equals_one_process(kind: str, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = Model().double()
    model = copy.deepcopy(reference)
    for block in model.blocks:
        parallelize(block, mesh["tp"], kind)
    with lossless_wires():
        sw.fully_shard(model, mesh=mesh["dp"], units=Block, **options)
    assert model.get_parameter("blocks.0.up.weight").device_mesh.mesh_dim_names == ("dp", "tp")  # type: ignore[attr-defined]
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for step in range(2):
        x = torch.randn(BATCH, TOKENS, WIDTH).double()
        reference(x).square().mean().backward()
        model(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
        assert all(isinstance(one.grad, DTensor) for one in model.parameters())
        assert_equal_whole(model, reference, step)
        clipped = sw.clip_grad_norm_(model.parameters(), 0.1)
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert_close(clipped, wanted, "norm")
        step_all(optimizers)
    assert_equal_whole(model, reference, 2)
    with sw.gathered(model):
        weight = model.get_parameter("blocks.0.up.weight")
        expected = reference.get_parameter("blocks.0.up.weight")
        assert_close(full(weight.detach()), expected.detach(), "gathered")


@on_ranks(4)
@pytest.mark.parametrize("width", [WIDTH, 7])
def test_initial_values_on_the_meta_device_do_not_depend_on_tensor_parallelism(width: int) -> None:
    def build() -> nn.Sequential:
        layers = nn.Embedding(5, width), nn.Linear(width, 5), nn.Linear(5, width)
        layers[1].weight = layers[0].weight  # cut along the same dim
        return nn.Sequential(*layers)

    reference = build()
    sw.initialize(reference, seed=3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = build()
    styles = {"0": RowwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    model[1].weight = model[0].weight
    sw.fully_shard(model, mesh=mesh["dp"], units=nn.Linear, init=sw.Initialization(seed=3))
    assert len(list(model.parameters())) == 4
    for (name, one), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(one.detach()), plain), name


@on_ranks(4)
def test_a_loss_over_classes_on_several_ranks_equals_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(10, WIDTH), Block(), nn.Linear(WIDTH, 10)).double()
    model = copy.deepcopy(reference)
    parallelize(model[1], mesh["tp"], "tensor")
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], {"2": style})
    sw.fully_shard(model, mesh=mesh["dp"], units=Block)
    tokens = torch.randint(10, (BATCH, TOKENS))
    own = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    expected = functional.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    with loss_parallel():
        functional.cross_entropy(model(own).flatten(0, 1), own.flatten()).backward()  # type: ignore[no-untyped-call]
    assert_equal_whole(model, reference, 0)


@on_ranks(4)
def test_a_mesh_that_does_not_join_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    parallelize(model.blocks[0], mesh["tp"], "tensor")
    with pytest.raises(sw.PlanError, match=r"blocks\.0\.up\.weight is a DTensor .*mesh\['dp'\]"):
        sw.fully_shard(model)
    with pytest.raises(sw.PlanError, match=r"blocks\.0\.up\.weight is a DTensor"):
        sw.fully_shard(model, mesh=mesh["tp"])
