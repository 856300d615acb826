"""Errors of types that programs written for FSDP1 catch.

::

    PlanError(ValueError)
    ├── WrapperError(RuntimeError, AssertionError)   a method of the wrong wrapper
    ├── StateError(RuntimeError)                     state dicts that do not fit
    └── UnsupportedError(NotImplementedError)        options that exclude each other
    StepError(RuntimeError)
    └── InStepError(AssertionError)                  allowed between steps only
"""

from shardwise.errors import PlanError, StepError

__all__ = ["InStepError", "StateError", "UnsupportedError", "WrapperError"]


class WrapperError(PlanError, RuntimeError, AssertionError):
    """A method was called on the wrong wrapper, or once too often.

    PyTorch raises RuntimeErrors from some of its methods here, and AssertionErrors from others.
    """


class StateError(PlanError, RuntimeError):
    """State dicts that do not fit the model or each other."""


class UnsupportedError(PlanError, NotImplementedError):
    """Options that exclude each other."""


class InStepError(StepError, AssertionError):
    """A call in a forward or backward that is allowed between steps only."""
