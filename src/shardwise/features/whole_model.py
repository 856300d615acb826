"""Warns about models that are gathered whole, although their blocks could be units."""

from typing import Any

from torch import nn

from shardwise._warnings import warn_caller
from shardwise.plan.plan import Plan
from shardwise.plan.policies import repeated_blocks
from shardwise.plan.strategy import AxisPlacement
from shardwise.runtime.module import handle_of

__all__ = ["warn_if_whole"]


def warn_if_whole(module: nn.Module, plan: Plan) -> None:
    """Make the first forward warn if ``module`` is gathered as one unit and has repeated blocks.

    Only then it is known that no later call makes it a part of a larger model.
    """
    is_cut = AxisPlacement.SHARD in plan.strategy.parameters
    if is_cut and len(plan.units) == 1 and repeated_blocks(module):
        module.register_forward_pre_hook(_warn)


def _warn(module: nn.Module, _args: Any) -> None:
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _warn]:  # also in a copy
        del hooks[key]
    blocks = repeated_blocks(module)
    plan = handle_of(module).runtime.plan
    if len(plan.units) > 1 or not blocks:
        return
    kinds = sorted({module.get_submodule(name)._get_name() for name in blocks})  # type: ignore[no-untyped-call]
    warn_caller(
        f"{plan.units[0].label} is one unit, so all its parameters are gathered at once, although "
        f"it has {len(blocks)} repeated blocks ({', '.join(kinds)}: {blocks[0]} to {blocks[-1]}); "
        'pass units="auto" to fully_shard, or call fully_shard on each block first (with the '
        "FSDP1 wrapper: pass auto_wrap_policy)"
    )
