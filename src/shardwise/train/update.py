"""From gradients to new parameters: scale, clip, step."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import shardwise as sw
from shardwise.train.config import Config
from shardwise.train.optimizer import build_optimizer, set_learning_rate

__all__ = ["Update"]


class Update:
    """The optimizer of a run and what stands around it.

    With ``memory.step_in_backward`` the parameters are new when backward ends, and nothing is known
    of the norm of all gradients. In float16, losses are scaled so that gradients do not vanish, and
    a step is skipped when they overflow.
    """

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.optimizer = build_optimizer(model, config.train)
        self._model = model
        self._max_norm = config.train.grad_clip or math.inf
        self._scaler = GradScaler(device.type, enabled=config.precision.compute == "float16")
        self._in_backward = config.memory.step_in_backward
        if self._in_backward:
            sw.optimizer_in_backward(model, self.optimizer)

    @property
    def loss_scale(self) -> float | None:
        """By what losses are multiplied; None where they are not."""
        return self._scaler.get_scale() if self._scaler.is_enabled() else None

    def scaler_state(self) -> dict[str, Any]:
        """The scale and what it follows from; nothing where there is none."""
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Go on with what `scaler_state` gave; with a new scale if that was of another dtype."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)

    def begin(self, lr: float) -> None:
        """Before the first backward of a step."""
        set_learning_rate(self.optimizer, lr)

    def scale(self, loss: Tensor) -> Tensor:
        """What to call ``backward`` of."""
        return self._scaler.scale(loss)

    def finish(self) -> Tensor | None:
        """After the last backward; the norm of the gradients before clipping, where it is known."""
        if self._in_backward:
            return None
        self._scaler.unscale_(self.optimizer)
        norm = sw.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        return norm
