"""unused="error": every rank raises, and names unused parameters with the ranks."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.features.unused import UsedParameterSync
from tests.models import WIDTH, Block
from tests.ranks import on_ranks, run_on
from tests.runtime.modules import Choosing
from tests.runtime.one_process import (
    assert_close,
    assert_equal_models,
    assert_equal_steps,
    options_of,
    own_part,
    sharded_pair,
    world_size,
)

CPU = torch.device("cpu")


@on_ranks(1, 2, 4)
def test_a_parameter_that_no_rank_used_is_named() -> None:
    reference, model = _pair()
    _check_step(reference, model)
    x = torch.randn(4, WIDTH).double()
    for _ in range(2):
        with pytest.raises(sw.StepError) as caught:
            model(x, [0, 2]).sum().backward()
        lines = str(caught.value).splitlines()
        assert lines[1:-1] == ["  experts.1: unused on every rank"]
        assert "unused='none'" in lines[-1]
        _check_step(reference, model)


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero2", "hsdp"])
def test_a_parameter_that_some_rank_did_not_use_is_named_with_the_rank(strategy: str) -> None:
    reference, model = _pair(**options_of(strategy))
    _check_step(reference, model)
    x = torch.randn(4, WIDTH).double()
    experts = {0: [0, 2], 1: [0, 1], 2: [0, 2], 3: [0, 2, 1]}[dist.get_rank()]
    with pytest.raises(sw.StepError) as caught:
        model(x, experts).sum().backward()
    lines = str(caught.value).splitlines()
    assert "  experts.1: unused on ranks 0, 2" in lines
    assert "  experts.2: unused on rank 1" in lines
    assert "experts.0" not in str(caught.value)
    assert "last" not in str(caught.value)
    for _ in range(2):
        _check_step(reference, model)


@on_ranks(2)
def test_frozen_parameters_never_count() -> None:
    reference = Choosing().double()
    reference.experts[1].requires_grad_(False)
    model = copy.deepcopy(reference)
    sw.fully_shard(model, units=Block, unused="error")
    for m in (reference, model):
        m.experts[2].requires_grad_(False)  # after sharding, too
    batch = torch.randn(4, WIDTH).double()
    model(own_part(batch), [0]).square().mean().backward()
    reference(batch, [0]).square().mean().backward()
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_gradients_that_are_taken_of_inputs_are_no_mistake() -> None:
    reference, model = _pair()
    batch = torch.randn(2 * world_size(), WIDTH).double().requires_grad_()
    (expected,) = torch.autograd.grad(reference(batch, [1]).sum(), batch)
    own = own_part(batch.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(model(own, [1]).sum(), own)
    assert_close(slope, own_part(expected), "slope")
    _check_step(reference, model)


@pytest.mark.parametrize("used", [[True, True, True], [True, False, True]])
def test_only_a_rank_that_left_out_parameters_reads_what_others_used(used: list[bool]) -> None:
    """Each rank exchanges at most one byte per parameter, for any number of ranks."""
    comm, gradients = mock.Mock(num_ranks=16384), _gradients(used)
    unit = mock.Mock(gradients=[gradients])
    unit.settings.across_replicas = None
    sync = UsedParameterSync([unit], comm, CPU, "agree")
    (flags, _, _), _ = comm.reduce.all_reduce_max.call_args
    assert flags.shape == (3,)
    flags.fill_(0)  # as if read too early
    assert sync.wait(comm) == ([True] * 3 if all(used) else [False] * 3)
    comm.wait.assert_called_once_with(comm.reduce.all_reduce_max.return_value)


def test_frozen_parameters_are_not_read() -> None:
    comm, gradients = mock.Mock(num_ranks=2), _gradients([True, False])
    gradients.parameters[1].sharded.requires_grad = False
    sync = UsedParameterSync([mock.Mock(gradients=[gradients])], comm, CPU, "agree")
    comm.reduce.all_reduce_max.call_args.args[0].fill_(0)
    assert sync.wait(comm) == [True, True]


def _gradients(used: list[bool]) -> mock.Mock:
    parameters = [mock.Mock() for _ in used]
    return mock.Mock(
        parameters=parameters,
        used=used,
        gets_gradient=lambda position: parameters[position].sharded.requires_grad,
    )


def test_the_list_of_parameters_and_ranks_is_short_enough_to_read() -> None:
    text = run_on(1, _many)[0]
    assert "experts.19:" in text
    assert "experts.20:" not in text
    assert "and 10 more" in text
    assert len(text.splitlines()) < 26


def _pair(**options: Any) -> tuple[Choosing, Choosing]:
    torch.manual_seed(0)
    return sharded_pair(Choosing().double(), units=Block, unused="error", **options)


def _check_step(reference: Choosing, model: Choosing) -> None:
    """Uses all experts, on every rank."""

    def loss(one: Any, x: torch.Tensor) -> Any:
        return one(x, [0, 1, 2]).square().mean()

    assert_equal_steps(model, reference, 1, loss=loss, zeroes=True)


def _many() -> str:
    model = sw.fully_shard(Choosing(31), units=Block, unused="error")
    with pytest.raises(sw.StepError) as caught:
        model(torch.randn(2, WIDTH), [30]).sum().backward()
    return str(caught.value)


class MaySkip(nn.Module):
    """Skips its only layer if ``skips`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skips else self.norm(x)


@on_ranks(2)
def test_a_frozen_unit_that_uses_what_is_trained_may_be_skipped_on_one_rank() -> None:
    """Its input needs no gradient, so its output needs one only on the other rank."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH))  # for which the first unit is freed
    reference = nn.Sequential(nn.Sequential(MaySkip()), nn.Linear(WIDTH, WIDTH), last).double()
    [skipping] = [m for m in reference.modules() if isinstance(m, MaySkip)]
    assert isinstance(reference[1], nn.Linear)
    skipping.norm.weight = reference[1].bias  # which the root holds
    skipping.norm.bias.requires_grad_(False)
    model = copy.deepcopy(reference)
    sw.fully_shard(model, units=nn.Sequential)
    batch = torch.randn(2 * world_size(), WIDTH).double()
    for step in range(3):
        for m in (one for one in model.modules() if isinstance(one, MaySkip)):
            m.skips = step > 0 and dist.get_rank() == 0
        model(own_part(batch)).square().mean().backward()
        losses = []
        for rank in range(world_size()):
            skipping.skips = step > 0 and rank == 0
            losses.append(reference(batch.chunk(world_size())[rank]).square().mean())
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    assert_equal_models(model, reference, 2)
