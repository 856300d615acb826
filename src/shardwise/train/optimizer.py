"""From gradients to updated parameters: AdamW, its schedule, clipping and loss scaling."""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from shardwise.train.config import Config, TrainConfig

__all__ = ["Updater", "build_optimizer", "build_scheduler"]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW with weight decay for matrices alone; a sharded parameter keeps its ``ndim``."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, *, after: int = 0
) -> LambdaLR:
    """Linear warm-up, then cosine decay to ``final_lr_share`` of ``lr`` at the last step.

    The rate is a function of the step alone, so a resumed run may have other ``steps`` and ``lr``
    than its checkpoint.

    Args:
        optimizer: whose rates are set to that of step ``after + 1``.
        config: lr, steps, warmup_steps and final_lr_share.
        after: the last step that is done.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = config.lr
    return LambdaLR(optimizer, partial(_lr_factor, config), last_epoch=after - 1)


def _lr_factor(config: TrainConfig, done: int) -> float:
    step = min(done + 1, config.steps)
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.final_lr_share + (1 - config.final_lr_share) * cosine


class Updater:
    """The optimizer of a run, its schedule, clipping and loss scale.

    With ``memory.step_in_backward`` parameters are updated during backward, so the gradient norm
    is not known. In float16 the loss is scaled so that gradients do not underflow, and steps whose
    gradients overflow are skipped.
    """

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.optimizer = build_optimizer(model, config.train)
        self._config = config
        self._model = model
        self._scaler = GradScaler(device.type, enabled=config.precision.compute == "float16")
        self._scheduler = build_scheduler(self.optimizer, config.train)
        if config.memory.step_in_backward:
            sw.optimizer_in_backward(model, self.optimizer)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        [lr, *_] = self._scheduler.get_last_lr()
        return float(lr)

    @property
    def loss_scale(self) -> float | None:
        """The factor that losses are multiplied with; None unless in float16."""
        return self._scaler.get_scale() if self._scaler.is_enabled() else None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on."""
        return self._scaler.scale(loss)

    def step(self) -> Tensor | None:
        """Update the parameters after the last backward of a step.

        Returns:
            The gradient norm before clipping; None with ``memory.step_in_backward``.
        """
        norm = None
        if not self._config.memory.step_in_backward:
            self._scaler.unscale_(self.optimizer)
            max_norm = self._config.train.grad_clip or math.inf
            norm = sw.clip_grad_norm_(self._model.parameters(), max_norm)
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad()
        with warnings.catch_warnings():  # in float16 the first steps may be skipped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._scheduler.step()
        return norm

    def state(self) -> dict[str, Any]:
        """The loss scale and its history; empty unless in float16."""
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def resume(self, step: int, state: dict[str, Any]) -> None:
        """Continue after ``step``; the state of another dtype's run is ignored."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)
        self._scheduler = build_scheduler(self.optimizer, self._config.train, after=step)
