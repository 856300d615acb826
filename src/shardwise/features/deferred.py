"""Sharding of meta-device models in FSDP2's order: shard, then ``to_empty``, then initialize.

Parameters become DTensors on the meta device immediately. The engine takes over a module when its
parameters get storage; each rank allocates its own shards only.

If the module has values on some ranks, it is their shards that become DTensors there. The engine
then takes over when the module is used, which all ranks do together.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import NotMaterialized
from shardwise.features.extensions import stored_part_of
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.initialize import innermost_unit
from shardwise.plan.plan import Plan
from shardwise.plan.units import keeps_its_class, named_parameters
from shardwise.runtime.attach import owner_of, parameter_of, put_sharded
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import sharding_for
from shardwise.tensor.sharding import Sharding, local_of, sharding_of

__all__ = ["defer", "is_deferred", "when_sharded"]

# Attributes of a deferred module.
_SHARD = "_shardwise_deferred_shard"  # the function that shards the module
_SHARDINGS = "_shardwise_deferred_shardings"  # the Sharding of each parameter, by name
_ONCE_USED = "_shardwise_deferred_once_used"  # see `defer`


def is_deferred(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> bool:
    """Whether any parameter of ``module`` outside ``ignored`` has no storage yet."""
    return any(parameter.is_meta for _, parameter in named_parameters(module, ignored=ignored))


def defer(
    module: nn.Module,
    shard: Callable[[], None],
    plan: Plan,
    mesh: DataParallelMesh,
    *,
    once_used: bool,
) -> None:
    """Make the parameters of ``module`` DTensors now, and call ``shard`` once they have storage.

    ``once_used``: call it only when the module is used.
    """
    module.__dict__[_SHARDINGS] = _show_as_sharded(module, plan, mesh)
    module.__dict__[_SHARD] = shard
    module.__dict__[_ONCE_USED] = once_used
    module.__class__ = _deferred_class(type(module))  # type: ignore[arg-type]


def when_sharded(module: nn.Module, action: Callable[[], None]) -> None:
    """Call ``action`` now, or after ``module`` has been sharded."""
    shard = module.__dict__.get(_SHARD)
    if shard is None:
        action()
        return

    def shard_and_act() -> None:
        shard()
        action()

    module.__dict__[_SHARD] = shard_and_act


class Deferred(FSDPModule):
    """Mixin for a module on the meta device that is sharded when it gets storage."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Deferred":
        """Apply ``fn``, as ``to_empty`` does, and shard the module once it has storage."""
        was_meta = {name for name, parameter in named_parameters(self) if parameter.is_meta}
        super()._apply(fn, recurse)
        if was_meta and not is_deferred(self):
            with torch.no_grad():
                for name in was_meta:  # uninitialized memory differs between ranks
                    parameter = parameter_of(self, name)
                    if not keeps_its_class(parameter):
                        parameter.zero_()
            if not self.__dict__[_ONCE_USED]:
                self._shard_now()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._shard_now()
        return self(*args, **kwargs)

    def _shard_now(self) -> None:
        """Shard the module and those inside it.

        Raises:
            NotMaterialized: parameters have no storage yet.
        """
        if is_deferred(self):
            raise NotMaterialized(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {_first_on_meta(self)}; call "
                "model.to_empty(device=...) and give them values, or "
                "model.load_state_dict(..., assign=True), before the first forward"
            )
        for inner in reversed(list(self.modules())):  # inner modules first
            first: dict[Sharding, nn.Parameter] = {}
            for name, sharding in inner.__dict__.pop(_SHARDINGS, {}).items():
                parameter = first.setdefault(sharding, parameter_of(inner, name))
                sharding.attach_if_described(parameter)
                owner_of(inner, name).put(parameter)  # ties again what `assign=True` has untied
            inner.__dict__.pop(_ONCE_USED, None)
            shard = inner.__dict__.pop(_SHARD, None)
            if shard is not None:
                inner.__class__ = type(inner).__bases__[1]
                shard()


def _show_as_sharded(root: nn.Module, plan: Plan, mesh: DataParallelMesh) -> Mapping[str, Sharding]:
    """Make the parameters of ``root`` DTensors; return their Shardings by name.

    Parameters on the meta device stay there; others become this rank's shards.
    """
    shardings: dict[str, Sharding] = {}
    extents = [
        (unit, layout, extent)
        for unit in plan.units
        for layout in unit.layouts
        for extent in layout.extents
    ]
    for unit, layout, extent in extents:
        original = parameter_of(root, extent.parameter.name)
        sharding = sharding_of(original)
        if sharding is None:  # otherwise the parameter belongs to a unit inside ``root``
            sharding = sharding_for(unit, layout, extent, mesh, original)
            if layout.is_extended:
                part: Tensor = stored_part_of(original, sharding)
            else:
                part = sharding.empty(getattr(torch, layout.dtype), torch.device("meta"))
                if not original.is_meta:
                    to_accelerator = mesh.accelerator is not None and unit.offload is None
                    device = mesh.accelerator if to_accelerator else original.device
                    part = torch.empty_like(part, device=device)
                    own = sharding.own_part_of(local_of(original).detach())
                    local = local_of(part)
                    local.copy_(own.reshape(local.shape))
            put_sharded(root, original, sharding, part)
        shardings.update(dict.fromkeys(extent.parameter.names, sharding))
    return shardings


def _first_on_meta(root: nn.Module) -> list[str]:
    """Names of the parameters without storage in the first unit that has any."""
    modules = root.named_modules()
    by_unit: dict[str, list[str]] = {name: [] for name, m in modules if isinstance(m, FSDPModule)}
    for name, parameter in root.named_parameters():
        if parameter.is_meta:
            by_unit[innermost_unit(name, by_unit)].append(name)
    return next(names for names in by_unit.values() if names)


@cache
def _deferred_class(plain: Any) -> type[nn.Module]:
    return type(f"FSDP{plain.__name__}", (Deferred, plain), {"__module__": plain.__module__})
