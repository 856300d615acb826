"""Exceptions at hooks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.runtime.nested import tensors_in
from tests.fuzz.build import trainable
from tests.fuzz.programs import Fault

__all__ = ["Boom", "Trigger", "arm"]


class Boom(Exception):  # noqa: N818 (it is no error)
    """What a fault raises."""


class Trigger:
    """Raises when it is pulled for the ``nth`` time."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.has_fired = False

    def pull(self, *_args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.has_fired = True
            raise Boom("a fault")

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Trigger":
        return self  # a copy of the model has the same one

    def hook_outputs(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Be pulled when backward reaches the first tensor in ``output``."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.pull)  # type: ignore[no-untyped-call]
                return


@contextlib.contextmanager
def arm(fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Trigger]:
    """Put a trigger where ``fault`` says, if this rank is one that it concerns."""
    trigger = Trigger(fault.nth)
    if fault.rank is not None and dist.get_rank() != fault.rank % dist.get_world_size():
        yield trigger
        return
    handle = _attach(trigger, fault, model, optimizer)
    try:
        yield trigger
    finally:
        handle.remove()


def _attach(
    trigger: Trigger, fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    modules = list(model.modules())
    module = modules[fault.target % len(modules)]
    parameters: list[Any] = list(trainable(model))
    parameter: Tensor = parameters[fault.target % len(parameters)]
    places: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
        "before forward": (module.register_forward_pre_hook, trigger.pull),
        "after forward": (module.register_forward_hook, trigger.pull),
        "activation": (module.register_forward_hook, trigger.hook_outputs),
        "parameter": (parameter.register_hook, trigger.pull),
        "accumulated": (parameter.register_post_accumulate_grad_hook, trigger.pull),
        "optimizer": (optimizer.register_step_pre_hook, trigger.pull),
        "stepped": (optimizer.register_step_post_hook, trigger.pull),
    }
    register, callback = places[fault.where]
    return register(callback)
