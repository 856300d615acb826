"""Programs written for FSDP1 do under `shardwise.fsdp` what they do under torch's."""

from typing import Any

import pytest
import torch

from tests.fsdp import programs1 as programs
from tests.fsdp.both import DEADLINE, Program, name_of, run_both
from tests.fsdp.programs2 import OPTIMIZERS
from tests.ranks import run_on

BF16, F32 = torch.bfloat16, torch.float32
BOTH = (True, False)
POLICIES = (
    "none", "always", "size", "large", "leaf", "transformer", "lambda", "module", "custom",
    "custom options", "or",
)  # fmt: skip
CHECKPOINTED = (("module", "reentrant"), ("module", "non-reentrant"), ("none", "non-reentrant"))
LIMITS = [
    (max_norm, norm_type, strategy)
    for max_norm in (0.01, 100.0)
    for norm_type in (1.0, 2.0, float("inf"))
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")

CASES: list[tuple[Program, dict[str, Any]]] = [
    *((programs.train, {"policy": policy}) for policy in POLICIES),
    *((programs.train, {"optimizer": optimizer}) for optimizer in OPTIMIZERS),
    *((programs.train, {"options": {"sharding_strategy": s}}) for s in STRATEGIES),
    *(
        (programs.train, {"options": {"backward_prefetch": b, "forward_prefetch": p}})
        for b in ("BACKWARD_PRE", "BACKWARD_POST", None)
        for p in BOTH
    ),
    *((programs.train, {"options": {"limit_all_gathers": limited}}) for limited in BOTH),
    *(
        (programs.train, {"policy": p, "model": {"checkpointed": c}})
        for p, c in (
            ("module", "reentrant"),
            ("module", "non-reentrant"),
            ("none", "non-reentrant"),
        )
    ),
    (programs.train, {"policy": "module", "model": {"tied": True}}),
    *((programs.train_flat, {"optimizer": o}) for o in ("sgd", "adam", "adamw")),
    (programs.mesh_1d, {}),
    *((programs.modules, {"policy": policy}) for policy in POLICIES),
    (programs.attributes, {}),
    *((programs.accumulate, {"sync": s, "policy": p}) for s in BOTH for p in ("module", "none")),
    *(
        (programs.precision, {"policy": policy, "wrapped": wrapped})
        for wrapped in ("module", "none")
        for policy in (
            {"param_dtype": BF16},
            {"param_dtype": BF16, "reduce_dtype": F32},
            {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16},
            {"reduce_dtype": BF16},
            {"param_dtype": BF16, "cast_forward_inputs": True},
        )
    ),
    (programs.ignores_norms, {}),
    *((programs.offload, {"params": params}) for params in BOTH),
    *(
        (programs.ignore, {"which": which, "how": how})
        for which in ("head", "blocks.1")
        for how in ("ignored_modules", "modules", "parameters")
    ),
    *((programs.freeze, {"which": which}) for which in ("head", "blocks.1", "blocks.0.up")),
    (programs.syncs, {}),
    *((programs.meta, {"how": how}) for how in ("reset", "function")),
    *((programs.by_hand, {"outer": outer}) for outer in BOTH),
    (programs.nested_enable_wrap, {}),
    *((programs.summon, {"writeback": w, "recurse": r}) for w in BOTH for r in BOTH),
    *((programs.summon_gradients, {"writeback": writeback}) for writeback in BOTH),
    (programs.summon_rank0, {}),
    (programs.applies, {}),
    *((programs.evaluate, {"policy": policy}) for policy in ("module", "none")),
    (programs.several_forwards, {}),
    *((programs.scales, {"bad": bad}) for bad in BOTH),
    (programs.refusals, {}),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_on_two_ranks(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(2, run_both, *case, deadline=DEADLINE)


@pytest.mark.parametrize(
    "case",
    [
        *(
            (programs.hybrid, {"strategy": s, "given": given})
            for s in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
            for given in ("mesh", "groups")
        ),
        (programs.in_groups, {}),
    ],
    ids=name_of,
)
def test_on_four_ranks(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(4, run_both, *case, deadline=DEADLINE)


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_clipping(limit: tuple[float, float, str]) -> None:
    """In float32, for torch's takes no other norms."""
    options = dict(zip(("max_norm", "norm_type", "strategy"), limit, strict=True))
    run_on(2, run_both, programs.clip, options, 2e-6, deadline=DEADLINE)
