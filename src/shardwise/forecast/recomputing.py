"""Activation checkpointing of chosen modules, with PyTorch's own."""

from collections.abc import Callable, Mapping
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
from shardwise.forecast.recorder import COLLECTIVES

__all__ = ["WORDS", "checkpoint_blocks"]

WORDS = ("none", "full", "selective", "products")

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_KEPT = {
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
}


def checkpoint_blocks(model: nn.Module, words: Mapping[str, str]) -> None:
    """Have the modules named in ``words`` keep less of their activations for backward.

    The words are:

    - "none": all is kept,
    - "full": only the inputs; the rest is computed again,
    - "selective": also the results of every second matrix product, of attention and of
      reduce-scatters and all-to-alls, as torchtitan's "op" policy does,
    - "products": also the results of all matrix products and of attention.

    Raises:
        PlanError: there is no such module, or no such word.
    """
    for name, word in words.items():
        if word not in WORDS:
            raise PlanError(f"checkpointing of {name}: {word!r}: expected one of {WORDS}")
        if word != "none":
            _checkpoint(model.get_submodule(name), word)


def _checkpoint(module: nn.Module, word: str) -> None:
    """Run the module's calls, with its hooks, in a checkpoint."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if word != "full":
        options["context_fn"] = partial(_contexts, every=2 if word == "selective" else 1)
    of_class = type(module)

    class Checkpointed(of_class):  # type: ignore[valid-type, misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(super().__call__, *args, **options, **kwargs)

    Checkpointed.__name__ = of_class.__name__
    module.__class__ = Checkpointed


def _contexts(every: int) -> Any:
    return create_selective_checkpoint_contexts(_policy(every))  # type: ignore[no-untyped-call]


def _policy(every: int) -> Callable[..., CheckpointPolicy]:
    """Keep attention, and the first of each ``every`` matrix products."""
    num_products = {False: 0, True: 0}  # of the forward, and of the recomputation

    def policy(context: Any, func: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept_collective = func.namespace == COLLECTIVES and args[1] != "all_gather"
        keeps = func in _KEPT or is_kept_collective
        if func in _PRODUCTS:
            keeps = num_products[context.is_recompute] % every == 0
            num_products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
