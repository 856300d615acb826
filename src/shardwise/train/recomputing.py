"""Activation checkpointing as [memory] describes it."""

from torch import nn

from shardwise.forecast.recomputing import checkpoint_blocks
from shardwise.plan.policies import choose_units
from shardwise.train.config import MemoryConfig

__all__ = ["modes_of", "recompute"]


def recompute(model: nn.Module, memory: MemoryConfig) -> None:
    """Make every n-th block of ``model`` keep fewer activations."""
    if memory.checkpoint_every:
        blocks = choose_units(model, "auto")[1:]
        checkpoint_blocks(model, modes_of(memory, len(blocks)))


def modes_of(memory: MemoryConfig, num_blocks: int) -> tuple[str, ...]:
    """The mode of each of ``num_blocks`` blocks."""
    every = memory.checkpoint_every
    return tuple(
        memory.checkpoint if every and number % every == 0 else "none"
        for number in range(1, num_blocks + 1)
    )
