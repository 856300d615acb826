"""FSDP2's order for the meta device: shard, then ``to_empty``, then initialize.

A module is sharded as soon as it gets storage. `Module.to_empty` visits the innermost modules
first, and each block is cut at once, so a rank holds at most its shards and one block.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.runtime.module import FSDPModule

__all__ = ["defer", "is_deferred", "when_sharded"]

_SHARD = "_shardwise_when_it_has_storage"


def is_deferred(module: nn.Module) -> bool:
    """Whether parameters of ``module`` have no storage yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def defer(module: nn.Module, shard: Callable[[], None]) -> None:
    """Call ``shard`` when ``module`` has storage."""
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
        was_meta = [p for p in self.parameters() if p.is_meta]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not is_deferred(self):
            with torch.no_grad():
                for parameter in self._plain_parameters():
                    parameter.zero_()  # what memory happens to hold differs between ranks
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

    def _plain_parameters(self) -> list[Tensor]:
        return [p for p in self.parameters() if type(p) is nn.Parameter]

    def _shard_now(self) -> None:
        for inner in reversed(list(self.modules())):  # those inside it first
            shard = inner.__dict__.pop(_SHARD, None)
            if shard is not None:
                inner.__class__ = type(inner).__bases__[1]
                shard()


@cache
def _deferred_class(plain: Any) -> type[nn.Module]:
    return type(plain.__name__, (Deferred, plain), {"__module__": plain.__module__})
