"""Models of repeated blocks: traced with a few of them, and repeated to their depth.

A model of 126 blocks is traced with its first and last block and one block between them for each
kind that is there: blocks differ by their class, by the shapes of their parameters, and by what
activation checkpointing keeps of them.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["Stack", "find_stacks", "sample_of", "with_blocks"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Stack:
    """A container of blocks that are much the same."""

    name: str
    kinds: tuple[Hashable, ...]  # of its blocks

    @property
    def blocks(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(f"{self.name}.{number}" for number in range(len(self.kinds)))


def find_stacks(module: nn.Module, prefix: str = "") -> list[Stack]:
    """The outermost containers of blocks of one class, which ``units="auto"`` finds as well."""
    found: list[Stack] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        kinds = [_kind_of(block) for block in child.children()]
        is_stack = (
            isinstance(child, _CONTAINERS)
            and len({type(block).__qualname__ for block in child.children()}) == 1 < len(kinds)
            and all(kinds)
        )
        if is_stack:
            found.append(Stack(path, tuple(kinds)))
        else:
            found += find_stacks(child, f"{path}.")
    return found


def _kind_of(block: nn.Module) -> Hashable:
    return tuple((name, tuple(one.shape)) for name, one in block.named_parameters())


def sample_of(kinds: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The blocks to trace, and for each block which of those it is like."""
    last = len(kinds) - 1
    chosen = {0: 0} | {last: last}
    between: dict[Hashable, int] = {}
    for number in range(1, last):
        between.setdefault(kinds[number], number)
    traced = sorted({*chosen, *between.values()})
    like = [0, *(traced.index(between[kinds[n]]) for n in range(1, last)), len(traced) - 1]
    return traced, like


def with_blocks(module: nn.Module, chosen: Mapping[str, Sequence[int]]) -> nn.Module:
    """A model with only some blocks of its stacks; it shares them with ``module``."""
    memo: dict[int, object] = {}
    for name, numbers in chosen.items():
        stack = module.get_submodule(name)
        blocks = list(stack.children())
        fewer = copy.copy(stack)
        fewer._modules = {str(index): blocks[number] for index, number in enumerate(numbers)}
        memo[id(stack)] = fewer
    return copy.deepcopy(module, memo)
