"""Muon: updates each matrix by its orthogonalized momentum, on one rank."""

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.optim.exchange import Member
from shardwise.optim.matrices import Coefficients, Matrices, cost_of, orthogonalize
from shardwise.optim.owner_optimizer import Group, OwnerOptimizer
from shardwise.tensor.sharding import local_of

__all__ = ["Muon"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # from Jordan; they converge fastest near 0
_ADJUST = (None, "original", "match_rms_adamw")


class Muon(OwnerOptimizer):
    """Muon for matrices and AdamW for other parameters, on a model that is sharded in any way.

    The options of `torch.optim.Muon` have the same meaning, and the results are the same. The
    momentum is sharded like the parameters. Each matrix is orthogonalized by one rank, its owner.
    If a rank holds the whole matrix (as with ``granularity="tensor"``), it is the owner and nothing
    is sent. Otherwise the work is balanced over the ranks, and the owner receives the other parts
    of the matrix and sends back the parts of the update::

        groups = sw.optim.parameter_groups(model, split={"*.qkv.weight": 3})
        optimizer = sw.optim.Muon(groups, lr=3e-4, adjust_lr_fn="match_rms_adamw")

    Args:
        params: parameters or groups. A group has ``method="muon"`` (the default) or "adamw", and
            may override the options below. A group of matrices may also have ``split`` (the number
            of equal matrices into which the outputs of a weight are divided, or their sizes: 3 for
            fused queries, keys and values), ``transposed`` (weights are [in, out]) and ``stacked``
            (the first dim is a stack of matrices, such as experts: the default for three dims. With
            False, all dims but the first are flattened into one, as in convolutions).
        lr: learning rate.
        weight_decay: decoupled weight decay, as in AdamW.
        momentum: decay of the exponential average of gradients.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration, or one triple for each step.
        eps: lower bound of the norm that matrices are divided by.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: "original" (or None) multiplies the learning rate by sqrt(max(1, out / in)),
            and "match_rms_adamw" by 0.2 sqrt(max(out, in)), so that updates are as large as those
            of AdamW.
        betas: betas of AdamW.
        adamw_eps: eps of AdamW.
        ns_dtype: dtype in which owners compute and parts are sent. By default, bfloat16 on
            accelerators, and float32 (or float64, if the parameter has it) on CPUs.
        momentum_dtype: dtype of the momentum. By default, that of the gradients.

    Raises:
        PlanError: an option is not valid, or does not fit a parameter.

    Source: Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/); Liu et al., Moonlight,
    2025 (arXiv 2502.16982), for weight decay and the size of updates. Dion (Ahn et al., 2025, arXiv
    2504.05295) describes the exchange between owners as one of the alternatives to it.
    """

    method = "muon"
    accelerator_dtype = torch.bfloat16

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

    def _contribute(self, member: Member) -> Tensor:
        """Update the momentum, and return the direction that the owner orthogonalizes."""
        parameter, momentum = member.parameter, member.group["momentum"]
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local_of(parameter.grad)
        if "momentum_buffer" not in state:
            dtype = self._momentum_dtype or gradient.dtype
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
        buffer = local_of(state["momentum_buffer"])
        dtype = torch.promote_types(buffer.dtype, gradient.dtype)
        gradient, average = gradient.to(dtype), buffer.to(dtype)
        average.lerp_(gradient, 1 - momentum)
        if average is not buffer:
            buffer.copy_(average)
        return gradient.lerp(average, momentum) if member.group["nesterov"] else average

    def _work(self, member: Member, whole: Tensor) -> Tensor:
        matrices, group = member.matrices, member.group
        scales = matrices.scales(group["adjust_lr_fn"])
        updates = [
            orthogonalize(part, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for part in matrices.parts(whole)
        ]
        for update, scale in zip(updates, scales, strict=True):
            if scale != scales[0]:  # matrices of a split with other sizes; see `_scale`
                update.mul_(scale / scales[0])
        return matrices.join(updates)

    def _scale(self, member: Member) -> float:
        return member.matrices.scales(member.group["adjust_lr_fn"])[0]
