"""Replaces the parameters of a model by shards."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise.tensor.operations  # noqa: F401 - registers the operations on shards
from shardwise.comm.device import check_device
from shardwise.errors import PlanError
from shardwise.plan.plan import UnitSettings
from shardwise.plan.units import UnitPlan, keeps_its_class, named_parameters
from shardwise.runtime import optimizers
from shardwise.runtime.checks import is_on_meta
from shardwise.runtime.memory import Pools
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter, ParameterOwner
from shardwise.runtime.unit import FlatParameters, Unit
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import sharding_for
from shardwise.tensor.sharding import ExtendedSharding, Sharding, local_of, sharding_of

__all__ = [
    "device_for",
    "make_unit",
    "move_buffers",
    "owner_of",
    "put_sharded",
    "replace_parameter",
    "settings_of",
    "stored_part_of",
]

_CLASS = "_shardwise_class"  # the class of a sharded parameter while its unit computes
_SETTINGS = "_shardwise_settings"  # the `UnitSettings` of a module


def device_for(
    root: nn.Module,
    mesh: DataParallelMesh,
    ignored: Collection[nn.Parameter] = (),
    offloaded_from: torch.device | None = None,
) -> torch.device:
    """Return the device of the shards: this rank's accelerator, or else the device of the model.

    A model on the meta device is put on torch's default device if the group has no accelerators.

    Args:
        root: the model.
        mesh: its ranks.
        ignored: parameters that are not sharded.
        offloaded_from: the device to assume for parameters on the CPU.

    Raises:
        PlanError: the model is on several devices, or on one that is not supported.
    """
    devices = {parameter.device for _, parameter in named_parameters(root, ignored=ignored)}
    if offloaded_from is not None and torch.device("cpu") in devices:
        devices = devices - {torch.device("cpu")} | {offloaded_from}
    for device in devices:
        check_device(device)
    if mesh.accelerator is not None:
        return mesh.accelerator
    if is_on_meta(root, ignored):
        return torch.get_default_device()
    if len(devices) > 1:
        raise PlanError(f"the model is on several devices: {sorted(map(str, devices))}; use one")
    return devices.pop() if devices else torch.device("cpu")


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move the buffers of ``root`` to ``device``, where its parameters will be gathered."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def make_unit(
    root: nn.Module,
    plan: UnitPlan,
    mesh: DataParallelMesh,
    pools: Pools,
    offloader: HostOffloader | None,
    fill: Callable[[UnitPlan], None],
    own_mesh: DataParallelMesh | None,
) -> Unit:
    """Shard the parameters of ``plan`` in ``root``, after ``fill`` has initialized them.

    ``own_mesh`` has the unit's ranks if they are not those of the model, which ``mesh`` has.
    """
    in_step = mesh if own_mesh is None else own_mesh.within(mesh)
    mesh = mesh if own_mesh is None else own_mesh
    settings = settings_of(root.get_submodule(plan.name))
    flats = [
        FlatParameters(layout, in_step, pools, plan, settings, offloader) for layout in plan.layouts
    ]
    fill(plan)  # after the memory that was used to lay out the flat buffers is free again
    for flat in flats:
        slices = flat.layout.slices_of_shard(mesh.rank)
        for position, extent in enumerate(flat.layout.extents):
            sharding = sharding_for(
                plan, flat.layout, extent, mesh, root.get_parameter(extent.parameter.name)
            )
            if flat.layout.is_extended:
                parameter = _manage_extended(root, sharding)
            else:
                local = flat.shard[slices[position]].data
                parameter = _manage(root, sharding, local, flat.buffer.views[position])
            flat.parameters.append(parameter)
    return Unit(plan, flats, settings)


def settings_of(module: nn.Module) -> UnitSettings:
    """The settings of ``module`` as a unit; it may not be sharded yet."""
    settings: UnitSettings = module.__dict__.setdefault(_SETTINGS, UnitSettings())
    return settings


def _manage(root: nn.Module, sharding: Sharding, local: Tensor, view: Tensor) -> FSDPParameter:
    """Replace a parameter of ``root`` by ``local`` (1-D), its part of the shard."""
    original = root.get_parameter(sharding.name)
    with torch.no_grad():
        local.copy_(_own_part_of(original, sharding))  # a cast if the shard is a master
    kind, attributes = _class_of(original)
    owners, sharded = put_sharded(root, original, sharding, sharding.wrap(local))
    trainable = sharding.extent.parameter.trainable
    dense = nn.Parameter(sharding.dense(view), requires_grad=trainable)
    if kind is not None:
        dense.__class__ = kind
        vars(dense).update(attributes)
        vars(sharded)[_CLASS] = kind
    cast = sharding.layout.cast
    if cast.keeps_sums and cast.reduce_itemsize > cast.compute_itemsize:
        dense.grad_dtype = sharded.grad_dtype = getattr(torch, sharding.layout.gradient_dtype)
    return FSDPParameter(sharding, sharded, local_of(sharded), dense, owners)


def _class_of(original: nn.Parameter) -> tuple[type | None, dict[str, Any]]:
    """The parameter class of ``original`` before sharding, and its attributes.

    Classes like bitsandbytes' `Params4bit` need the attributes to interpret the elements.

    Returns:
        None and no attributes for `nn.Parameter` itself.
    """
    kind = vars(original).get(_CLASS, type(original))
    is_own = issubclass(kind, nn.Parameter) and kind is not nn.Parameter
    own = {key: value for key, value in vars(original).items() if key != _CLASS}
    attributes = {key: value for key, value in own.items() if not isinstance(value, Sharding)}
    return (kind, attributes) if is_own else (None, {})


def _manage_extended(root: nn.Module, sharding: Sharding) -> FSDPParameter:
    """Replace a parameter of ``root`` by this rank's part of it, which keeps its class."""
    original = root.get_parameter(sharding.name)
    stored = stored_part_of(original, sharding)
    owners, sharded = put_sharded(root, original, sharding, stored)
    dense = nn.Parameter(torch.empty(0), requires_grad=False)  # until the first gather
    return FSDPParameter(sharding, sharded, local_of(sharded), dense, owners)


