"""Errors of FSDP1's methods, of every type that programs may catch."""

from shardwise.errors import PlanError

__all__ = ["WrapperError"]


class WrapperError(PlanError, RuntimeError, AssertionError):
    """A method was called on the wrong wrapper, or once too often.

    PyTorch raises RuntimeErrors from some of its methods here, and AssertionErrors from others.
    """
