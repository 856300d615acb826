"""``CPUOffloadPolicy(step="device")``: the same bits as without offload, and clear refusals."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

import shardwise as sw
from shardwise.runtime.memory import Pool
from shardwise.tensor.sharding import local_of
from tests.covering import covered_first
from tests.models import CASES, build
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks
from tests.runtime.one_process import full, options_of, own_part

ON_DEVICE = sw.CPUOffloadPolicy(step="device")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "loop": lambda p: NAdam(p, lr=1e-2, foreach=False),
    "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "without states": lambda p: SGD(p, lr=1e-2),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),  # has its states from the beginning
    "adam8bit": lambda p: sw.optim.Adam8bit(p, min_elements=1, block=4),
}
LOOPS = ("clipped", "accumulated", "in backward", "kept gradients", "zeros for unused")
STRATEGIES = ("fsdp", "zero2", "zero1", "ddp", "hsdp", "hfsdp")


def make(
    policy: sw.OffloadPolicy, optimizer: str, strategy: str = "fsdp", **options: Any
) -> tuple[nn.Module, Optimizer]:
    options = options_of(strategy) | {"offload_policy": policy} | options
    if optimizer == "adam8bit":
        options = {"granularity": "row"} | options
    model = sw.fully_shard(build("gpt"), units="auto", **options)
    return model, OPTIMIZERS[optimizer](model.parameters())


def step(model: nn.Module, optimizer: Optimizer, seed: int, loop: str = "clipped") -> None:
    torch.manual_seed(seed)
    case = CASES["gpt"]
    for _ in range(2 if loop == "accumulated" else 1):
        torch.autograd.backward(case.loss(model(own_part(case.batch(12)))))
    if loop == "clipped":
        sw.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=loop != "kept gradients")


def bits(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            if isinstance(value, Tensor):
                local = local_of(value) if hasattr(value, "placements") else value
                found[f"{name} {key}"] = local.detach().reshape(-1).view(torch.uint8).clone()
    return found


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


@on_ranks(4)
@pytest.mark.parametrize(
    ("optimizer", "loop", "strategy"), covered_first(product(OPTIMIZERS, LOOPS, STRATEGIES))
)
def test_a_step_has_the_bits_of_one_without_offload(
    optimizer: str, loop: str, strategy: str
) -> None:
    options = {"unused": "zeros"} if loop == "zeros for unused" else {}
    plain, offloaded = (
        make(policy, optimizer, strategy, **options) for policy in (sw.OffloadPolicy(), ON_DEVICE)
    )
    if loop == "in backward":
        for pair in (plain, offloaded):
            sw.optimizer_in_backward(*pair)
    for seed in range(3):
        for pair in (plain, offloaded):
            step(*pair, seed, loop)
        assert_same_bits(bits(*offloaded), bits(*plain))


@on_ranks(2)
def test_gradients_of_steps_in_backward_return_to_their_pool() -> None:
    pair = make(ON_DEVICE, "fused")
    sw.optimizer_in_backward(*pair)
    step(*pair, 0, "in backward")
    with mock.patch.object(Pool, "disown") as disown:
        step(*pair, 1, "in backward")
    assert not disown.called


@on_ranks(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_part_of_the_model_may_stay_on_the_device(in_backward: bool) -> None:
    plain, mixed = build("stack"), build("stack")
    sw.fully_shard(plain, units="auto")
    for layer in list(mixed.layers)[1:]:  # type: ignore[arg-type]
        sw.fully_shard(layer, offload_policy=ON_DEVICE)
    sw.fully_shard(mixed)
    pairs = [(one, AdamW(one.parameters(), fused=True)) for one in (plain, mixed)]
    for pair in pairs:
        if in_backward:
            sw.optimizer_in_backward(*pair)
    for seed in range(3):
        for model, optimizer in pairs:
            torch.manual_seed(seed)
            torch.autograd.backward(model(own_part(CASES["stack"].batch(4))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(plain.parameters(), mixed.parameters(), strict=True):
            assert torch.equal(full(p), full(q))


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["fused", "foreach", "momentum"])
def test_a_grad_scaler_skips_and_takes_steps(optimizer: str) -> None:
    pairs = [make(policy, optimizer) for policy in (sw.OffloadPolicy(), ON_DEVICE)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in pairs]
    for seed in range(4):
        for (model, it), scaler in zip(pairs, scalers, strict=True):
            torch.manual_seed(seed)
            loss = CASES["gpt"].loss(model(own_part(CASES["gpt"].batch(12))))
            loss = loss * float("inf") if seed == 2 else loss
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(it)
            scaler.update()
            it.zero_grad()
        assert_same_bits(bits(*pairs[1]), bits(*pairs[0]))
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**10


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["fused", "adam8bit"])
def test_a_save_is_loaded_with_and_without_offload(optimizer: str, tmp_path: Path) -> None:
    pair = make(ON_DEVICE, optimizer)
    step(*pair, 0)
    sw.save(tmp_path / "one", model=pair[0], optimizer=pair[1])
    step(*pair, 1)
    for policy in (ON_DEVICE, sw.CPUOffloadPolicy(), sw.OffloadPolicy()):
        other = make(policy, optimizer)
        sw.load(tmp_path / "one", model=other[0], optimizer=other[1])
        step(*other, 1)
        assert_same_bits(bits(*other), bits(*pair))
    loaded = make(ON_DEVICE, optimizer)
    loaded[0].load_state_dict(pair[0].state_dict())
    loaded[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
    for one in (pair, loaded):
        step(*one, 2)
    assert_same_bits(bits(*loaded), bits(*pair))


@on_ranks(2)
def test_a_transaction_undoes_the_step() -> None:
    pair = make(ON_DEVICE, "fused")
    step(*pair, 0)
    before = bits(*pair)

    def fail() -> None:
        with sw.transaction(*pair):
            step(*pair, 1)
            raise ValueError("afterwards")

    with pytest.raises(ValueError, match="afterwards"):
        fail()
    assert_same_bits(bits(*pair), before)
    with sw.transaction(*pair):
        step(*pair, 1)
    other = make(sw.OffloadPolicy(), "fused")
    for seed in range(2):
        step(*other, seed)
    assert_same_bits(bits(*pair), bits(*other))


@on_ranks(2)
def test_hooks_of_the_optimizer_run_once_in_a_step() -> None:
    model, optimizer = make(ON_DEVICE, "fused")
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for seed in range(2):
        step(model, optimizer, seed)
        scheduler.step()
    assert seen == ["before", "after"] * 2
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {2.0}


@on_ranks(2)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_once(by_name: bool) -> None:
    pairs = [make(policy, "foreach") for policy in (sw.OffloadPolicy(), ON_DEVICE)]
    for seed in range(3):
        losses = []
        for model, optimizer in pairs:
            torch.manual_seed(seed)
            optimizer.zero_grad()

            def closure(model: nn.Module = model) -> Tensor:
                loss: Tensor = CASES["gpt"].loss(model(own_part(CASES["gpt"].batch(12))))
                torch.autograd.backward(loss)
                return loss

            step: Any = optimizer.step
            losses.append(step(closure=closure) if by_name else step(closure))
        assert torch.equal(*losses)
        assert_same_bits(bits(*pairs[1]), bits(*pairs[0]))


@on_ranks(2)
def test_an_optimizer_of_other_tensors_steps_them() -> None:
    """For example the outer optimizer, which steps copies that are sharded like the parameters."""
    model, _ = make(ON_DEVICE, "fused")
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    before = bits(model, SGD(model.parameters()))
    expected = [local_of(one).detach() - 0.5 for one in copies]
    for one in copies:
        one.grad = torch.ones_like(one)
    SGD(copies, lr=0.5).step()
    for one, wanted in zip(copies, expected, strict=True):
        assert torch.equal(local_of(one).detach(), wanted)
    assert_same_bits(bits(model, SGD(model.parameters())), before)


@on_ranks(2)
def test_what_cannot_be_stepped_by_unit_is_refused() -> None:
    for kind in (sw.optim.Muon, sw.optim.SOAP):
        model = sw.fully_shard(build("gpt"), units="auto", offload_policy=ON_DEVICE)
        with pytest.raises(sw.PlanError, match=rf"{kind.__name__}: works on whole .*step='host'"):
            step(model, kind(matrix_groups(model.parameters())), 0)

    class Counting(SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step(closure)

    model, _ = make(ON_DEVICE, "fused")
    with pytest.raises(sw.StepError, match=r"Counting changed k of .*step=.host"):
        step(model, Counting(model.parameters(), lr=0.1), 0)
    with pytest.raises(sw.PlanError, match=r"step='gpu'\): expected 'host' or 'device'"):
        sw.CPUOffloadPolicy(step="gpu")  # type: ignore[arg-type]


@on_ranks(2)
def test_units_leave_the_device_after_an_error() -> None:
    pair, other = make(ON_DEVICE, "fused"), make(sw.OffloadPolicy(), "fused")
    for one in (pair, other):
        step(*one, 0)
    torch.manual_seed(1)
    torch.autograd.backward(CASES["gpt"].loss(pair[0](own_part(CASES["gpt"].batch(12)))))
    group = pair[1].param_groups[0]
    betas, group["betas"] = group["betas"], None
    with pytest.raises(TypeError):
        pair[1].step()
    group["betas"] = betas
    pair[1].zero_grad()
    for one in (pair, other):
        step(*one, 2)
    assert_same_bits(bits(*pair), bits(*other))
