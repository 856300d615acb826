"""Activation checkpointing of chosen modules with PyTorch's implementation."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.errors import PlanError
from shardwise.forecast.trace.recorder import COLLECTIVES
from shardwise.plan.policies import choose_units

__all__ = ["checkpoint_blocks", "modes_by_name"]

_MODES = ("none", "full", "products", "selective", "reentrant")

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_KEPT = {
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
}


def modes_by_name(modes: str | Sequence[str], blocks: Sequence[str]) -> dict[str, str]:
    """Return the mode of each block.

    Args:
        modes: one mode for all blocks, or one for each.
        blocks: their names.

    Raises:
        PlanError: the numbers of modes and blocks differ.
    """
    if isinstance(modes, str):
        return dict.fromkeys(blocks, modes)
    if len(modes) != len(blocks):
        raise PlanError(
            f"checkpointing: expected a mode for each of the {len(blocks)} blocks, got {len(modes)}"
        )
    return dict(zip(blocks, modes, strict=True))


def checkpoint_blocks(
    model: nn.Module,
    modes: str | Sequence[str] | Mapping[str, str],
    *,
    preserve_rng_state: bool = True,
) -> None:
    """Make modules keep fewer activations for backward. Call it before `sw.fully_shard`.

    ``modes`` maps names of modules to modes. One mode, or a sequence with a mode for each block,
    applies to the repeated blocks, which ``units="auto"`` selects. The modes are:

    - "none": keep all activations,
    - "full": keep only the inputs, and recompute the rest,
    - "selective": also keep the results of every second matrix product, of attention, and of
      reduce-scatters and all-to-alls, like torchtitan's "op" policy,
    - "products": also keep the results of all matrix products and of attention,
    - "reentrant": like "full", in PyTorch's older implementation.

    Args:
        model: the model; a checkpointed module gets a subclass of its class.
        modes: as above.
        preserve_rng_state: draw the same random numbers in the recomputation, which dropout needs.

    Raises:
        PlanError: there is no such mode, or the model has no repeated blocks.
        AttributeError: there is no such module.
    """
    if not isinstance(modes, Mapping):
        modes = modes_by_name(modes, choose_units(model, "auto")[1:])
    for name, mode in modes.items():
        if mode not in _MODES:
            raise PlanError(f"checkpointing of {name}: {mode!r}: expected one of {_MODES}")
        if mode != "none":
            _checkpoint(model.get_submodule(name), mode, preserve_rng_state)


def _checkpoint(module: nn.Module, mode: str, preserve_rng_state: bool) -> None:
    """Run the module's calls, with its hooks, in a checkpoint."""
    options: dict[str, Any] = {
        "use_reentrant": mode == "reentrant",
        "preserve_rng_state": preserve_rng_state,
    }
    if mode in ("products", "selective"):
        options["context_fn"] = partial(_contexts, every=2 if mode == "selective" else 1)
    base = type(module)

    class Checkpointed(base):  # type: ignore[valid-type, misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            run = super().__call__
            if options["use_reentrant"]:  # takes no keyword arguments
                return checkpoint(partial(run, **kwargs), *args, **options)
            return checkpoint(run, *args, **options, **kwargs)

    Checkpointed.__name__ = base.__name__
    Checkpointed.__qualname__ = base.__qualname__  # "auto" compares the names of blocks
    module.__class__ = Checkpointed


def _contexts(every: int) -> Any:
    return create_selective_checkpoint_contexts(_policy(every))  # type: ignore[no-untyped-call]


def _policy(every: int) -> Callable[..., CheckpointPolicy]:
    """Keep the results of attention and of the first of each ``every`` matrix products."""
    num_products = {False: 0, True: 0}  # count in the forward, and in the recomputation

    def policy(context: Any, func: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept_collective = func.namespace == COLLECTIVES and args[1] != "all_gather"
        keeps = func in _KEPT or is_kept_collective
        if func in _PRODUCTS:
            keeps = num_products[context.is_recompute] % every == 0
            num_products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
