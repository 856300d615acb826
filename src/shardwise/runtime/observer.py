"""What a feature may do in a backward: the scheduler calls an observer and knows none by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.runtime.unit import Unit
from shardwise.transport.communicator import Communicator

__all__ = ["Backward", "StepObserver"]


@dataclass(frozen=True)
class Backward:
    """One backward that is about to end."""

    units: Sequence[Unit]  # all of the model
    complete: Sequence[Unit]  # those whose gradients wait for no later backward
    links: Communicator


class StepObserver:
    """Decides what becomes of reduced gradients. All ranks have observers of the same kind.

    Its methods do nothing, for features that need only some of them.
    """

    steps_units = False  # whether an optimizer steps units in backward

    def before_reduce(self, unit: Unit) -> None:
        """The gradients of ``unit`` are about to be reduced."""

    def after_reduce(self, unit: Unit, links: Communicator) -> None:
        """A reduction over all ranks was launched."""

    def collected(self, unit: Unit) -> None:
        """The reduced gradients of ``unit`` are with its parameters, and more may come."""

    def step(self, unit: Unit, links: Communicator) -> None:
        """All gradients of ``unit`` are with its parameters; called if it ``steps_units``."""

    def reductions_launched(self, backward: Backward) -> None:
        """The last reduction was launched, at the same place among collectives on every rank."""

    def step_end(self, backward: Backward) -> None:
        """All reduced gradients are with the parameters."""

    def failed(self) -> Sequence[object]:
        """The step raised; returns objects that own memory which other ranks may still write to."""
        return ()
