"""Checks of `fully_shard`: parameters that cannot be sharded, ranks that differ, and optimizers."""

import contextlib
import re
import weakref
import zlib
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._private import is_spectral_norm, joined_mesh
from shardwise._warnings import warn_caller
from shardwise.errors import PlanError
from shardwise.plan.plan import Plan
from shardwise.plan.policies import repeated_blocks
from shardwise.plan.strategy import AxisPlacement
from shardwise.plan.units import named_parameters
from shardwise.runtime.attach import parameters_of, watch_optimizers
from shardwise.runtime.module import handle_of
from shardwise.runtime.nested import plain_tensors
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.reductions import across
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import is_tensor_parallel, local_of, sharding_of

__all__ = [
    "check_complete",
    "check_initialized",
    "check_not_renormalized",
    "check_optimizers",
    "check_same_plan",
    "check_same_sums",
    "check_same_values",
    "check_tensor_parallel",
    "checksum",
    "device_for",
    "flags_of_ranks",
    "is_on_meta",
    "iterates_in_forward",
    "warn_if_whole",
]


def check_complete(optimizer: Optimizer, model: nn.Module, consequence: str) -> None:
    """Raise a PlanError that names a trainable parameter which ``optimizer`` does not have."""
    known = set(map(id, parameters_of(optimizer)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise PlanError(f"{name} is not in the optimizer, so {consequence}")


def check_initialized(root: nn.Module) -> None:
    """Raise a PlanError that names the first scripted module, or parameter without a shape."""
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise PlanError(
                f"{name or 'root'} is a module of torch.jit.script or torch.jit.trace, whose "
                "parameters cannot be replaced; pass the module itself, and torch.compile it"
            )
    for name, parameter in root.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise PlanError(f"{name} has no shape yet; run one forward before fully_shard")


def check_tensor_parallel(
    root: nn.Module, mesh: DataParallelMesh, ignored: Collection[nn.Parameter]
) -> None:
    """Raise a PlanError that names the first DTensor whose mesh cannot be joined with ``mesh``."""
    for name, parameter in named_parameters(root, ignored=ignored):
        if mesh.dims and sharding_of(parameter) is None:
            _check_replicated(name, parameter, mesh)
        elif is_tensor_parallel(parameter):
            _check_tensor_parallel(name, parameter, mesh)


def _check_replicated(name: str, parameter: Tensor, mesh: DataParallelMesh) -> None:
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = dict(zip(names, parameter.placements, strict=False))
        if all(placements.get(dim) == Replicate() for dim in mesh.dims):
            return
    raise PlanError(
        f"{name}: with dp_mesh_dims, expected a DTensor that is Replicate() on {mesh.dims}, got "
        f"{getattr(parameter, 'placements', 'a plain tensor')}; use distribute_tensor on the mesh "
        "that fully_shard gets, or leave dp_mesh_dims out and pass mesh['dp']"
    )


def _check_tensor_parallel(name: str, parameter: Tensor, mesh: DataParallelMesh) -> None:
    assert isinstance(parameter, DTensor)
    if {type(placement) for placement in parameter.placements} <= {Shard, Replicate}:
        with contextlib.suppress(RuntimeError, TypeError):  # TypeError: a mesh without names
            if mesh.mesh is not None:
                joined_mesh(mesh.mesh, parameter.device_mesh)
                return
    raise PlanError(
        f"{name} is a DTensor with {parameter.placements} on {parameter.device_mesh}; expected "
        "Shard or Replicate placements on another dim of the mesh from which fully_shard gets a "
        "dim, as in mesh = init_device_mesh(device, (2, 2), mesh_dim_names=('dp', 'tp')), "
        "parallelize_module(model, mesh['tp'], ...), fully_shard(model, mesh=mesh['dp']); or pass "
        "it in ignored_params"
    )


def check_not_renormalized(root: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raise a PlanError for embeddings with ``max_norm``, whose forward changes their weight."""
    planned = {id(parameter) for _, parameter in named_parameters(root, ignored=ignored)}
    for name, module in root.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if id(module.weight) in planned:
            raise PlanError(
                f"{name or type(module).__name__}.weight: max_norm={module.max_norm} rescales rows "
                "in forward, but each rank only those that it reads, so ranks would have different "
                "values; pass max_norm=None and rescale rows between steps on every rank"
            )


def is_on_meta(root: nn.Module, ignored: Collection[nn.Parameter] = ()) -> bool:
    """Whether the parameters of ``root`` that are not ignored are on the meta device.

    Raises:
        PlanError: only some of them are.
    """
    by_meta = {p.is_meta: name for name, p in named_parameters(root, ignored=ignored)}
    if len(by_meta) > 1:
        raise PlanError(
            f"{by_meta[True]} is on the meta device and {by_meta[False]} is not; build the whole "
            "model on the meta device and shard it with one call, or give it values first"
        )
    return True in by_meta


def device_for(
    root: nn.Module,
    mesh: DataParallelMesh,
    ignored: Collection[nn.Parameter] = (),
    offloaded_from: torch.device | None = None,
) -> torch.device:
    """Return the device of the shards: this rank's accelerator, or else the device of the model.

    A model on the meta device is put on torch's default device if the group has no accelerators.
    Parameters on the CPU count as being on the device that they are ``offloaded_from``.

    Raises:
        PlanError: the model is on several devices, or on one that is not supported.
    """
    devices = {parameter.device for _, parameter in named_parameters(root, ignored=ignored)}
    if offloaded_from is not None and torch.device("cpu") in devices:
        devices = devices - {torch.device("cpu")} | {offloaded_from}
    if any(device.type == "mps" for device in devices):
        raise PlanError(
            "the model is on mps, where a part of a tensor has no address of its own, so gathered "
            "parameters cannot be parts of one buffer; expected cpu, cuda or xpu: call "
            "model.to('cpu') before fully_shard"
        )
    if mesh.accelerator is not None:
        return mesh.accelerator
    if is_on_meta(root, ignored):
        return torch.get_default_device()
    if len(devices) > 1:
        raise PlanError(f"the model is on several devices: {sorted(map(str, devices))}; use one")
    return devices.pop() if devices else torch.device("cpu")


def flags_of_ranks(flag: bool, mesh: DataParallelMesh) -> list[bool]:
    """The ``flag`` of every rank, or of this one alone if ranks cannot be compared."""
    if not _can_compare(mesh):
        return [flag]
    gathered = across([torch.tensor(flag, device="cpu")], mesh, mesh.world)
    return [bool(one) for one in gathered.flatten().tolist()]


def check_same_plan(
    plan: Plan, mesh: DataParallelMesh, *, on_meta: bool, warns: bool = False
) -> None:
    """Raise a PlanError if ranks have different plans; ``warns`` if only names differ.

    ``on_meta``: the model has no values yet.
    """
    if not _can_compare(mesh):
        return
    text = repr([on_meta, *(getattr(plan, field.name) for field in fields(plan))])
    texts = (text, re.sub(r"names=\(.*?\), shape=", "shape=", text)) if warns else (text,)
    digests = [torch.tensor(zlib.crc32(one.encode()), device="cpu") for one in texts]
    by_rank = across(digests, mesh, mesh.world)  # [ranks, plans]
    different = by_rank != by_rank[0]
    if not different.any():
        return
    rank = different.any(1).nonzero()[0].item()
    message = (
        f"ranks 0 and {rank} have different sharding plans; call fully_shard with the same "
        "model, on the meta device or not, and the same arguments on every rank"
    )
    if different[:, -1].any():
        raise PlanError(message)
    warn_caller(f"{message}. Only names of parameters differ")


def check_same_values(
    root: nn.Module, plan: Plan, mesh: DataParallelMesh, *, warns: bool = False
) -> None:
    """Raise a PlanError, or warn, if a parameter has different values on the ranks.

    Its shards would combine into a weight that no rank had.
    """
    planned = {spec.name for unit in plan.units for spec in unit.parameters}
    named = [
        (name, parameter)
        for name, parameter in named_parameters(root)
        if name in planned and sharding_of(parameter) is None
    ]
    if not _can_compare(mesh):
        return
    try:
        check_same_sums({name: checksum(parameter) for name, parameter in named}, mesh)
    except PlanError as error:
        if not warns:
            raise
        warn_caller(f"{error}. Each rank keeps its part of the values that it has")


def check_same_sums(
    sums: Mapping[str, Tensor],
    mesh: DataParallelMesh,
    advice: str = "build the model from the same seed, or load the same weights, on every rank "
    "before fully_shard",
) -> None:
    """Raise a PlanError if the `checksum` of a parameter differs between ranks."""
    if not sums or not _can_compare(mesh):
        return
    by_rank = across(list(sums.values()), mesh, mesh.world)  # [ranks, parameters]
    differs = by_rank != by_rank[0]
    for position in differs.any(0).nonzero().flatten().tolist()[:1]:
        rank = differs[:, position].nonzero()[0].item()
        raise PlanError(f"{list(sums)[position]} differs between ranks 0 and {rank}; {advice}")


def _can_compare(mesh: DataParallelMesh) -> bool:
    return mesh.num_ranks > 1 and mesh.group is not None and mesh.backend("cpu") != "fake"


def checksum(tensor: Tensor) -> Tensor:
    """The sum of ``tensor``'s bits as integers: an int64 scalar."""
    local = local_of(tensor).detach()
    if hasattr(local, "__tensor_flatten__"):
        return torch.stack([checksum(one) for one in plain_tensors(local)]).sum()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(local.itemsize, torch.int64)
    flat = local.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    integers = flat.view(integer)
    if integers.device.type != "cpu":  # torch's sum into another dtype copies its input
        return torch.stack(
            [one.sum(dtype=torch.int64) for one in torch.split(integers, _PIECE)]
        ).sum()
    # On the CPU, torch's sum into another dtype copies its input. Even in chunks, such copies left
    # holes in the heap that later allocations did not fit into: after a start on the meta device,
    # one rank in four had grown by the size of all units. NumPy's sum needs a few kilobytes.
    # Unlike `numpy()`, DLPack leaves the storage resizable.
    return torch.tensor(np.from_dlpack(integers).sum(dtype=np.int64), device="cpu")


def iterates_in_forward(module: nn.Module) -> bool:
    """Whether ``module`` computes weights from buffers that each forward changes.

    Those of spectral norms are known; buffers of other parametrizations may be constant.
    """
    lists = getattr(module, "parametrizations", {}) if is_parametrized(module) else {}
    hooks = module._forward_pre_hooks.values()  # of the older `nn.utils.spectral_norm`
    return any(is_spectral_norm(part) for parts in lists.values() for part in parts) or any(
        isinstance(hook, SpectralNorm) for hook in hooks
    )


def warn_if_whole(module: nn.Module, plan: Plan) -> None:
    """Make the first forward warn if ``module`` is gathered as one unit and has repeated blocks.

    Only then it is known that no later call makes it a part of a larger model.
    """
    is_cut = AxisPlacement.SHARD in plan.strategy.parameters
    if is_cut and len(plan.units) == 1 and repeated_blocks(module):
        module.register_forward_pre_hook(_warn_of_whole)


def _warn_of_whole(module: nn.Module, _args: Any) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _warn_of_whole]:  # also in a copy
        del hooks[key]
    blocks = repeated_blocks(module)
    plan = handle_of(module).runtime.plan
    if len(plan.units) > 1 or not blocks:
        return
    kinds = sorted({module.get_submodule(name)._get_name() for name in blocks})  # type: ignore[no-untyped-call]
    warn_caller(
        f"{plan.units[0].label} is one unit, so all its parameters are gathered at once, although "
        f"it has {len(blocks)} repeated blocks ({', '.join(kinds)}: {blocks[0]} to {blocks[-1]}); "
        'pass units="auto" to fully_shard, or call fully_shard on each block first (with the '
        "FSDP1 wrapper: pass auto_wrap_policy)"
    )


# -- steps of optimizers ---------------------------------------------------------------------------

_warned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


@cache
def check_optimizers() -> None:
    """Install the hooks, once per process, after that of `runtime.attach`."""
    watch_optimizers()
    register_optimizer_step_pre_hook(_refuse_shards)
    register_optimizer_step_pre_hook(_warn_of_empty_step)


def _warn_of_empty_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn about a step in which no parameter has a gradient, as it would do nothing silently.

    A closure may compute the gradients during the step.
    """
    parameters = parameters_of(optimizer)
    if optimizer in _warned or any(one.grad is not None for one in parameters):
        return
    if any(map(callable, (*args[1:], *kwargs.values()))):
        return
    names = [
        sharding.name
        for parameter in parameters
        if parameter.requires_grad
        and (sharding := sharding_of(parameter)) is not None
        and not getattr(parameter, STEPS_IN_BACKWARD, False)
    ]
    if names:
        _warned.add(optimizer)
        warn_caller(
            f"{type(optimizer).__name__} steps, and none of its {len(parameters)} parameters has a "
            f"gradient (the first is {names[0]}). loss.backward(inputs=...) computes none for "
            "sharded parameters: call loss.backward()",
        )


_PIECE = 1 << 24  # elements
_LIBRARIES = ("torch.optim", "transformers")
# Their optimizers that need whole parameters, and what to use instead.
_NEED_WHOLE_PARAMETERS = {
    "Muon": "use shardwise.optim.Muon, which has its options and numbers",
    "Adafactor": "use shardwise.optim.Adam8bit, which saves memory, too",
    "LBFGS": 'pass granularity="dim" to fully_shard, with which torch gathers what it needs',
}


def _refuse_shards(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuse an optimizer that needs whole parameters, and say what to use instead."""
    kind = type(optimizer)
    library = next((one for one in _LIBRARIES if kind.__module__.startswith(one)), None)
    if library is None or kind.__name__ not in _NEED_WHOLE_PARAMETERS:
        return
    for parameter in parameters_of(optimizer):
        sharding = sharding_of(parameter)
        # torch can compute with its own DTensors, except in Adafactor (torch 2.13).
        is_refused = isinstance(parameter, ShardedTensor) or kind.__name__ == "Adafactor"
        if sharding is not None and is_refused:
            raise PlanError(
                f"{sharding.name}: {library}.{kind.__name__} needs whole parameters, and "
                f"each rank has a part; {_NEED_WHOLE_PARAMETERS[kind.__name__]}"
            )
