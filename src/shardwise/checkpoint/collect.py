"""Collect what a save writes: components with named tensors, and this rank's slice of each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise._private import pytree
from shardwise.checkpoint import tree
from shardwise.checkpoint.directory import Retention
from shardwise.checkpoint.format import File, index_of, pack, spec_of
from shardwise.checkpoint.manifest import Component, tensor_ids
from shardwise.checkpoint.slices import Slices
from shardwise.checkpoint.stores import Folder
from shardwise.errors import CheckpointError, StepError
from shardwise.features.joined_ranks import JOINED
from shardwise.plan.strategy import STRATEGIES
from shardwise.plan.units import keeps_its_class
from shardwise.runtime.attach import take_sharded, unowned_states
from shardwise.runtime.engine import HANDLE, Handle
from shardwise.runtime.scheduler import Sleep
from shardwise.tensor.mesh import DataParallelMesh, all_ranks_of, resolve_mesh
from shardwise.tensor.sharding import local_of, mesh_of, sharding_of

__all__ = [
    "WriteJob",
    "check_kinds",
    "check_sharded",
    "check_storable",
    "checkpoint_mesh",
    "collect",
    "named_states",
    "parameter_names",
    "tensors_of",
]

_MAX_NAME_BYTES = 200  # file systems allow 255


def check_kinds(action: str, model: object, optimizer: object) -> None:
    """Raise if ``model`` or ``optimizer`` is of another kind, or the model inside `sw.join`."""
    if model is not None and not isinstance(model, nn.Module):
        raise CheckpointError(
            f"{action}: model={type(model).__name__}(...): expected a torch.nn.Module; pass the "
            "model itself, not its state_dict()"
        )
    if optimizer is not None and not hasattr(optimizer, "state_dict"):
        raise CheckpointError(
            f"{action}: optimizer={optimizer!r}: expected a torch.optim.Optimizer; pass the one "
            "that steps the model"
        )
    if model is not None and any(hasattr(one, JOINED) for one in model.parameters()):
        raise StepError(
            f"sw.{action} inside sw.join, where ranks may run out of batches: call it after the "
            "block"
        )


def collect(
    name: str, value: Any, model: nn.Module, max_file_bytes: int, *, is_plan: bool = False
) -> tuple[Component, dict[str, Tensor]]:
    """The component of ``value``, which was passed to `save` as ``name``, and its tensors by name.

    With ``is_plan``, tensors may be on the meta device. A CheckpointError names the key of what
    cannot be saved.
    """
    _check_name(name)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    encoded = None
    try:
        match value:
            case nn.Module():
                kind = "module"
                check_sharded(value)
                found = tensors_of(value)
                tensors, aliases = found.tensors, found.aliases
            case Optimizer():
                kind, encoded = "optimizer", tree.encode(named_states(value, model), tensors)
            case _ if callable(getattr(value, "state_dict", None)):
                kind = "object"
                encoded = tree.in_order(tree.encode(value.state_dict(), tensors))
            case _:
                kind, encoded = "data", tree.in_order(tree.encode(value, tensors))
        for key, tensor in tensors.items():
            check_storable(key, tensor, is_plan=is_plan)
        files = pack(name, (spec_of(key, x) for key, x in tensors.items()), max_file_bytes)
    except RecursionError as error:
        raise CheckpointError(f"{name}: nested too deeply, or contains itself") from error
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return Component(kind, encoded, tuple(files), aliases), tensors


def _check_name(name: str) -> None:
    """Raise a CheckpointError if the component ``name`` cannot be part of a file name."""
    is_valid = re.fullmatch(r"[^\x00-\x1f/\\.][^\x00-\x1f/\\]*", name)
    if not is_valid or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"{name!r}: the name of a state is part of a file's name, and this is not a valid file "
            f"name; use at most {_MAX_NAME_BYTES} bytes without slashes or a leading dot"
        )


def check_storable(key: str, tensor: Tensor, *, is_plan: bool = False) -> None:
    """Raise a CheckpointError if ``tensor`` has no dense elements on this rank.

    ``is_plan`` allows meta tensors.
    """
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        raise CheckpointError(
            f"{key}: a DTensor with placements {tensor.placements} cannot be saved, because no "
            "rank has its elements; pass its full_tensor()"
        )
    if keeps_its_class(tensor):
        kind = type(local_of(tensor)).__name__
        raise CheckpointError(
            f"{key}: a {kind} cannot be saved, because its elements are not in one tensor; save "
            "the trained parameters with torch.distributed.checkpoint"
        )
    is_missing = tensor.is_meta and not is_plan
    if tensor.layout is not torch.strided or tensor.is_quantized or is_missing:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise CheckpointError(f"{key}: a {kind} tensor cannot be saved; expected a dense one")


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module under the names in its state dict."""

    tensors: dict[str, Tensor]  # a tied tensor under its first name, as in ``named_parameters()``
    aliases: dict[str, str]  # the other names of tied tensors
    # The names of tensors that are neither parameters nor buffers, such as extra states. What is
    # read into them must be passed to ``load_state_dict()``.
    copies: frozenset[str]


