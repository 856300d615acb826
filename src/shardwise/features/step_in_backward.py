"""Optimizer steps during backward: each unit steps as soon as its gradients are reduced.

An optimizer skips parameters without gradients. While only one unit has gradients, a step of the
user's optimizer therefore updates that unit alone. The optimizer's groups, states and learning
rate schedulers work as usual.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import torch

from shardwise.errors import StepError
from shardwise.features.unused import (
    Unused,
    UsedParameterSync,
    check_all_used,
    gradients_of,
    settle,
)
from shardwise.runtime.observer import Backward, StepObserver
from shardwise.runtime.parameters import FSDPParameter
from shardwise.runtime.unit import Unit
from shardwise.transport.communicator import Communicator

__all__ = ["Stepper"]


class Stepper(StepObserver):
    """Steps the units of one model and drops their gradients.

    Args:
        step: updates the given parameters; no other parameter has a gradient at that time.
        unused: as in `fully_shard`.
        device: the model's device.
    """

    steps_units = True

    def __init__(
        self,
        step: Callable[[Sequence[FSDPParameter]], None],
        unused: Unused,
        device: torch.device,
    ) -> None:
        self._step = step
        self._unused = unused
        self._device = device
        self._collected: dict[Unit, None] = {}  # units that have gradients
        self._stepped: set[Unit] = set()  # units that stepped in the current backward
        # One sync per reduction: only the last one counts, but the device uses the memory of all.
        self._syncs: defaultdict[Unit, list[UsedParameterSync]] = defaultdict(list)
        self._used: dict[Unit, list[bool]] = {}  # parameters this rank used in this backward

    def before_reduce(self, unit: Unit) -> None:
        """Raise a StepError if ``unit`` has already stepped in this backward."""
        if unit in self._stepped:
            raise StepError(
                f"{unit.plan.label}: gradients came after sw.optimizer_in_backward had stepped "
                "this unit, because backward recomputed a forward whose use of it had not been "
                "recorded. Run checkpointed units inside the forward of the model, or call "
                "optimizer.step() after backward"
            )

    def after_reduce(self, unit: Unit, links: Communicator) -> None:
        """Start the exchange of used parameters right after the reduction of ``unit``."""
        if self._unused != "zeros":
            self._used[unit] = _used_of(unit)
            label = f"agree on unused parameters of {unit.plan.label}"
            self._syncs[unit].append(UsedParameterSync([unit], links, self._device, label))

    def collected(self, unit: Unit) -> None:
        """Record that the parameters of ``unit`` have gradients; more may still be added."""
        self._collected[unit] = None

    def step(self, unit: Unit, links: Communicator) -> None:
        """Step ``unit`` and free its gradients."""
        if self._unused == "zeros":
            settle(gradients_of([unit]), repeat(True))
        else:
            self._syncs[unit][-1].settle(links)
            del self._syncs[unit]  # only now: if the wait raises, they are still in flight
        self._update(unit)

    def step_end(self, backward: Backward) -> None:
        """At the end of backward, step units that did not run, or raise, as ``unused`` says."""
        units = backward.complete
        late = [unit for unit in units if unit not in self._stepped]
        used, self._used = self._used, {}
        if self._unused == "error":
            self._stepped.clear()
            parameters = [p for gradients in gradients_of(units) for p in gradients.parameters]
            used_here = [u for unit in units for u in used.get(unit, _used_of(unit))]
            check_all_used(parameters, used_here, backward.links, self._device)
        for unit in late if self._unused == "zeros" else ():
            for gradients in gradients_of([unit]):
                gradients.fill_with_zeros()
                gradients.forget()
            self._update(unit)  # one at a time: the optimizer steps everything with a gradient
        self._stepped.clear()

    def failed(self) -> list[object]:
        in_flight: list[object] = [
            sync.abandon() for syncs in self._syncs.values() for sync in syncs
        ]
        for state in (self._collected, self._stepped, self._syncs, self._used):
            state.clear()
        return in_flight

    def _update(self, unit: Unit) -> None:
        self._collected.pop(unit, None)
        with_gradients = [p for p in unit.parameters if p.sharded.grad is not None]
        try:
            if with_gradients:
                self._stepped.add(unit)
                with self._without_others():
                    self._step(with_gradients)
        finally:
            for gradients in gradients_of([unit]):
                gradients.drop()

    @contextlib.contextmanager
    def _without_others(self) -> Iterator[None]:
        """Hide the gradients of other units, which wait for more of them."""
        others = [p.sharded for unit in self._collected for p in unit.parameters]
        kept = [(parameter, parameter.grad) for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient


def _used_of(unit: Unit) -> list[bool]:
    return [used for gradients in gradients_of([unit]) for used in gradients.used]
