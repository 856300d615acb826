"""Errors with the types that programs written for PyTorch's FSDP1 and FSDP2 catch.

::

    PlanError(ValueError)
    ├── WrapperError(RuntimeError, AssertionError)   the call does not fit the module
    ├── StateError(RuntimeError)                     state dicts do not fit
    └── UnsupportedError(NotImplementedError)        options or parameters that are not supported
    StepError(RuntimeError)
    └── InStepError(AssertionError)                  the call is allowed only between steps
"""

from shardwise.errors import PlanError, StepError

__all__ = ["InStepError", "StateError", "UnsupportedError", "WrapperError"]


class WrapperError(PlanError, RuntimeError, AssertionError):
    """A call on an inner wrapper, on a module that is already sharded, or for a second time.

    PyTorch raises a RuntimeError in some of these cases and an AssertionError in others.
    """


class StateError(PlanError, RuntimeError):
    """State dicts that do not fit the model or each other."""


class UnsupportedError(PlanError, NotImplementedError):
    """Options that exclude each other, or a parameter that FSDP2 cannot shard either."""


class InStepError(StepError, AssertionError):
    """A call in a forward or backward that is allowed only between steps."""
