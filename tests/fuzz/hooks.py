"""Hooks on gradients of the reference, where several micro-batches count as one."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

__all__ = ["HOOKS_RUN_ON_SUMS", "HooksOnSums"]

HOOKS_RUN_ON_SUMS = True  # of micro-batches that were held; else on each of them, as in one process

Hook = Callable[[Tensor], Tensor]


class HooksOnSums:
    """Runs hooks on what has been added to ``.grad`` since it was last complete."""

    def __init__(self) -> None:
        self._hooks: list[tuple[nn.Parameter, Hook]] = []
        self._complete: dict[nn.Parameter, Tensor | None] = {}  # as it was then

    def register(self, parameter: nn.Parameter, hook: Hook) -> None:
        if HOOKS_RUN_ON_SUMS:
            self._hooks.append((parameter, hook))
        else:
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def before_backward(self, parameters: Iterable[nn.Parameter], *, is_holding: bool) -> None:
        """Note the gradients that are complete: those before the first that is held."""
        for parameter in parameters:
            gradient = parameter.grad
            was_dropped = gradient is None or not gradient.any()
            if was_dropped or not is_holding:
                self._complete[parameter] = None if gradient is None else gradient.clone()

    @torch.no_grad()
    def run(self) -> None:
        """Run the hooks when all gradients are complete."""
        for parameter, hook in self._hooks:
            if parameter.grad is not None:
                before = self._complete.get(parameter)
                before = torch.zeros_like(parameter.grad) if before is None else before
                parameter.grad = before + hook(parameter.grad - before)
        # Later backwards have hooks of their own.
        self.before_backward(dict(self._complete), is_holding=False)

    def state(self) -> dict[nn.Parameter, Tensor | None]:
        return dict(self._complete)

    def restore(self, state: dict[nn.Parameter, Tensor | None]) -> None:
        self._complete = state
