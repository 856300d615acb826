"""Programs written for FSDP2 do under `shardwise.fsdp` what they do under torch's."""

from typing import Any

import pytest
import torch

from tests.fsdp import programs2 as programs
from tests.fsdp.both import DEADLINE, TOLERANCE, Program, name_of, run_both
from tests.fsdp.programs2 import OPTIMIZERS
from tests.ranks import close_pools, run_on

BF16, F32 = torch.bfloat16, torch.float32
LIMITS = [(m, t) for m in (0.01, 100.0) for t in (1.0, 2.0, 3.0)]
PARTS = ("head", "blocks.1", "blocks.0.up")
BOTH = (True, False)
WRAPPED = ("blocks", "root", "blocks alone", "layers")

CASES: list[tuple[Program, dict[str, Any]]] = [
    *(
        (programs.train, {"wrapped": w, "optimizer": o})
        for w in WRAPPED
        for o in OPTIMIZERS
        if w != "blocks alone" or o != "adamw"  # foreach kernels take no mixture there
    ),
    *(
        (programs.train, {"wrapped": w, "options": {"reshard_after_forward": r}})
        for w in ("blocks", "root")
        for r in (True, False, 2)
    ),
    *(
        (programs.train, {"wrapped": w, "model": {"checkpointed": c}})
        for w in ("blocks", "root")
        for c in ("reentrant", "non-reentrant")
    ),
    *((programs.train, {"wrapped": w, "model": {"tied": True}}) for w in ("blocks", "root")),
    *((programs.accumulate, {"reshards": r, "last": b}) for r in BOTH for b in BOTH),
    (programs.accumulate_reduced, {}),
    *((programs.clip, {"max_norm": m, "norm_type": t}) for m, t in LIMITS),
    *(
        (programs.precision, {"policy": policy, "outer": outer})
        for outer, policy in (
            (True, {"param_dtype": BF16}),
            (True, {"param_dtype": BF16, "reduce_dtype": F32}),
            (True, {"param_dtype": BF16, "cast_forward_inputs": True}),
            (False, {"param_dtype": BF16, "reduce_dtype": F32, "output_dtype": F32}),
            (True, {"reduce_dtype": BF16}),
            (False, {"reduce_dtype": BF16}),
        )
    ),
    (programs.low_precision_model, {}),
    (programs.offload, {"pin_memory": False}),
    (programs.no_offload, {}),
    *((programs.ignore, {"which": which}) for which in PARTS),
    *((programs.freeze, {"which": which}) for which in (*PARTS, "embed")),
    *((programs.evaluate, {"wrapped": wrapped}) for wrapped in WRAPPED),
    *((programs.by_hand, {"asynchronous": a, "reshards": r}) for a in BOTH for r in BOTH),
    (programs.by_hand_ahead, {}),
    *((programs.reshards_later, {"value": v, "recurse": r}) for v in BOTH for r in BOTH),
    *((programs.divides, {"factor": factor}) for factor in (1.0, 2.0, 5.0)),
    *((programs.lists, {"count": count}) for count in (1, 2, 3)),
    (programs.hints, {}),
    (programs.other_method, {}),
    *((programs.meta, {"wrapped": wrapped}) for wrapped in WRAPPED if wrapped != "blocks alone"),
    *((programs.filled_from_whole, {"wrapped": wrapped}) for wrapped in ("blocks", "root")),
    (programs.shapes, {}),
    (programs.placement_function, {}),
    *((programs.state_dict, {"wrapped": wrapped}) for wrapped in WRAPPED),
    *((programs.distributed_state_dict, {"optimizer": o}) for o in ("sgd", "adam", "adamw")),
    *(
        (programs.whole_state_dicts, {"optimizer": o, "cpu_offload": on_cpu})
        for o, on_cpu in (("sgd", False), ("adamw", False), ("adamw", True))
    ),
    (programs.several_forwards, {}),
    (programs.sharded_twice, {}),
    (programs.gradient_hooks, {}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_on_two_ranks(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(2, run_both, *case, deadline=DEADLINE)


@pytest.mark.parametrize(
    "case",
    [
        (programs.hybrid, {"reshard": None}),
        (programs.hybrid, {"reshard": False}),
        (programs.hybrid_accumulates, {}),
        *((programs.all_reduce_hook, {"units": units}) for units in ("blocks", "root", "layers")),
        (programs.placements_of_hybrid, {}),
    ],
    ids=name_of,
)
def test_on_four_ranks(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(4, run_both, *case, deadline=DEADLINE)


@pytest.mark.parametrize(
    "case",
    [
        (programs.train, {"wrapped": "blocks"}),
        (programs.train, {"wrapped": "layers", "options": {"reshard_after_forward": False}}),
        (programs.lists, {"count": 2}),
        (programs.meta, {"wrapped": "blocks"}),
        (programs.precision, {"policy": {"param_dtype": BF16, "reduce_dtype": F32}, "outer": True}),
        (programs.offload, {"pin_memory": False}),
        (programs.no_offload, {}),
        (programs.ignore, {"which": "head"}),
        (programs.placement_function, {}),
    ],
    ids=name_of,
)
def test_fully_shard_of_the_package_root(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(2, run_both, *case, TOLERANCE, "tests.fsdp.sw_namespace", deadline=DEADLINE)


def test_fully_shard_of_the_package_root_on_a_2d_mesh() -> None:
    close_pools()  # torch caches what it found for an equal mesh, whose groups may be gone by now
    case = (programs.hybrid, {"reshard": None})
    run_on(4, run_both, *case, TOLERANCE, "tests.fsdp.sw_namespace", deadline=DEADLINE)
