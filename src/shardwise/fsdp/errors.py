"""Errors of the types that programs written for PyTorch's FSDP1 and FSDP2 catch.

::

    PlanError(ValueError)
    ├── WrapperError(RuntimeError, AssertionError)   a module that the call is not for
    ├── StateError(RuntimeError)                     state dicts that do not fit
    └── UnsupportedError(NotImplementedError)        options or parameters that are not supported
    StepError(RuntimeError)
    └── InStepError(AssertionError)                  allowed between steps only
"""

from shardwise.errors import PlanError, StepError

__all__ = ["InStepError", "StateError", "UnsupportedError", "WrapperError"]


class WrapperError(PlanError, RuntimeError, AssertionError):
    """A call that does not fit the module: of an inner wrapper, of a sharded one, or a second time.

    PyTorch raises RuntimeErrors in some of these cases, and AssertionErrors in others.
    """


class StateError(PlanError, RuntimeError):
    """State dicts that do not fit the model or each other."""


class UnsupportedError(PlanError, NotImplementedError):
    """Options that exclude each other, or a parameter that FSDP2 cannot shard either."""


class InStepError(StepError, AssertionError):
    """A call in a forward or backward that is allowed between steps only."""
