"""FSDP1's evaluation in full precision: ``FSDP_USE_FULL_PREC_IN_EVAL=1`` in the environment."""

import os
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shardwise.features.fsdp_module import FSDPModule
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.engine import HANDLE
from shardwise.runtime.module import handle_of, keeping_gradients

__all__ = ["EvalPrecision"]

_VARIABLE = "FSDP_USE_FULL_PREC_IN_EVAL"


class EvalPrecision:
    """Changes the dtypes of a model when it switches between training and evaluation."""

    def __init__(self) -> None:
        self._is_used = os.environ.get(_VARIABLE) == "1"
        # During evaluation, the policies that the units have in training.
        self._in_training: dict[FSDPModule, MixedPrecisionPolicy] = {}

    @property
    def is_full(self) -> bool:
        """Whether the model now computes in full precision, regardless of its policies."""
        return bool(self._in_training)

    def follow(self, root: nn.Module, *, training: bool) -> None:
        """Shard ``root`` again if it has the dtypes of the other mode. Call it between steps."""
        if not self._is_used or training != self.is_full:
            return
        if training:
            policies, self._in_training = self._in_training, {}
        else:
            units = [module for module in root.modules() if isinstance(module, FSDPModule)]
            self._in_training = {unit: handle_of(unit).options.precision for unit in units}
            policies = {
                unit: MixedPrecisionPolicy(master_dtype=policy.master_dtype)
                for unit, policy in self._in_training.items()
            }
        _shard_again(root, policies)


def _shard_again(root: nn.Module, policies: Mapping[FSDPModule, MixedPrecisionPolicy]) -> None:
    """Shard ``root`` again between steps, with new ``policies`` for its units; keep gradients."""
    runtime = handle_of(root).runtime
    runtime.scheduler.check_idle("units cannot be sharded again in the middle of a step")
    for module, policy in policies.items():
        handle = handle_of(module)
        options = replace(handle.options, precision=policy)
        module.__dict__[HANDLE] = replace(handle, options=options)
    runtime.scheduler.prepare_conversion()
    with keeping_gradients(root):
        runtime.request.apply(root)
