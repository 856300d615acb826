"""Putting shards in the place of parameters: what `fully_shard` does to a model once."""

import zlib

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.runtime.buffer import Pool
from shardwise.runtime.device import current_gpu
from shardwise.runtime.guard import Scope
from shardwise.runtime.managed import Home, ManagedParameter, split_shard
from shardwise.runtime.mesh import Axis
from shardwise.runtime.reductions import across
from shardwise.runtime.sharded_tensor import ShardedTensor, Sharding
from shardwise.runtime.unit import FlatParameters, Unit

__all__ = ["check_initialized", "check_same_everywhere", "device_for", "make_unit", "move_buffers"]


def check_initialized(root: nn.Module) -> None:
    """Refuse parameters that have no shape yet.

    Raises:
        PlanError: names the first of them.
    """
    for name, parameter in root.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise PlanError(f"{name} has no shape yet; run one forward before fully_shard")


def check_same_everywhere(root: nn.Module, plan: Plan, axis: Axis) -> None:
    """Ranks with other plans, or other values, would make one weight that nobody initialised.

    Raises:
        PlanError: says which it is, and names the first parameter whose values differ.
    """
    named = [
        (name, parameter)
        for name, parameter in root.named_parameters()
        if not isinstance(parameter, ShardedTensor)
    ]
    if axis.num_ranks == 1 or axis.backend("cpu") == "fake" or not named:
        return
    device = named[0][1].device
    digest = torch.tensor(zlib.crc32(repr(plan).encode()), device=device)
    sums = [digest, *(_checksum(parameter.detach()) for _, parameter in named)]
    by_rank = across(sums, axis, Scope.ALL)  # [ranks, 1 + parameters]
    different = (by_rank[:, 0] != by_rank[0, 0]).nonzero()
    if different.numel():
        raise PlanError(
            f"ranks 0 and {different[0].item()} plan otherwise; call fully_shard with the same "
            "model and the same arguments on every rank"
        )
    for position, (name, _) in enumerate(named, start=1):
        different = (by_rank[:, position] != by_rank[0, position]).nonzero()
        if different.numel():
            raise PlanError(
                f"{name} differs between ranks 0 and {different[0].item()}; build the model from "
                "the same seed, or load the same weights, on every rank before fully_shard"
            )


def device_for(root: nn.Module, axis: Axis) -> torch.device:
    """Where the shards live: with the model, or on this rank's GPU if NCCL moves them."""
    devices = {parameter.device for parameter in root.parameters()}
    if any(device.type == "meta" for device in devices):
        raise PlanError(
            "the model is on the meta device; give it values first, with "
            "model.to_empty(device=...) and its initialisation"
        )
    if axis.backend("cuda") == "nccl" and not axis.on_cpu:
        return current_gpu()
    if len(devices) > 1:
        raise PlanError(f"the model is on several devices: {sorted(map(str, devices))}; use one")
    return devices.pop() if devices else torch.device("cpu")


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Put the buffers of ``root`` where its parameters will be gathered."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                module._buffers[name] = buffer.to(device)


def make_unit(root: nn.Module, plan: UnitPlan, axis: Axis, pool: Pool) -> Unit:
    """Shard the parameters of ``plan`` in ``root``."""
    flats = []
    for layout in plan.layouts:
        flat = FlatParameters(layout, axis, pool, plan)
        locals_ = split_shard(flat.shard, layout, axis.rank)
        for slot, local, view in zip(layout.slots, locals_, flat.buffer.views, strict=True):
            flat.parameters.append(_manage(root, Sharding(layout, slot, axis), local, view))
        flats.append(flat)
    return Unit(plan, flats)


def _manage(root: nn.Module, sharding: Sharding, local: Tensor, view: Tensor) -> ManagedParameter:
    """Replace a parameter of ``root`` by its shard ``local`` [run]."""
    spec = sharding.slot.parameter
    homes = [_home(root, name) for name in spec.names]
    original = root.get_parameter(spec.name)
    with torch.no_grad():
        local.copy_(_run_of(original, sharding))  # a cast, where the shard is a master
    sharded = _replace(original, ShardedTensor(local, sharding))
    for home in homes:
        home.put(sharded)
    assert isinstance(sharded, ShardedTensor)
    dense = nn.Parameter(view, requires_grad=spec.trainable)
    return ManagedParameter(sharding, sharded, sharded.to_local(), dense, homes)


def _home(root: nn.Module, name: str) -> Home:
    path, _, attribute = name.rpartition(".")
    return Home(root.get_submodule(path), attribute)


def _run_of(original: Tensor, sharding: Sharding) -> Tensor:
    run = sharding.run
    if isinstance(original, ShardedTensor):
        if original.sharding.runs == sharding.runs:
            return original.to_local()
        original = original.full_tensor()
    return original.detach().reshape(-1)[run.start : run.stop]


def _replace(original: nn.Parameter, payload: ShardedTensor) -> nn.Parameter:
    """A parameter with ``payload``: the same object where possible, for whoever holds it."""
    parameter = nn.Parameter(payload, requires_grad=original.requires_grad)
    own = parameter.__dict__
    attributes = {key: value for key, value in original.__dict__.items() if key not in own}
    original.grad = None
    try:
        torch.utils.swap_tensors(original, parameter)  # type: ignore[no-untyped-call]
        parameter = original
    except RuntimeError:
        pass  # held by a weak reference, as recurrent layers do with their weights
    parameter.__dict__.update(attributes)
    return parameter


def _checksum(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(integer).sum(dtype=torch.int64)
