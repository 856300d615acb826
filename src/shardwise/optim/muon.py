"""Muon: matrices are updated by their orthogonalized momentum, each on one rank."""

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.optim.exchange import Member
from shardwise.optim.matrices import Coefficients, Matrices, cost_of, orthogonalize
from shardwise.optim.owner_optimizer import Group, OwnerOptimizer, local_part

__all__ = ["Muon"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, which converge fastest near 0
_ADJUST = (None, "original", "match_rms_adamw")


class Muon(OwnerOptimizer):
    """Muon for matrices and AdamW for all else, on parameters that are sharded in any way.

    With the options of `torch.optim.Muon`, of the same meaning, and its numbers. The momentum is
    sharded as the parameters are. Each matrix is orthogonalized once in the world, by its owner:
    the rank that holds it whole (as with ``granularity="tensor"``, where a step sends nothing), or
    the one that the work is balanced to, which receives the other parts and returns the update's::

        groups = sw.optim.parameter_groups(model, split={"*.qkv.weight": 3})
        optimizer = sw.optim.Muon(groups, lr=3e-4, adjust_lr_fn="match_rms_adamw")

    Args:
        params: parameters or groups. A group has ``method="muon"``, the default, or "adamw", and
            may have its own options. One of matrices may also have ``split`` (into how many
            matrices, or of which sizes, the outputs are divided: 3 for fused queries, keys and
            values), ``transposed`` (the weights are [in, out]) and ``stacked`` (the first dim is a
            stack of matrices, as that of experts; by default in three dims; in others, all but the
            first are one, as in convolutions).
        lr: of all groups without one of their own.
        weight_decay: decoupled, as in AdamW.
        momentum: of the exponential average of gradients.
        nesterov: whether the gradient is added to the average once more.
        ns_coefficients: of the iteration, or one triple for each of its steps.
        eps: the smallest norm that is divided by.
        ns_steps: number of iterations.
        adjust_lr_fn: "original" multiplies the learning rate by sqrt(max(1, out / in)), and
            "match_rms_adamw" by 0.2 sqrt(max(out, in)), so that updates are as large as AdamW's.
        betas: of AdamW.
        adamw_eps: AdamW's eps.
        ns_dtype: in which owners compute, and parts are sent; by default bfloat16 on accelerators,
            and float32 (or the parameter's float64) on CPUs.
        momentum_dtype: of the momentum; by default, of the gradients.

    Raises:
        PlanError: an option or a parameter does not suit.

    Source: Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/); Liu et al., Moonlight,
    2025 (arXiv 2502.16982), for weight decay and the size of updates. Dion (Ahn et al., 2025, arXiv
    2504.05295) describes the exchange between owners as one of the alternatives to it.
    """

    method = "muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        if adjust_lr_fn not in _ADJUST:
            raise PlanError(
                f'adjust_lr_fn={adjust_lr_fn!r}: expected "original" or "match_rms_adamw"'
            )
        self._momentum_dtype = momentum_dtype
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults, ns_dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_momentum_dtype": self._momentum_dtype}

    def _cost(self, matrices: Matrices, group: Group) -> int:
        return cost_of(matrices.orthogonalization(group["ns_steps"]))

    def _direction(self, parameter: Tensor, group: Group) -> Tensor:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local_part(parameter.grad)
        if "momentum_buffer" not in state:
            dtype = self._momentum_dtype or gradient.dtype
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
        buffer = local_part(state["momentum_buffer"])
        dtype = torch.promote_types(buffer.dtype, gradient.dtype)
        gradient, average = gradient.to(dtype), buffer.to(dtype)
        average.lerp_(gradient, 1 - group["momentum"])
        if average is not buffer:
            buffer.copy_(average)
        return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average

    def _work(self, member: Member, group: Group, whole: Tensor) -> Tensor:
        matrices = member.matrices
        scales = matrices.scales(group["adjust_lr_fn"])
        updates = [
            orthogonalize(part, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for part in matrices.parts(whole)
        ]
        for update, scale in zip(updates, scales, strict=True):
            if scale != scales[0]:  # those of a split differ in shape
                update.mul_(scale / scales[0])
        return matrices.join(updates)

    def _scale(self, matrices: Matrices, group: Group) -> float:
        return matrices.scales(group["adjust_lr_fn"])[0]
