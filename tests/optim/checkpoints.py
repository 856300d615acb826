"""Checkpoints of a model and its optimizer, by shardwise and by torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

import shardwise as sw

__all__ = ["load_one", "save_both"]


def save_both(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a checkpoint of each kind."""
    sw.save(path / "ours", model=model, optimizer=optimizer)
    save(_state(model, optimizer), checkpoint_id=path / "torch")


def load_one(path: Path, model: nn.Module, optimizer: Optimizer, *, by_torch: bool) -> None:
    """Load one of those that `save_both` wrote."""
    if by_torch:
        state = _state(model, optimizer)
        load(state, checkpoint_id=path / "torch")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    else:
        sw.load(path / "ours", model=model, optimizer=optimizer)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
