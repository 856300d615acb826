"""Models of repeated blocks: a few blocks are traced, and the trace is repeated to the full depth.

A model of 126 blocks is traced with its first block, its last block and one block of each kind in
between. Blocks are of different kinds if they differ in class, in their parameters, in activation
checkpointing, or in whether a block before them is trained.
"""

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

__all__ = ["Stack", "find_stacks", "on_meta", "sample_of", "with_blocks"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class Stack:
    """A container of similar blocks."""

    name: str
    kinds: tuple[Hashable, ...]  # the kind of each block
    children: tuple[str, ...]  # the name of each block in the container

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks."""
        return tuple(f"{self.name}.{child}" for child in self.children)

    def is_repeatable(self, units: Sequence[str]) -> bool:
        """Whether a trace of some blocks can be repeated: they have numbers, and contain units."""
        is_numbered = self.children == tuple(map(str, range(len(self.children))))
        return is_numbered and all(
            any(f"{unit}.".startswith(f"{block}.") for unit in units) for block in self.blocks
        )


def find_stacks(module: nn.Module, prefix: str = "") -> list[Stack]:
    """Return the outermost containers of blocks of one class, as ``units="auto"`` finds them."""
    found: list[Stack] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        kinds = [_kind_of(block) for block in child.children()]
        trained = accumulate(map(_is_trained, child.children()), or_, initial=False)
        is_stack = (
            isinstance(child, _CONTAINERS)
            and len({type(block).__qualname__ for block in child.children()}) == 1 < len(kinds)
            and all(kinds)
        )
        if is_stack:
            names = tuple(name for name, _ in child.named_children())
            found.append(Stack(path, tuple(zip(kinds, trained, strict=False)), names))
        else:
            found += find_stacks(child, f"{path}.")
    return found


def _kind_of(block: nn.Module) -> Hashable:
    return tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )


def _is_trained(block: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in block.parameters())


def sample_of(kinds: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Choose the blocks to trace.

    Returns:
        The numbers of the blocks to trace, and for each block the index of its representative
        among them.
    """
    last = len(kinds) - 1
    between: dict[Hashable, int] = {}
    for number in range(1, last):
        between.setdefault(kinds[number], number)
    traced = sorted({0, last, *between.values()})
    order = [0, *(traced.index(between[kinds[n]]) for n in range(1, last)), len(traced) - 1]
    return traced, order


def with_blocks(module: nn.Module, chosen: Mapping[str, Sequence[int]]) -> nn.Module:
    """Copy ``module`` with only some blocks of its stacks; the copy shares these blocks."""
    memo: dict[int, object] = {}
    for name, numbers in chosen.items():
        stack = module.get_submodule(name)
        blocks = list(stack.children())
        fewer = copy.copy(stack)
        fewer._modules = {str(index): blocks[number] for index, number in enumerate(numbers)}
        memo[id(stack)] = fewer
    return copy.deepcopy(module, memo)


def on_meta(module: nn.Module, dtypes: Mapping[str, str] = MappingProxyType({})) -> nn.Module:
    """Copy ``module`` to the meta device, with new dtypes for the named parameters."""
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        dtype = getattr(torch, dtypes[name]) if name in dtypes else parameter.dtype
        meta = torch.empty_like(parameter, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)
