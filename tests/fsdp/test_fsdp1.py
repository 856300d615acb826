"""Programs written for FSDP1 give the same results with `shardwise.fsdp`."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import shardwise.fsdp as our_fsdp
from shardwise.errors import PlanError
from shardwise.fsdp import wrap
from tests.fsdp import (
    programs1 as programs,
    programs1_training as training,
    programs_saving as saving,
)
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

BF16, F32 = torch.bfloat16, torch.float32
BOTH = (True, False)
POLICIES = (
    "none", "module", "size", "custom options", "always", "large", "leaf", "transformer", "lambda",
    "custom", "or",
)  # fmt: skip
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
CHECKPOINTS = ("reentrant", "non-reentrant")
HOW = ("scatter", "shard")
ADAM = ("adamw", "groups")
CONFIGS = [{"offload_to_cpu": o, "rank0_only": r} for o in BOTH for r in BOTH]

CASES = [
    # `modules` compares what the other policies choose
    *one_of(programs.train, policy=("custom options", *POLICIES[:3], *POLICIES[4:])),
    *cases(programs.train, optimizer=("adamw",)),
    *thorough(cases(programs.train, optimizer=("sgd", "adam", "adagrad", "rmsprop"))),
    *cases(
        programs.train,
        policy=POLICIES[:3],
        options=[{"sharding_strategy": s} for s in STRATEGIES],
    ),
    *cases(programs.prefetch, backward=("BACKWARD_PRE", "BACKWARD_POST", None), forward=BOTH),
    *cases(programs.train, options=[{"limit_all_gathers": False}]),
    *cases(programs.train, policy=("module",), model=[{"checkpointed": c} for c in CHECKPOINTS]),
    *cases(programs.train, policy=("none",), model=[{"checkpointed": "non-reentrant"}]),
    *cases(programs.train, policy=("module",), model=[{"tied": True}]),
    *cases(programs.train_flat, optimizer=("adamw",)),
    *thorough(cases(programs.train_flat, optimizer=("sgd", "adam"))),
    *cases(programs.mesh_1d),
    *cases(programs.modules, policy=POLICIES),
    *cases(programs.attributes),
    *cases(programs.called_list),
    *cases(programs.accumulate, sync=BOTH, policy=("module", "none")),
    *cases(
        programs.precision,
        policy=(
            {"param_dtype": BF16},
            {"param_dtype": BF16, "reduce_dtype": F32},
            {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16},
            {"reduce_dtype": BF16},
            {"param_dtype": BF16, "cast_forward_inputs": True},
        ),
        wrapped=("module", "none"),
    ),
    *cases(programs.ignores_norms),
    *cases(programs.offload, params=BOTH),
    *cases(
        programs.ignore,
        which=("head", "blocks.1"),
        how=("ignored_modules", "modules", "parameters"),
    ),
    *one_of(programs.freeze, which=("blocks.0.up", "head", "blocks.1")),
    *cases(programs.syncs),
    *cases(programs.meta, how=("reset", "function")),
    *one_of(programs.by_hand, outer=BOTH),
    *cases(programs.nested_enable_wrap),
    *cases(programs.summon, writeback=BOTH, recurse=BOTH),
    *one_of(programs.summon_gradients, writeback=BOTH),
    *cases(programs.summon_rank0),
    *cases(programs.applies),
    *one_of(programs.evaluate, policy=("module", "none")),
    *cases(programs.several_forwards),
    *cases(programs.scales, bad=BOTH),
    *cases(programs.refusals),
    *cases(
        training.hooks,
        which=("default", "half"),
        strategy=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
        policy=("module", "none"),
    ),
    *cases(training.own_hook),
    *cases(training.keeps_low_precision, strategy=("FULL_SHARD", "NO_SHARD")),
    *cases(training.experts),
    *cases(training.other_names),
    *cases(training.scales_in_half),
    *cases(training.wraps_norms, policy=("module", "size")),
    *cases(saving.full, policy=("module", "none", "size"), config=CONFIGS),
    *cases(saving.full_by_default),
    *cases(saving.inside_another),
    *cases(saving.strictly),
    *cases(saving.sharded, kind=("sharded",), offload=BOTH),
    *one_of(saving.sharded_tensors, offload=BOTH),
    *cases(saving.settings),
    *cases(saving.optimizer_states, name=("sgd",), kind=("FULL",)),
    *one_of(saving.optimizer_states, name=("groups", "sgd", "adamw"), kind=("SHARDED",)),
    *cases(saving.optimizer_states_of_rank_0, name=("sgd",)),
    *cases(saving.full_optimizer_states, name=("sgd",), how=HOW),
    *cases(saving.sharded_optimizer_states, name=("groups",)),
    *cases(saving.rekeyed),
    *cases(saving.into_one_process, name=("sgd",)),
    *thorough(cases(saving.optimizer_states, name=("adam",), kind=("SHARDED",))),
    *thorough(cases(saving.sharded_optimizer_states, name=("sgd", "adam", "adamw"))),
]

# These programs run with ours only, and contain their own assertions. PyTorch 2.13 gathers full
# states wrongly on the CPU if a parameter has more than one (both of Adam's averages become the
# second one), so those of `saving` assert that training continues bit for bit.
OURS = [
    *cases(training.evaluates_in_full_precision),
    *cases(training.steps_in_full_precision),
    *cases(training.copies),
    *cases(saving.optimizer_states, name=ADAM, kind=("FULL", "LOCAL")),
    *cases(saving.optimizer_states, name=("sgd",), kind=("LOCAL",)),
    *one_of(saving.optimizer_states_of_rank_0, name=ADAM[::-1]),
    *cases(saving.full_optimizer_states, name=ADAM, how=HOW),
    *cases(saving.optimizer_inputs, name=("adam", "groups"), how=HOW),
    *one_of(saving.into_one_process, name=ADAM[::-1]),
    *cases(saving.sharded, kind=("local",), offload=BOTH),
    *thorough(
        [
            *cases(saving.optimizer_states, name=("adam",), kind=("FULL", "LOCAL")),
            *cases(saving.optimizer_states_of_rank_0, name=("adam",)),
            *cases(saving.full_optimizer_states, name=("adam",), how=HOW),
            *cases(saving.into_one_process, name=("adam",)),
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


@on_ranks(4, deadline=DEADLINE)
@pytest.mark.parametrize(
    "case",
    [
        *cases(
            programs.hybrid,
            strategy=("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
            given=("mesh", "groups"),
        ),
        *cases(programs.in_groups),
    ],
    ids=name_of,
)
def test_program_with_several_groups(case: Case) -> None:
    run_both(*case)


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize(
    "case",
    cases(
        programs.clip,
        max_norm=(0.01, 100.0),
        norm_type=(1.0, 2.0, float("inf")),
        strategy=STRATEGIES,
    ),
    ids=name_of,
)
def test_clipping(case: Case) -> None:
    """In float32, since PyTorch's FSDP1 computes norms in no other dtype."""
    run_both(*case, 2e-6)


