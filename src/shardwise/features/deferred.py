"""FSDP2's order for the meta device: shard, then ``to_empty``, then initialize.

Parameters are DTensors on the meta device at once. A module is run by the engine as soon as its
parameters get storage, each rank its own part.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.plan.plan import Plan
from shardwise.runtime.attach import show_as_sharded
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.module import FSDPModule

__all__ = ["defer", "is_deferred", "when_sharded"]

_SHARD = "_shardwise_when_it_has_storage"
_SHARDINGS = "_shardwise_shardings"  # of its parameters, by name


def is_deferred(module: nn.Module) -> bool:
    """Whether parameters of ``module`` have no storage yet."""
    return any(parameter.is_meta for parameter in module.parameters())


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
        was_meta = {name for name, parameter in self.named_parameters() if parameter.is_meta}
        super()._apply(fn, recurse)
        if was_meta and not is_deferred(self):
            with torch.no_grad():
                for name in was_meta:  # what memory happens to hold differs between ranks
                    self.get_parameter(name).zero_()
            self._shard_now()
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_deferred(self):
            name = next(name for name, p in self.named_parameters() if p.is_meta)
            raise PlanError(
                f"{name} is on the meta device; call model.to_empty(device=...) and give it "
                "values, or model.load_state_dict(..., assign=True), before the first forward"
            )
        self._shard_now()
        return self(*args, **kwargs)

    def _shard_now(self) -> None:
        for inner in reversed(list(self.modules())):  # those inside it first
            for name, sharding in inner.__dict__.pop(_SHARDINGS, {}).items():
                sharding.mark_if_described(inner.get_parameter(name))
            shard = inner.__dict__.pop(_SHARD, None)
            if shard is not None:
                inner.__class__ = type(inner).__bases__[1]
                shard()


@cache
def _deferred_class(plain: Any) -> type[nn.Module]:
    return type(plain.__name__, (Deferred, plain), {"__module__": plain.__module__})
