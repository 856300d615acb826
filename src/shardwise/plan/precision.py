"""The dtypes of shards, compute and reductions."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, cast

import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.layout import Cast

__all__ = ["DEFAULT_PRECISION", "LOW_DTYPES", "MixedPrecisionPolicy", "as_precision_policy"]

LOW_DTYPES = (torch.bfloat16, torch.float16)
_OVERRIDDEN = "_shardwise_compute_dtype"  # attribute of a parameter: what the override returned


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a model. Extends FSDP2's policy.

    Args:
        param_dtype: dtype of gathered parameters, and so of gathers and compute. None keeps the
            dtype of each parameter.
        reduce_dtype: dtype of gradients while they are reduced. None is the dtype of compute if
            ``param_dtype`` is given, and that of the shards otherwise; ``"keep"`` is always that of
            the shards. A parameter whose ``grad_dtype`` was set uses that one, and its gradients
            keep it.
        output_dtype: dtype to cast the outputs of the model to. None leaves them.
        cast_forward_inputs: cast the floating-point inputs of each unit to ``param_dtype``.
        buffer_dtype: dtype to cast floating-point buffers to, once. None leaves them.
        master_dtype: dtype of the shards, gradients and optimizer state of trainable parameters
            that are in bfloat16 or float16 when the model is sharded. None is float32; ``"keep"``
            is the parameter's own dtype, as in FSDP2. In 16 bits, updates below 1/256 of a weight
            are lost.
        full_precision: classes of modules, such as norms, that compute in the dtype of the shards.
            Their inputs are cast to it, and their outputs back.
        keep_low_precision_grads: leave gradients in the dtype in which they were reduced.
        param_dtype_override_fn: called with each parameter when it is sharded. It returns None for
            ``param_dtype``, or the parameter's own dtype for one that is gathered and computes in
            it, on all ranks alike. Inputs are cast to ``param_dtype`` all the same.

    Raises:
        PlanError: a dtype is not a floating-point one, or ``param_dtype_override_fn`` returned
            another one.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | Literal["keep"] | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | Literal["keep"] | None = None
    full_precision: tuple[type[nn.Module], ...] = ()
    keep_low_precision_grads: bool = False
    # Not shown, because ranks compare plans as texts; plans have the dtypes that it chose.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, repr=False
    )

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            is_dtype = name.endswith("_dtype") and value is not None
            if name in ("master_dtype", "reduce_dtype") and value == "keep":
                continue
            if is_dtype and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise PlanError(f"{name}={value!r}: expected a floating-point torch.dtype")

    def dtypes_of(
        self, parameter: torch.Tensor, module: nn.Module, *, widen: bool = True
    ) -> tuple[torch.dtype, Cast | None]:
        """The dtype of the shards of ``module``'s ``parameter``, and its cast if others differ.

        Without ``widen``, 16-bit shards stay in 16 bits.
        """
        kept = came = parameter.dtype
        if not came.is_floating_point:
            return kept, None
        if came in LOW_DTYPES and parameter.requires_grad and self.master_dtype != "keep" and widen:
            kept = self.master_dtype or torch.float32
        is_full = isinstance(module, self.full_precision)
        compute = kept if is_full else self.param_dtype or came
        if self.param_dtype_override_fn is not None and not is_full:
            compute = self._overridden_dtype(self.param_dtype_override_fn, parameter)
        reduce = self.reduce_dtype or (self.param_dtype and compute) or kept
        reduce = kept if reduce == "keep" else reduce
        keeps_sums = self.keep_low_precision_grads
        # By the user, as in `parameter.grad_dtype = torch.float32`.
        if (chosen := getattr(parameter, "grad_dtype", came)) not in (None, came):
            reduce, keeps_sums = chosen, True
        if kept == compute == reduce:
            return kept, None
        return kept, Cast(*_named(compute), *_named(reduce), keeps_sums)

    def _overridden_dtype(
        self, override: Callable[[nn.Parameter], torch.dtype | None], parameter: torch.Tensor
    ) -> torch.dtype:
        # Once: when the model around a unit is sharded, the parameter is another object, perhaps in
        # another dtype. It has the attributes of the first one.
        own = vars(parameter)
        if _OVERRIDDEN not in own:
            chosen = override(cast("nn.Parameter", parameter))
            if chosen not in (None, self.param_dtype, parameter.dtype):
                raise PlanError(
                    f"param_dtype_override_fn returned {chosen!r} for a parameter in "
                    f"{parameter.dtype}: expected this dtype, or None for {self.param_dtype}"
                )
            own[_OVERRIDDEN] = chosen or self.param_dtype or parameter.dtype
        dtype: torch.dtype = own[_OVERRIDDEN]
        return dtype


DEFAULT_PRECISION = MixedPrecisionPolicy()


def as_precision_policy(policy: object) -> MixedPrecisionPolicy:
    """Return ``policy``, or the equivalent of PyTorch's policy, recognized by its fields.

    Raises:
        PlanError: ``policy`` is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if not all(hasattr(policy, name) for name in _TORCH_FIELDS):
        raise PlanError(
            f"mp_policy: expected a MixedPrecisionPolicy, got {policy!r}; pass "
            "sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16) or PyTorch's"
        )
    given = {name: getattr(policy, name) for name in _TORCH_FIELDS}
    if hasattr(policy, "param_dtype_override_fn"):  # since PyTorch 2.15
        given["param_dtype_override_fn"] = policy.param_dtype_override_fn
        # Before, None was `param_dtype`, as it is here.
        given["reduce_dtype"] = given["reduce_dtype"] or "keep"
    return MixedPrecisionPolicy(**given, master_dtype="keep")


def _named(dtype: torch.dtype) -> tuple[str, int]:
    return str(dtype).removeprefix("torch."), dtype.itemsize


_TORCH_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
