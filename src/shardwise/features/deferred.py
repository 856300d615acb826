"""FSDP2's order for the meta device: shard, then ``to_empty``, then initialize.

Parameters are DTensors on the meta device at once. A module is run by the engine as soon as its
parameters get storage, each rank its own part.
"""

from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import NotMaterialized
from shardwise.plan.plan import Plan
from shardwise.plan.units import keeps_its_class, named_parameters
from shardwise.runtime.attach import owner_of, show_as_sharded
from shardwise.runtime.module import FSDPModule
from shardwise.tensor.mesh import DataParallelMesh

if TYPE_CHECKING:
    from shardwise.tensor.sharding import Sharding

__all__ = ["defer", "is_deferred", "when_sharded"]

_SHARD = "_shardwise_when_it_has_storage"
_SHARDINGS = "_shardwise_shardings"  # of its parameters, by name


def is_deferred(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> bool:
    """Whether parameters of ``module`` have no storage yet, apart from those that are ignored."""
    return any(one.is_meta for _, one in named_parameters(module, ignored=ignored))


def defer(module: nn.Module, shard: Callable[[], None], plan: Plan, mesh: DataParallelMesh) -> None:
    """Make the parameters of ``module`` DTensors; call ``shard`` when they have storage."""
    module.__dict__[_SHARDINGS] = show_as_sharded(module, plan, mesh)
    module.__dict__[_SHARD] = shard
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
    """Mixed into a module on the meta device."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Deferred":
        """What ``to_empty`` goes through."""
        was_meta = {name for name, parameter in named_parameters(self) if parameter.is_meta}
        super()._apply(fn, recurse)
        if was_meta and not is_deferred(self):
            with torch.no_grad():
                for name in was_meta:  # what memory happens to hold differs between ranks
                    parameter = self.get_parameter(name)
                    if not keeps_its_class(parameter):
                        parameter.zero_()
            self._shard_now()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_deferred(self):
            raise NotMaterialized(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {_first_on_meta(self)}; call "
                "model.to_empty(device=...) and give them values, or "
                "model.load_state_dict(..., assign=True), before the first forward"
            )
        self._shard_now()
        return self(*args, **kwargs)

    def _shard_now(self) -> None:
        for inner in reversed(list(self.modules())):  # those inside it first
            first: dict[Sharding, nn.Parameter] = {}
            for name, sharding in inner.__dict__.pop(_SHARDINGS, {}).items():
                parameter = first.setdefault(sharding, inner.get_parameter(name))
                sharding.mark_if_described(parameter)
                owner_of(inner, name).put(parameter)  # where `assign=True` has undone a tie
            shard = inner.__dict__.pop(_SHARD, None)
            if shard is not None:
                inner.__class__ = type(inner).__bases__[1]
                shard()


def _first_on_meta(root: nn.Module) -> list[str]:
    """The parameters without storage of the first unit that has some."""
    units = [name for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    by_unit: dict[str, list[str]] = {name: [] for name in units}
    for name, parameter in root.named_parameters():
        if parameter.is_meta:
            around = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
            by_unit[max(around, key=len)].append(name)
    return next(names for names in by_unit.values() if names)


@cache
def _deferred_class(plain: Any) -> type[nn.Module]:
    return type(plain.__name__, (Deferred, plain), {"__module__": plain.__module__})