def stored_part_of(original: nn.Parameter, sharding: Sharding) -> DTensor:
    """This rank's part of ``original``, whose class defines all-gather extensions."""
    assert isinstance(sharding, ExtendedSharding)
    before = sharding_of(original)
    if before is None:
        is_parallel = isinstance(original, DTensor)
        return sharding.stored_part_of(local_of(original) if is_parallel else original)
    assert before.has_same_cuts(sharding)
    return sharding.wrap(local_of(original))


def put_sharded(
    root: nn.Module, original: nn.Parameter, sharding: Sharding, payload: Tensor
) -> tuple[list[ParameterOwner], nn.Parameter]:
    """Put ``payload`` in place of ``original``. Returns its owners and the new parameter."""
    optimizers.watch_optimizers()
    owners = [owner_of(root, name) for name in sharding.extent.parameter.names]
    for owner in owners:
        owner.drop_weak_references()
    is_again = sharding_of(original) is not None
    sharded = replace_parameter(original, payload)
    if is_again and sharded is not original:
        raise PlanError(
            f"{sharding.name}: other code holds a weak reference to this parameter, perhaps in a "
            "WeakKeyDictionary, so a conversion or requires_grad_(True) would replace it, and "
            "optimizers would go on with the old one; drop the reference, or do it before "
            "fully_shard"
        )
    sharding.attach_to(sharded)
    for owner in owners:
        owner.put(sharded)
    if sharded is not original and not (isinstance(original, DTensor) or keeps_its_class(original)):
        optimizers.replace(original, sharded)
    return owners, sharded


def owner_of(root: nn.Module, name: str) -> ParameterOwner:
    """The owner of the parameter ``name`` of ``root``."""
    path, _, attribute = name.rpartition(".")
    return ParameterOwner(root.get_submodule(path), attribute)


def _own_part_of(original: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of ``original``, 1-D."""
    before = sharding_of(original)
    if before is not None:
        assert isinstance(original, DTensor)
        if before.has_same_cuts(sharding):
            return local_of(original).reshape(-1)
        original = original.full_tensor()
    elif isinstance(original, DTensor):
        original = local_of(original)
    return sharding.own_part_of(original.detach()).reshape(-1)


def replace_parameter(original: nn.Parameter, payload: Tensor) -> nn.Parameter:
    """Return a parameter with ``payload``, the same object as ``original`` if possible."""
    parameter = nn.Parameter(payload, requires_grad=original.requires_grad)
    own = parameter.__dict__
    attributes = {key: value for key, value in original.__dict__.items() if key not in own}
    original.grad = None
    # A plain tensor cannot become a DTensor, and a tensor with weak references cannot be swapped.
    with contextlib.suppress(RuntimeError, TypeError):
        torch.utils.swap_tensors(original, parameter)  # type: ignore[no-untyped-call]
        parameter = original
    parameter.__dict__.update(attributes)
    return parameter
