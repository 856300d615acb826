"""The interface through which features take part in a backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.comm.communicator import Communicator
from shardwise.runtime.unit import Unit
from shardwise.schedule.passes import Call

__all__ = ["Backward", "CallObserver", "MemoryNotes", "StepLeaves", "StepObserver"]


@dataclass(frozen=True)
class Backward:
    """A backward that is about to end."""

    units: Sequence[Unit]  # all units of the model
    complete: Sequence[Unit]  # units whose gradients are reduced in this backward
    comm: Communicator
    is_shadow: bool = False  # other ranks compute it, and this rank takes part in its collectives


class StepObserver:
    """Is called by the scheduler in each backward. All ranks have observers of the same class.

    The methods of this base class do nothing.
    """

    steps_in_backward = False  # whether it steps units in backward

    def before_reduce(self, unit: Unit) -> None:
        """The gradients of ``unit`` are about to be reduced."""

    def after_reduce(self, unit: Unit, comm: Communicator) -> None:
        """A reduction over all ranks was launched."""

    def step(self, unit: Unit, comm: Communicator) -> None:
        """The gradients of ``unit`` are complete. Called only if it ``steps_in_backward``."""

    def reductions_launched(self, backward: Backward) -> None:
        """The last reduction was launched; every rank may launch a collective here."""

    def step_end(self, backward: Backward) -> None:
        """All parameters have their reduced gradients."""

    def failed(self) -> Sequence[object]:
        """The step raised. Returns the owners of memory to which other ranks may still write."""
        return ()


class CallObserver:
    """Follows the calls of units. The methods of this base class do nothing."""

    is_shadow = False  # this rank computes nothing, and takes part in what other ranks compute

    def before_forward(self, unit: int) -> None:
        """An outermost forward begins, of ``unit``; nothing has been gathered for it."""

    def entered(self, call: Call) -> None:
        """A forward of a unit began."""

    def left(self, call: Call) -> None:
        """A forward of a unit ended."""

    def reached(self, call: Call, *, is_first: bool) -> None:
        """Backward reached ``call``; ``is_first``: it has gathered and reduced nothing before."""

    def began_inner_backward(self) -> None:
        """A backward began inside the one that is running, as in reentrant checkpointing."""

    def ending_backward(self, *, is_inner: bool) -> None:
        """Backward has reached the last call that it reaches."""

    def ended_backward(self) -> None:
        """The gradients of a backward that is not inside another one are complete."""


class StepLeaves(Protocol):
    """The backwards on this rank of a step of a reproducible model ("leaves")."""

    num_done: int  # of this step

    def began(self, *, checks_last_step: bool = False) -> None:
        """An outermost forward or backward begins."""

    def check_calls(self) -> None:
        """Raise a StepError if the running backward is that of several forwards of a unit."""

    def ended(self) -> None:
        """A backward has ended."""

    def num_open(self) -> int:
        """The leaves of an incomplete step that this rank has run, between backwards."""

    def refuse_conversion(self) -> None:
        """Raise a StepError, as leaves of a step have run, and the model is to be converted."""

    def dropped(self) -> None:
        """All accumulated gradients were dropped, so the step begins anew."""


class MemoryNotes:
    """Explains out-of-memory errors of a step. The methods of this base class do nothing."""

    def forget(self) -> None:
        """A step begins."""

    def note(self, error: BaseException, where: str) -> None:
        """Add to ``error`` what uses memory, if it is an out-of-memory error."""

    def remember(self, where: str) -> None:
        """A backward has raised; `note` may get its exception later, when memory is free again."""
