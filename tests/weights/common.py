"""What the tests of this room share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from tests.models import Block, build

__all__ = ["adapted", "assert_same", "experts", "saved", "tensor_parallel"]


def saved(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, which is written to ``folder``."""
    sw.save(folder, model=model)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Plain tensors with the same names, dtypes, shapes and bits."""
    assert set(actual) == set(expected)
    for name, tensor in actual.items():
        assert type(tensor) is Tensor, name
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        bits = [one.reshape(-1).view(torch.uint8) for one in (tensor, expected[name])]
        assert torch.equal(*bits), name


def adapted(**options: Any) -> Any:
    """A model with LoRA of peft on every `up`."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False, **options)
    return peft.get_peft_model(build("stack").float(), config)


def tensor_parallel(strategy: str = "fsdp") -> nn.Module:
    """Two columns of a mesh of four ranks hold a part of each layer, whose 7 rows are uneven."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(Block(7) for _ in range(2)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sw.fully_shard(model, mesh=mesh["dp"], strategy=strategy)


def experts() -> nn.Module:
    """A stack of experts, of which a rank holds some, in front of a layer that four ranks shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    own = distribute_tensor(torch.randn(4, 3, 5), mesh["ep"], [Shard(0)], src_data_rank=None)
    model: Any = nn.Module()
    model.experts, model.out = nn.Module(), nn.Linear(5, 5)
    model.experts.weight = nn.Parameter(own)
    sw.fully_shard(model.experts, mesh=mesh["dp"])
    model.experts.set_gradient_divide_factor(4)
    sw.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert isinstance(model, nn.Module)
    return model
