"""What a rank keeps in the memory of the host instead of its device."""

from dataclasses import dataclass, fields, is_dataclass

from shardwise.errors import PlanError

__all__ = ["NO_OFFLOAD", "CPUOffloadPolicy", "OffloadPolicy", "as_offload_policy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing: shards live on the device that computes. As FSDP2's."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the states of the optimizer; as FSDP2's, and more.

    The three go together: torch has the gradient where the parameter is, and optimizers keep their
    states there, too. The step is then the CPU's, for which ``AdamW(..., fused=True)`` is made.

    Args:
        pin_memory: page-locked host memory, without which a GPU's copies are slow and stop the
            host; of no effect where the CPU computes.
        parameters: gather from the host. If not, a rank keeps a copy of its shards on the device,
            in the dtype of compute, which is brought once a forward; more memory, fewer copies.
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
