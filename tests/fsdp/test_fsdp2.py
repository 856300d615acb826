"""Programs written for FSDP2 give the same results with `shardwise.fsdp`."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fsdp
from tests.fsdp import programs2 as programs
from tests.fsdp.both import (
    DEADLINE,
    TOLERANCE,
    Case,
    cases,
    name_of,
    one_of,
    run_both,
    thorough,
)
from tests.ranks import on_ranks
from tests.versions import needs_dtype_overrides

BF16, F32 = torch.bfloat16, torch.float32
PARTS = ("head", "blocks.1", "blocks.0.up")
BOTH = (True, False)
WRAPPED = ("blocks", "root", "blocks alone", "layers")
CHECKPOINTS = ("reentrant", "non-reentrant")

CASES = [
    *cases(programs.train, wrapped=("blocks", "root", "layers"), optimizer=("sgd", "adamw")),
    # foreach kernels, which AdamW uses here, refuse a mixture of tensors and DTensors
    *cases(programs.train, wrapped=("blocks alone",), optimizer=("sgd",)),
    *thorough(cases(programs.train, wrapped=WRAPPED, optimizer=("adam", "adagrad", "rmsprop"))),
    *cases(
        programs.train,
        wrapped=("blocks", "root"),
        options=[{"reshard_after_forward": r} for r in (True, False, 2)],
        model=[{"tied": True}, *({"checkpointed": c} for c in CHECKPOINTS)],
    ),
    *cases(programs.accumulate, reshards=BOTH, last=BOTH),
    *cases(programs.accumulate_reduced),
    *cases(programs.finalized, asynchronous=BOTH),
    *cases(programs.clip, max_norm=(0.01, 100.0), norm_type=(1.0, 2.0, 3.0)),
    *cases(
        programs.precision,
        outer=(True,),
        policy=(
            {"param_dtype": BF16},
            {"param_dtype": BF16, "reduce_dtype": F32},
            {"param_dtype": BF16, "cast_forward_inputs": True},
            {"reduce_dtype": BF16},
        ),
    ),
    *cases(
        programs.precision,
        outer=(False,),
        policy=(
            {"param_dtype": BF16, "reduce_dtype": F32, "output_dtype": F32},
            {"reduce_dtype": BF16},
        ),
    ),
    *cases(programs.low_precision_model),
    *cases(programs.offload, pin_memory=(False,)),
    *cases(programs.no_offload),
    *cases(programs.ignore, which=PARTS[:2]),
    *cases(programs.ignore_in_a_block, is_meta=BOTH),
    *thorough(cases(programs.ignore, which=PARTS[2:])),
    *cases(programs.freeze, which=PARTS[2:]),
    *thorough(cases(programs.freeze, which=(*PARTS[:2], "embed"))),
    *one_of(programs.evaluate, wrapped=WRAPPED),
    *cases(programs.by_hand, asynchronous=BOTH, reshards=BOTH),
    *cases(programs.by_hand_ahead),
    *cases(programs.reshards_later, value=BOTH, recurse=BOTH),
    *one_of(programs.divides, factor=(5.0, 1.0, 2.0)),
    *one_of(programs.lists, count=(1, 2)),
    *cases(programs.called_list),
    *cases(programs.hints),
    *cases(programs.other_method),
    *one_of(programs.meta, wrapped=("layers", "blocks", "root")),
    *one_of(programs.filled_from_rank_0, wrapped=("blocks", "root"), moves=BOTH),
    *one_of(programs.filled_from_whole, wrapped=("blocks", "root")),
    *one_of(programs.assigned_from_whole, wrapped=("root", "blocks")),
    *cases(programs.inside_replicate),
    *cases(programs.sliced),
    *cases(programs.shapes),
    *cases(programs.placement_function),
    *cases(programs.state_dict, wrapped=("blocks", "blocks alone")),
    *thorough(cases(programs.state_dict, wrapped=("root", "layers"))),
    *one_of(programs.distributed_state_dict, optimizer=("adamw", "sgd", "adam")),
    *cases(programs.whole_state_dicts, optimizer=("sgd", "adamw"), cpu_offload=BOTH),
    *cases(programs.several_forwards),
    *cases(programs.sharded_twice),
    *cases(programs.gradient_hooks),
    *cases(programs.gradient_hooks_of_a_forward, reshard=BOTH),
    *cases(
        programs.extensions,
        kind=("pair", "bfloat16"),
        reshard=BOTH,
        policy=({}, {"param_dtype": BF16, "reduce_dtype": F32}),
    ),
]


@needs_dtype_overrides
@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("reduce_dtype", [None, F32, BF16])
def test_parameters_with_dtypes_of_their_own(reduce_dtype: torch.dtype | None) -> None:
    run_both(programs.overridden_dtypes, {"reduce_dtype": reduce_dtype})


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_program(case: Case) -> None:
    run_both(*case)


@on_ranks(4, deadline=DEADLINE)
@pytest.mark.parametrize(
    "case",
    [
        *cases(programs.hybrid, reshard=(None, False)),
        *cases(programs.hybrid_accumulates),
        *one_of(programs.all_reduce_hook, units=("blocks", "root", "layers")),
        *cases(programs.placements_of_hybrid, replicas=(1, 2)),
    ],
    ids=name_of,
)
def test_program_on_a_2d_mesh(case: Case) -> None:
    run_both(*case)


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize(
    "case",
    [
        *cases(programs.train, wrapped=("blocks",)),
        *cases(programs.train, wrapped=("layers",), options=[{"reshard_after_forward": False}]),
        *cases(programs.lists, count=(2,)),
        *cases(programs.meta, wrapped=("blocks",)),
        *cases(
            programs.precision, policy=[{"param_dtype": BF16, "reduce_dtype": F32}], outer=(True,)
        ),
        *cases(programs.offload, pin_memory=(False,)),
        *cases(programs.no_offload),
        *cases(programs.ignore, which=("head",)),
        *cases(programs.placement_function),
    ],
    ids=name_of,
)
def test_program_with_fully_shard_of_the_package_root(case: Case) -> None:
    _run_with_package_root(case)


@on_ranks(4, deadline=DEADLINE)
def test_program_with_fully_shard_of_the_package_root_on_a_2d_mesh() -> None:
    _run_with_package_root((programs.hybrid, {"reshard": None}))


def _run_with_package_root(case: Case) -> None:
    """Parameters are cut in other places than PyTorch's, so whole tensors are compared."""
    with mock.patch.object(programs, "own", programs.whole):
        run_both(*case, TOLERANCE, "tests.fsdp.sw_namespace")


