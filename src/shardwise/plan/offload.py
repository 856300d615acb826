"""What a rank keeps in the memory of the host instead of its device."""

from dataclasses import dataclass, fields, is_dataclass

from shardwise.errors import PlanError

__all__ = ["NO_OFFLOAD", "CPUOffloadPolicy", "OffloadPolicy", "as_offload_policy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: shards stay on the device that computes. As FSDP2's."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and the optimizer state in host memory. Extends FSDP2's.

    The three go together: torch keeps a gradient on the device of its parameter, and optimizers
    keep their state there, too. So the CPU runs the optimizer; ``AdamW(..., fused=True)`` is fast.

    Args:
        pin_memory: use page-locked memory. Without it, a GPU's copies are slow and block the host.
            It has no effect if the model computes on the CPU.
        parameters: gather from host memory. False keeps a copy of the rank's shards on the device
            as well, in the compute dtype, updated once per forward: more memory, fewer copies.
    """

    pin_memory: bool = True
    parameters: bool = True


NO_OFFLOAD = OffloadPolicy()


def as_offload_policy(policy: object) -> OffloadPolicy:
    """``policy``, or the equivalent of PyTorch's own, by its fields.

    Raises:
        PlanError: it is neither.
    """
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
