"""Policies for keeping shards in host memory."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

from shardwise.errors import PlanError

__all__ = ["NO_OFFLOAD", "CPUOffloadPolicy", "OffloadPolicy", "as_offload_policy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload, as in FSDP2: shards stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards and the optimizer state in host memory. Extends FSDP2's policy.

    Args:
        pin_memory: use page-locked memory. Without it, copies to and from a GPU are slow and block
            the host. It has no effect if the model computes on the CPU.
        parameters: gather from host memory. False keeps a copy of the rank's shards on the device
            as well, in the compute dtype, updated once per forward: more memory, fewer copies.
        step: where the optimizer runs. ``"host"``: on the CPU, and gradients are in host memory,
            too; it is fast with ``AdamW(..., fused=True)`` and several threads, and its first step
            warns without them. ``"device"``: on the device, unit by unit; shards and states of at
            most three units are there at a time, and gradients stay there. It takes optimizers that
            treat every element alone: most of torch's, and classes that set ``steps_units = True``.
            docs/large-models.md compares the two.

    Raises:
        PlanError: ``step`` is another word.
    """

    pin_memory: bool = True
    parameters: bool = True
    step: Literal["host", "device"] = "host"

    def __post_init__(self) -> None:
        if self.step not in ("host", "device"):
            raise PlanError(f"CPUOffloadPolicy(step={self.step!r}): expected 'host' or 'device'")


NO_OFFLOAD = OffloadPolicy()


def as_offload_policy(policy: object) -> OffloadPolicy:
    """Return ``policy``, or the equivalent of a policy of PyTorch, recognized by its fields.

    None is no offload, as in FSDP2.

    Raises:
        PlanError: ``policy`` is neither.
    """
    if policy is None:
        return NO_OFFLOAD
    if isinstance(policy, OffloadPolicy):
        return policy
    names = [field.name for field in fields(policy)] if is_dataclass(policy) else None
    if names == []:  # PyTorch's OffloadPolicy has no field, its CPUOffloadPolicy one
        return NO_OFFLOAD
    if names == ["pin_memory"]:
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)  # type: ignore[attr-defined]
    raise PlanError(
        f"offload_policy: expected an OffloadPolicy, got {policy!r}; pass sw.CPUOffloadPolicy() or "
        "PyTorch's"
    )
