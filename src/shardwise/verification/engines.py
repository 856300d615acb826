"""Engines that `verify` can check: this one, FSDP2, DDP, or any that a function sets up."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardwise.api import fully_shard
from shardwise.errors import PlanError
from shardwise.plan.policies import Units, choose_units

__all__ = [
    "ENGINES",
    "BackwardFn",
    "Engine",
    "data_dims",
    "parameters_of",
    "set_up",
    "splits_batch",
]

# Computes the gradients of one part of a batch: (loss_fn, rows) -> the part's mean loss.
BackwardFn = Callable[[Any, Any], Any]
# (model, mesh, units) -> the model to train, or (model, backward).
Engine = Callable[[nn.Module, DeviceMesh | None, Units], Any]


def _shardwise(model: nn.Module, mesh: DeviceMesh | None, units: Units) -> nn.Module:
    data_parallel = _data_parallel(mesh)
    _divide_layers(model, mesh)
    return fully_shard(model, mesh=data_parallel, units=units)


def _fsdp2(model: nn.Module, mesh: DeviceMesh | None, units: Units) -> nn.Module:
    data_parallel = _data_parallel(mesh)
    _divide_layers(model, mesh)
    for name in reversed(choose_units(model, units)):  # nested units first
        fsdp2_fully_shard(model.get_submodule(name), mesh=data_parallel)
    return model


def _ddp(model: nn.Module, mesh: DeviceMesh | None, _units: Units) -> nn.Module:
    """Ranks along "tp" hold copies, because DDP takes no DTensors."""
    data_parallel = _data_parallel(mesh)
    group = None if data_parallel is None else data_parallel.get_group()
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


ENGINES: dict[str, Engine] = {"shardwise": _shardwise, "fsdp2": _fsdp2, "ddp": _ddp}


def set_up(
    engine: Engine, model: nn.Module, mesh: DeviceMesh | None, units: Units
) -> tuple[nn.Module, BackwardFn | None]:
    """Apply ``engine`` to ``model``; return the new model and the engine's backward, if any."""
    result = engine(model, mesh, units)
    backward = None
    if isinstance(result, tuple) and len(result) == 2:  # noqa: PLR2004
        result, backward = result
    if not isinstance(result, nn.Module) or not (backward is None or callable(backward)):
        raise PlanError(
            f"the engine returned {type(result).__name__}: expected the module to train, or "
            "(module, backward), where backward(loss_fn, rows) computes the gradients and returns "
            "the loss"
        )
    return result, backward


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return dict(inner.named_parameters())


def data_dims(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Return the dims of ``mesh`` that split a batch: "dp..." and the dims of experts."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return tuple(name for name in names if splits_batch(name))


def splits_batch(dim: str) -> bool:
    """Whether ranks along the mesh dim of this name get different rows of a batch."""
    return dim.startswith("dp") or dim in ("efsdp", "ep")


def _data_parallel(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return ``mesh`` without "tp"; raise a PlanError if another dim is not data-parallel."""
    names = () if mesh is None else mesh.mesh_dim_names or ("",)
    if not all(name.startswith("dp") or name == "tp" for name in names):
        raise PlanError(
            f"{mesh}: this engine takes only data-parallel dims (dp...) and tp; pass "
            "engine=FILE:FUNCTION, a function that parallelizes the model over the other dims"
        )
    if mesh is None or "tp" not in names:
        return mesh
    dims = data_dims(mesh)
    return mesh[dims if len(dims) > 1 else dims[0]]


def _divide_layers(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Divide linear layers among the ranks of the dim "tp" of ``mesh``, if there is one.

    Each rank computes some of a layer's outputs, and all ranks then gather all outputs. This works
    for any model that calls its layers. Tied weights are not divided.
    """
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
        return
    uses: Counter[Tensor] = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    layers: dict[str, ParallelStyle] = {
        name: ColwiseParallel(output_layouts=Replicate())
        for name, module in model.named_modules()
        if type(module) is nn.Linear and uses[module.weight] == 1
    }
    parallelize_module(model, mesh["tp"], layers)
