"""Copies of everything that a step changes, so that the step can be undone.

Values are restored into the objects that held them. A parameter, state or buffer remains the same
tensor, so other references to it stay valid.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.comm.device import random_states, set_random_states
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.scheduler import Scheduler
from shardwise.tensor.sharding import local_of

__all__ = ["AccumulationSnapshot", "ModelSnapshot", "OptimizerSnapshot"]


class ModelSnapshot:
    """Gradients and buffers of a model before forward, and torch's random states.

    Parameters are not copied, because only an optimizer should change them; see
    `changed_parameters`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parameters = [(name, p, p._version) for name, p in model.named_parameters()]
        self._gradients = [(p, _clone_or_none(p.grad)) for _, p, _ in self._parameters]
        self._buffers = [
            (module, name, buffer, _clone_or_none(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._random_states = random_states(device)

    def changed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that have been written to since the snapshot, by name."""
        return {name: p for name, p, version in self._parameters if p._version != version}

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            # `AccumulationSnapshot` restores those without elements.
            parameter.grad = gradient
        for module, name, buffer, values in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)
        set_random_states(self._device, self._random_states)


class AccumulationSnapshot:
    """Gradients of earlier micro-batches that are not reduced yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_leaves_done = 0 if scheduler.leaves is None else scheduler.leaves.num_done
        self._awaiting = scheduler.sequencer.awaiting_reduction
        all_gradients = [gradients for unit in scheduler.units for gradients in unit.gradients]
        self._copies = [(one, one.snapshot()) for one in all_gradients]

    def restore(self) -> None:
        """Restore them, after `ModelSnapshot` has restored the others."""
        self._scheduler.sequencer.awaiting_reduction = self._awaiting
        if self._scheduler.leaves is not None:
            self._scheduler.leaves.num_done = self._num_leaves_done
        for gradients, copy_of_it in self._copies:
            gradients.restore(copy_of_it)


class OptimizerSnapshot:
    """An optimizer's groups, copied at once, and its parameters and states, copied on demand.

    Attributes:
        parameters: copies of this rank's runs of the parameters.
        is_complete: whether parameters and states have been copied, so that the optimizer may step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            (_Entries({k: v for k, v in group.items() if k != "params"}), list(group["params"]))
            for group in optimizer.param_groups
        ]
        self._states: dict[Tensor, _Entries] = {}
        self.parameters: dict[Tensor, Tensor] = {}
        self.is_complete = False

    @torch.no_grad()
    def complete_before_step(self, *_args: object) -> None:
        """Copy parameters and states before the optimizer's first step changes them."""
        if self.is_complete:
            return
        self._states = {p: _Entries(state) for p, state in self._optimizer.state.items()}
        groups = self._optimizer.param_groups
        self.parameters = {p: _run(p).clone() for group in groups for p in group["params"]}
        self.is_complete = True

    @torch.no_grad()
    def restore(self) -> None:
        groups = self._optimizer.param_groups
        del groups[len(self._groups) :]
        for group, (entries, parameters) in zip(groups, self._groups, strict=True):
            entries.restore(group)
            group["params"] = parameters
        if not self.is_complete:
            return
        for parameter, values in self.parameters.items():
            _write(parameter, values)
        state = self._optimizer.state
        for parameter in state.keys() - self._states.keys():
            del state[parameter]
        for parameter, entries in self._states.items():
            entries.restore(state[parameter])


class _Entries:
    """The entries of a dict: its tensors with copies of their values, and copies of the rest."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._values = {
            key: (value, _run(value).clone())
            if isinstance(value, Tensor)
            else (copy.deepcopy(value), None)
            for key, value in entries.items()
        }

    def restore(self, entries: dict[str, Any]) -> None:
        entries.clear()
        for key, (value, values) in self._values.items():
            if values is not None:
                _write(value, values)
            entries[key] = value


def _run(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _write(tensor: Tensor, values: Tensor) -> None:
    _run(tensor).copy_(values)
    if isinstance(tensor, DTensor):
        torch.autograd.graph.increment_version(tensor)


def _clone_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or is_unreduced(tensor) else tensor.detach().clone()
