"""Loss scaling with FSDP1's arguments."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`; a non-finite gradient on any rank skips the step on every rank.

    Scaled losses keep their dtype. Sharded gradients are checked over all their ranks, so
    ``process_group`` is ignored.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,  # noqa: ARG002
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or those in an iterable, by the scale."""
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