def tensors_of(module: nn.Module) -> ModuleTensors:
    """The parameters, persistent buffers and extra states of ``module``.

    Where a hook, a wrapper or a subclass returns a copy of a parameter or buffer under its own
    name, the result contains the parameter or buffer, because a load into the copy would be lost.
    """
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= module.named_buffers(remove_duplicate=False)
    known = {id(tensor) for tensor in own.values()}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, listed in module.state_dict(keep_vars=True).items():
        tensor = listed if id(listed) in known else own.get(name, listed)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name}: the extra state of a module must be a tensor, got a "
                f"{type(tensor).__name__}; save it separately, as in sw.save(..., extra=...)"
            )
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor
        else:
            aliases[name] = first[id(tensor)]
    copies = frozenset(name for name, tensor in tensors.items() if id(tensor) not in known)
    return ModuleTensors(tensors, aliases, copies)


def parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The parameters of ``optimizer`` by their names in ``model``, in the order of the groups.

    The names are those of `tensors_of`, without the prefixes of wrappers in the model. Raise a
    CheckpointError if one is not in the model.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        _check_is_no_wrapper(optimizer)
    take_sharded(optimizer)  # if it was built before `fully_shard`, and has not stepped
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names |= {id(tensor): name for name, tensor in tensors_of(model).tensors.items()}
    found: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {position} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's; build the optimizer "
                    "from model.parameters(), and save several models as one: "
                    "model=nn.ModuleDict({name: model, ...})"
                )
            found[names[id(parameter)]] = parameter
    return found


def checkpoint_mesh(modules: list[nn.Module]) -> DataParallelMesh:
    """The ranks that save or load: those that hold shards, or all ranks if nothing is sharded.

    With tensor parallelism, they are the ranks of the largest joined mesh. Others, such as that of
    experts, may be a part of it.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    found = mesh_of(parameters)
    joined = []
    for parameter in parameters:
        sharding = sharding_of(parameter)
        # Next to shards, a DTensor without a sharding is one of `ignored_params`.
        is_joined = found is None if sharding is None else sharding.tensor_parallel
        if isinstance(parameter, DTensor) and is_joined:
            joined.append(parameter.device_mesh)
    if joined:
        return all_ranks_of(max(joined, key=lambda mesh: mesh.size()))
    return resolve_mesh(None, STRATEGIES["ddp"]) if found is None else found


def check_sharded(module: nn.Module) -> None:
    """Raise a CheckpointError if parameters are gathered, as during a step, or differ by rank.

    The latter are experts that are not DTensors on the mesh of expert parallelism.
    """
    mesh = mesh_of(module.parameters())
    for name, parameter in module.named_parameters():
        sharding = sharding_of(parameter)
        if sharding is None or mesh is None or sharding.tensor_parallel is not None:
            continue
        if sharding.mesh.num_ranks < mesh.num_ranks:
            raise CheckpointError(
                f"{name} is sharded over {sharding.mesh.num_ranks} of the model's "
                f"{mesh.num_ranks} ranks, and the others hold different values under that name; "
                "make it a DTensor on the mesh of expert parallelism before fully_shard"
            )
    handles: list[Handle] = [vars(m)[HANDLE] for m in module.modules() if HANDLE in vars(m)]
    for handle in handles:
        if handle.runtime.scheduler.sleep is Sleep.DISCARDED:
            raise CheckpointError(
                "the model's values were discarded by sw.sleep; call sw.wake and sw.load first"
            )
        leaves = handle.runtime.scheduler.leaves
        if leaves is not None and (done := leaves.num_open()):
            raise CheckpointError(
                f"after {done} of this rank's {len(handle.runtime.mesh.own_leaves)} micro-batches "
                "of a step of a reproducible model, whose gradients no checkpoint contains; save "
                "and load between steps, or drop the gradients with zero_grad()"
            )
        for managed in (one for flat in handle.unit.flats for one in flat.parameters):
            shown = managed.owners[0].get()
            if shown is not None and sharding_of(shown) is None:
                raise CheckpointError(
                    f"{managed.name} is gathered; save and load between steps, outside sw.gathered"
                )


def named_states(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state dict of ``optimizer``, with parameter names in place of parameters.

    What its state has under keys that are not parameters is in ``"other"``.
    """
    parameters = parameter_names(optimizer, model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    others = unowned_states(optimizer)
    return {
        "state": states,
        "param_groups": [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        **({"other": others} if others else {}),
    }


def _check_is_no_wrapper(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has others with states of their own, such as a `Lookahead`."""
    others = [one for one in pytree.tree_leaves(vars(optimizer)) if isinstance(one, Optimizer)]
    states = (pair for one in others for pair in one.state.items())
    if any(state != {} and optimizer.state.get(key) is not state for key, state in states):
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() has states that are not in its .state, such "
            "as those of an optimizer that it wraps; save and load that optimizer instead"
        )


@dataclass(frozen=True)
class WriteJob:
    """Everything that is needed to write a checkpoint."""

    folder: Folder
    components: Mapping[str, Component]
    slices: Slices  # this rank's slices
    retention: Retention | None

    @cached_property
    def files(self) -> list[File]:
        return [file for part in self.components.values() for file in part.files]

    @cached_property
    def numbers(self) -> dict[str, list[int]]:
        ids = tensor_ids(self.components)
        return {
            file.name: [ids[name, spec.name] for spec in file.specs]
            for name, part in self.components.items()
            for file in part.files
        }

    @property
    def others(self) -> dict[str, bytes]:
        """The files without tensors: the index of each component that is split."""
        return {
            f"{name}.safetensors.index.json": index_of(part.files)
            for name, part in self.components.items()
            if len(part.files) > 1
        }
