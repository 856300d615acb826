"""State dicts of FSDP1 are those of PyTorch's, and training continues from them."""

import pytest

from tests.fsdp import programs_saving as programs
from tests.fsdp.both import (
    DEADLINE,
    Case,
    cases,
    name_of,
    one_of,
    run_both,
    run_ours,
    thorough,
)
from tests.ranks import on_ranks

BOTH = (True, False)
HOW = ("scatter", "shard")
ADAM = ("adamw", "groups")
CONFIGS = [{"offload_to_cpu": o, "rank0_only": r} for o in BOTH for r in BOTH]

CASES = [
    *cases(programs.full, policy=("module", "none", "size"), config=CONFIGS),
    *cases(programs.full_by_default),
    *cases(programs.inside_another),
    *cases(programs.strictly),
    *cases(programs.sharded, kind=("sharded",), offload=BOTH),
    *one_of(programs.sharded_tensors, offload=BOTH),
    *cases(programs.settings),
    *cases(programs.optimizer_states, name=("sgd",), kind=("FULL",)),
    *one_of(programs.optimizer_states, name=("groups", "sgd", "adamw"), kind=("SHARDED",)),
    *cases(programs.optimizer_states_of_rank_0, name=("sgd",)),
    *cases(programs.full_optimizer_states, name=("sgd",), how=HOW),
    *cases(programs.sharded_optimizer_states, name=("groups",)),
    *cases(programs.rekeyed),
    *cases(programs.into_one_process, name=("sgd",)),
    *thorough(cases(programs.optimizer_states, name=("adam",), kind=("SHARDED",))),
    *thorough(cases(programs.sharded_optimizer_states, name=("sgd", "adam", "adamw"))),
]

# PyTorch 2.13 gathers full states wrongly on the CPU if a parameter has more than one (both of
# Adam's averages become the second one). So these programs run with ours only, and assert that
# training continues bit for bit.
OURS = [
    *cases(programs.optimizer_states, name=ADAM, kind=("FULL", "LOCAL")),
    *cases(programs.optimizer_states, name=("sgd",), kind=("LOCAL",)),
    *cases(programs.optimizer_states_of_rank_0, name=ADAM),
    *cases(programs.full_optimizer_states, name=ADAM, how=HOW),
    *cases(programs.optimizer_inputs, name=("adam", "groups"), how=HOW),
    *cases(programs.into_one_process, name=ADAM),
    *cases(programs.sharded, kind=("local",), offload=BOTH),
    *thorough(
        [
            *cases(programs.optimizer_states, name=("adam",), kind=("FULL", "LOCAL")),
            *cases(programs.optimizer_states_of_rank_0, name=("adam",)),
            *cases(programs.full_optimizer_states, name=("adam",), how=HOW),
            *cases(programs.into_one_process, name=("adam",)),
        ]
    ),
]


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_program(case: Case) -> None:
    run_both(*case)


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("case", OURS, ids=name_of)
def test_program_of_ours(case: Case) -> None:
    run_ours(*case)
