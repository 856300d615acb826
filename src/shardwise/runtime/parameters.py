"""A parameter of the user's, and its two faces: sharded between steps, dense in use."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.plan.layout import Layout
from shardwise.runtime.tensor import ShardedTensor, Sharding

__all__ = ["FSDPParameter", "ParameterOwner", "split_shard"]


class ParameterOwner:
    """A module's attribute that holds a parameter; tied parameters have several."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self._attribute = attribute
        # Recurrent layers keep a second list of their weights up to date in __setattr__.
        self._is_plain = type(module).__setattr__ is nn.Module.__setattr__

    @property
    def module(self) -> nn.Module | None:
        """None if it is gone."""
        return self._module()

    def get(self) -> Tensor | None:
        """What is there now; None if the module is gone."""
        module = self._module()
        return None if module is None else getattr(module, self._attribute)

    def put(self, parameter: nn.Parameter) -> None:
        module = self._module()
        if module is None:
            return
        if self._is_plain:
            module._parameters[self._attribute] = parameter
        else:
            setattr(module, self._attribute, parameter)


@dataclass(eq=False, slots=True)
class FSDPParameter:
    """One parameter: what the user sees between steps, and what the modules compute with."""

    sharding: Sharding
    sharded: nn.Parameter  # holds a ShardedTensor
    local: Tensor  # [run], of the shard
    dense: nn.Parameter  # [shape], of the flat buffer
    owners: Sequence[ParameterOwner]
    _version: int = 0  # of `dense`, when it was last known to be what was gathered

    @property
    def name(self) -> str:
        return self.sharding.name

    @property
    def modules(self) -> Iterator[nn.Module | None]:
        """Those that hold it."""
        return (owner.module for owner in self.owners)

    def forget_changes(self) -> bool:
        """Whether the dense parameter was changed in place since this was last asked."""
        before, self._version = self._version, self.dense._version
        return before != self._version

    def use_unsharded(self) -> None:
        """Let the modules see the dense parameter."""
        if self.dense.requires_grad != self.sharded.requires_grad:
            self._follow_requires_grad()
        for owner in self.owners:
            owner.put(self.dense)

    def use_tensor(self, tensor: Tensor) -> None:
        """Let the modules see ``tensor`` [shape], between steps."""
        parameter = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)
        for owner in self.owners:
            owner.put(parameter)

    def use_sharded(self) -> None:
        """Let them see the sharded one again."""
        for owner in self.owners:
            owner.put(self.sharded)

    def adopt(self, replacement: Tensor) -> None:
        """Copy what the user put in place of the shard into it.

        Raises:
            PlanError: it has another dtype, device or shape, or is not sharded.
        """
        fits = (
            isinstance(replacement, ShardedTensor)
            and replacement.sharding.matches(self.sharding)
            and replacement.dtype == self.local.dtype
            and replacement.device == self.local.device
        )
        if not fits or not isinstance(replacement, ShardedTensor):
            raise PlanError(
                f"{self.name} was replaced after fully_shard: expected {self.local.dtype} on "
                f"{self.local.device}, sharded; got {replacement.dtype} on {replacement.device}, "
                f"a {type(replacement).__name__}; convert and move the model before fully_shard"
            )
        with torch.no_grad():
            self.local.copy_(replacement.to_local())
        replacement.rebind(self.local)
        assert isinstance(replacement, nn.Parameter)
        self.sharded = replacement

    def _follow_requires_grad(self) -> None:
        if self.sharded.requires_grad and not self.sharding.extent.parameter.trainable:
            raise PlanError(
                f"{self.name} was frozen when it was sharded and has no room for gradients; "
                "set requires_grad before fully_shard"
            )
        self.dense.requires_grad_(self.sharded.requires_grad)


def split_shard(flat_shard: Tensor, layout: Layout, rank: int) -> Iterator[Tensor]:
    """The run of every parameter of ``layout`` in ``flat_shard`` [S] of ``rank``, as views."""
    for extent in layout.extents:
        start = layout.offset_in_shard(extent, rank)
        length = len(layout.run(extent, rank))
        yield flat_shard[start : start + length].data
