"""AdamW and the learning rate of each step."""

import math

import torch
from torch import nn

from shardwise.train.config import TrainConfig
from shardwise.train.models import is_matrix

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, norms do not (a sharded parameter keeps its ``ndim``)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if is_matrix(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to ``final_lr_share`` of ``lr`` at the last step.

    Args:
        step: from 1 to ``config.steps``.
        config: the schedule's numbers.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_steps = config.steps - config.warmup_steps
    progress = (step - config.warmup_steps) / decay_steps
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
