"""AdamW and its schedule."""

import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from shardwise.train.config import TrainConfig

__all__ = ["build_optimizer", "build_scheduler"]


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
