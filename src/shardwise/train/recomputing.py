"""Activation checkpointing and compilation of the blocks, as the configuration describes them."""

from torch import nn

from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.plan.policies import choose_units
from shardwise.train.config import MemoryConfig

__all__ = ["modes_of", "prepare_blocks"]


def prepare_blocks(model: nn.Module, memory: MemoryConfig, *, compiles: bool = False) -> None:
    """Make every n-th block of ``model`` keep fewer activations, and compile all blocks."""
    blocks = choose_units(model, "auto")[1:] if memory.checkpoint_every or compiles else []
    if memory.checkpoint_every:
        checkpoint_blocks(model, modes_of(memory, len(blocks)))
    for name in blocks if compiles else ():
        model.get_submodule(name).compile()


def modes_of(memory: MemoryConfig, num_blocks: int) -> tuple[str, ...]:
    every = memory.checkpoint_every
    return tuple(
        memory.checkpoint if every and number % every == 0 else "none"
        for number in range(1, num_blocks + 1)
    )