def test_programs_find_the_class_and_the_state_of_a_unit() -> None:
    """NeMo and others look for the user's class behind `FSDPModule`, and read private names."""
    module: Any = fsdp.fully_shard(nn.Linear(2, 2), mp_policy=fsdp.MixedPrecisionPolicy(BF16))
    classes = type(module).__mro__
    assert classes[1:3] == (fsdp.FSDPModule, nn.Linear)
    assert next(c for c in classes if not issubclass(c, fsdp.FSDPModule)) is nn.Linear
    state = fsdp.fully_shard.state(module)  # type: ignore[attr-defined]
    assert module._get_fsdp_state() == state
    assert state._mp_policy.param_dtype is BF16
    assert state._fsdp_param_group is None  # DINOv3 then leaves a model for inference as it is
    module.set_requires_gradient_sync(False)
    module(torch.ones(1, 2)).sum().backward()
    module.set_requires_gradient_sync(True)
    for one in state._state_ctx.all_states:  # as the stages of pipelines do at the last backward
        one._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()
    assert torch.equal(module.weight.grad.full_tensor(), torch.ones(2, 2))


@on_ranks(2)
def test_programs_that_find_sharded_parameters_by_the_name_of_their_class() -> None:
    """They gather adapters to save them; without the name, they saved tensors without memory."""
    torch.manual_seed(0)
    alone = nn.Linear(4, 3).double()
    model = fsdp.fully_shard(copy.deepcopy(alone))
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        assert type(parameter).__name__ == "DTensor"
        assert type(parameter.data).__name__ == "DTensor"
        assert torch.equal(parameter.full_tensor(), alone.get_parameter(name))


@on_ranks(2, deadline=DEADLINE)
def test_stages_that_call_only_post_backward_reduce_what_micro_batches_added_up() -> None:
    """torch's stage also calls the final callback of the root; stages of other programs do not.

    A block is sharded on another mesh, as experts are, so it is a model of its own.
    """
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "alone"))
    gradients = []
    for api in (torch_fsdp, fsdp):
        torch.manual_seed(0)
        module: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
        api.fully_shard(module[0])
        api.fully_shard(module[1], mesh=alone["alone"])
        api.fully_shard(module)
        generator = torch.Generator().manual_seed(dist.get_rank())
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
        for _ in range(3):
            x = torch.randn(2, 4, dtype=torch.float64, generator=generator)
            module(x).square().sum().backward()
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True)
        module.set_requires_gradient_sync(True)
        state_of = api.fully_shard.state
        for state in state_of(module)._state_ctx.all_states:
            if state._fsdp_param_group:
                state._fsdp_param_group.post_backward()
        gradients.append([one.grad.full_tensor() for one in module.parameters()])
    torch.testing.assert_close(*gradients, rtol=TOLERANCE, atol=TOLERANCE)


@on_ranks(2, deadline=DEADLINE)
def test_modules_inside_that_are_converted_after_sharding_compute_in_their_new_dtype() -> None:
    """The conversion is not called on the model or on a unit, but on the layers inside."""
    found = []
    for api in (torch_fsdp, fsdp):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2)]
        module: Any = nn.Sequential(*blocks)
        for block in module:
            api.fully_shard(block)
        api.fully_shard(module)
        for block in module:
            for layer in block:
                layer.double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            x = torch.randn(2, 4, dtype=torch.float64, generator=generator)
            module(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([one.full_tensor() for one in module.parameters()])
    torch.testing.assert_close(*found, rtol=TOLERANCE, atol=TOLERANCE)
