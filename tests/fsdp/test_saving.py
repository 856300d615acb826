"""State dicts of FSDP1: the same under both implementations, and they go on where they stopped."""

from typing import Any

import pytest

from tests.fsdp import programs_saving as programs
from tests.fsdp.both import DEADLINE, Program, name_of, run_both, run_ours
from tests.ranks import run_on

BOTH = (True, False)
HOW = ("scatter", "shard")
OPTIMIZERS = ("sgd", "adam", "adamw", "groups")

CASES: list[tuple[Program, dict[str, Any]]] = [
    *(
        (programs.full, {"policy": p, "config": {"offload_to_cpu": o, "rank0_only": r}})
        for p in ("module", "none", "size")
        for o in BOTH
        for r in BOTH
    ),
    (programs.full_by_default, {}),
    (programs.inside_another, {}),
    (programs.strictly, {}),
    *((programs.sharded, {"kind": "sharded", "offload": o}) for o in BOTH),
    (programs.settings, {}),
    (programs.optimizer_states, {"name": "sgd", "kind": "FULL"}),
    *((programs.optimizer_states, {"name": n, "kind": "SHARDED"}) for n in OPTIMIZERS),
    (programs.optimizer_states_of_rank_0, {"name": "sgd"}),
    *((programs.full_optimizer_states, {"name": "sgd", "how": how}) for how in HOW),
    *((programs.sharded_optimizer_states, {"name": n}) for n in OPTIMIZERS),
    (programs.rekeyed, {}),
    (programs.into_one_process, {"name": "sgd"}),
]

# Torch 2.13 on a CPU gathers whole states wrongly where a parameter has more than one: each of
# Adam's averages comes out as the second. So these programs assert by themselves, of ours alone,
# that training goes on in the same bits.
OURS: list[tuple[Program, dict[str, Any]]] = [
    *((programs.optimizer_states, {"name": n, "kind": "FULL"}) for n in OPTIMIZERS[1:]),
    *((programs.optimizer_states, {"name": n, "kind": "LOCAL"}) for n in OPTIMIZERS),
    *((programs.optimizer_states_of_rank_0, {"name": n}) for n in OPTIMIZERS[1:]),
    *(
        (programs.full_optimizer_states, {"name": n, "how": how})
        for n in OPTIMIZERS[1:]
        for how in HOW
    ),
    *((programs.optimizer_inputs, {"name": n, "how": h}) for n in ("adam", "groups") for h in HOW),
    *((programs.into_one_process, {"name": n}) for n in OPTIMIZERS[1:]),
    *((programs.sharded, {"kind": "local", "offload": offload}) for offload in BOTH),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_on_two_ranks(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(2, run_both, *case, deadline=DEADLINE)


@pytest.mark.parametrize("case", OURS, ids=name_of)
def test_ours_on_two_ranks(case: tuple[Program, dict[str, Any]]) -> None:
    run_on(2, run_ours, *case, deadline=DEADLINE)