@on_ranks(2, deadline=DEADLINE)
def test_programs_catch_the_same_errors() -> None:
    theirs = training.errors(torch_fsdp)
    for number, (our, their) in enumerate(zip(training.errors(our_fsdp), theirs, strict=True)):
        assert isinstance(our, type(their)), f"{number}: {our!r}, expected {their!r}"


@on_ranks(2)
def test_names_of_pytorch_1_11() -> None:
    """Those in articles of the time. They choose the same units as today's names."""
    models = []
    for policy, argument in (
        (wrap.size_based_auto_wrap_policy, "auto_wrap_policy"),
        (wrap.default_auto_wrap_policy, "fsdp_auto_wrap_policy"),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3)))
        is_old = argument.startswith("fsdp")
        warned = pytest.warns(FutureWarning, match="is now called") if is_old else nullcontext()
        with warned:
            options: dict[str, Any] = {argument: partial(policy, min_num_params=100)}
            models.append(our_fsdp.FullyShardedDataParallel(net, **options))
    today, then = ([name for name, _ in model.named_modules()] for model in models)
    assert then == today
    assert sum("_fsdp_wrapped_module" in name.split(".")[-1] for name in then) == 4
    batch = torch.randn(4, 12)
    assert torch.equal(models[0](batch), models[1](batch))
    with pytest.raises(PlanError, match="pass auto_wrap_policy alone"):
        our_fsdp.FullyShardedDataParallel(
            nn.Linear(2, 2), auto_wrap_policy=policy, fsdp_auto_wrap_policy=policy
        )


@pytest.mark.parametrize("difference", ["dtype", "tie"])
@on_ranks(2)
def test_values_are_not_sent_to_a_rank_that_builds_another_model(difference: str) -> None:
    """Its bytes would be taken for other numbers; PyTorch's FSDP1 waits or ends the process."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    if dist.get_rank() == 1 and difference == "dtype":
        net[0].running_mean.data = net[0].running_mean.double()
    elif dist.get_rank() == 1:
        net[2].weight = net[1].weight
    sent = {"dtype": r"0\.running_mean \(torch\.float32 .*float64", "tie": r"2\.weight.*2\.bias"}
    with pytest.raises(PlanError, match=f"sync_module_states: rank 0 sends {sent[difference]}"):
        our_fsdp.FullyShardedDataParallel(net, sync_module_states=True)
