"""Steps in backward that fail, are undone, or are refused."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.features.training import Training, TrippingSGD
from tests.models import WIDTH, Block, Lora, LoraLinear, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_equal_models,
    own_part,
    rank,
    sharded_pair,
    squares,
    step_all,
)
from tests.waiting import eventually


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (2, "fsdp"),
        pytest.param(2, "ddp", marks=pytest.mark.thorough),
        pytest.param(4, "hsdp", marks=pytest.mark.thorough),
    ],
)
def test_a_transaction_undoes_the_steps_of_every_rank(strategy: str) -> None:
    places = ("backward", "second step", "after backward")
    undisturbed = StepsInBackward(strategy)
    expected = []
    for _ in places:
        undisturbed.step()
        expected.append(undisturbed.fingerprint())
    training = StepsInBackward(strategy)
    for place, wanted in zip(places, expected, strict=True):
        before = training.fingerprint()
        steps = training.num_steps
        with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted):
            training.step(place if rank() == 1 else "")
        if place != "backward" and rank() == 1:
            assert training.num_steps > steps, "nothing to undo: a weak test"
        assert training.fingerprint() == before, f"undone: {place}"
        training.step()
        assert training.fingerprint() == wanted, f"second attempt: {place}"


@on_ranks(2)
def test_the_step_after_an_exception_is_correct() -> None:
    training = StepsInBackward("fsdp")
    x = torch.randn(4, WIDTH)
    for place in ("backward", "second step"):
        training.failing.where, training.place = (place, place) if rank() == 1 else ("", "")
        with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted):
            training.model(x).square().mean().backward()
        training.failing.where, training.place = "", ""
        training.optimizer.trips = False
        assert all(p.grad is None for p in training.model.parameters())
        training.model.zero_grad()
        before = [p.full_tensor() for p in training.model.parameters()]  # type: ignore[attr-defined]
        training.model(x).square().mean().backward()
        after = [p.full_tensor() for p in training.model.parameters()]  # type: ignore[attr-defined]
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))


@on_ranks(1)
def test_an_exception_frees_the_gradients_of_units_that_have_not_stepped() -> None:
    training = StepsInBackward("fsdp")
    x = torch.randn(4, WIDTH)
    training.model(x)  # without a backward, so that all units are stepped at the end of the next
    training.place = "second step"
    with pytest.raises(ValueError, match="it hurts"):
        training.model(x).sum().backward()
    assert training.num_steps == 1
    assert all(p.grad is None for p in training.model.parameters())


@on_ranks(2)
def test_operations_that_need_all_gradients_are_refused() -> None:
    model = sw.fully_shard(build("stack").float(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    handle = sw.optimizer_in_backward(model, optimizer)
    x = torch.randn(4, WIDTH)
    model(x).sum().backward()
    with pytest.raises(sw.StepError, match=r"first\.weight: clipping by the global norm"):
        sw.clip_grad_norm_(model.parameters(), 1.0)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    for _ in range(2):
        with pytest.raises(sw.StepError, match=r"GradScaler.*bfloat16"):
            scaler.step(optimizer)
        model(x).sum().backward()
        scaler.update(1.0)
    handle.remove()
    model(x).sum().backward()
    assert sw.clip_grad_norm_(model.parameters(), 1.0) > 0
    optimizer.step()


@on_ranks(1)
def test_optimizers_that_do_not_fit_are_refused() -> None:
    model = sw.fully_shard(build("stack"), units=Block)
    parameters = dict(model.named_parameters())
    others = [p for name, p in parameters.items() if name != "layers.1.up.bias"]
    stray = nn.Parameter(torch.zeros(3, 2))
    for optimizer, match in (
        (torch.optim.LBFGS(parameters.values()), r"LBFGS .*closure"),
        (torch.optim.SGD(others), r"layers\.1\.up\.bias is not in the optimizer"),
        (
            torch.optim.SGD([*parameters.values(), stray]),
            r"param_groups\[0\]\['params'\]\[16\] of shape \(3, 2\) is not a parameter of",
        ),
        (model, r"takes a torch\.optim\.Optimizer, got FSDPStack"),
    ):
        with pytest.raises(sw.PlanError, match=match):
            sw.optimizer_in_backward(model, optimizer)
    optimizer = torch.optim.SGD(parameters.values())
    with pytest.raises(sw.PlanError, match="Stack is not sharded"):
        sw.optimizer_in_backward(build("stack"), optimizer)
    x = torch.randn(4, WIDTH).double()
    model(x).sum().backward()
    with pytest.raises(sw.PlanError, match=r"first\.weight has a gradient already"):
        sw.optimizer_in_backward(model, optimizer)
    optimizer.zero_grad()
    with sw.gathered(model), pytest.raises(sw.StepError, match="in the middle of a step"):
        sw.optimizer_in_backward(model, optimizer)
    handle = sw.optimizer_in_backward(model, optimizer)
    with pytest.raises(sw.PlanError, match="has an optimizer in backward"):
        sw.optimizer_in_backward(model, optimizer)
    handle.remove()
    for kind in (Counting, TrippingSGD):
        handle = sw.optimizer_in_backward(model, kind(parameters.values(), lr=0.1))
        with pytest.raises(sw.StepError, match=rf"{kind.__name__} changed k, .* instead of steps"):
            model(x).sum().backward()
        handle.remove()
    _refuse_late()


@on_ranks(2)
def test_removing_the_handle_ends_steps_in_backward() -> None:
    reference, model = sharded_pair("stack")
    optimizers = [adamw(one.parameters()) for one in (reference, model)]

    def steps() -> None:
        batch = torch.randn(12, WIDTH).double()
        squares(reference, batch).backward()
        squares(model, own_part(batch)).backward()
        step_all(optimizers)
        assert_equal_models(model, reference, 0)

    for _ in range(2):
        handle = sw.optimizer_in_backward(model, optimizers[1])
        steps()
        twin = copy.deepcopy(model)  # steps as usual
        twin(torch.randn(4, WIDTH).double()).sum().backward()
        assert sw.clip_grad_norm_(twin.parameters(), 1.0) > 0
        assert_equal_models(model, reference, 0)
        handle.remove()
        handle.remove()
        steps()
    x = torch.ones(4, WIDTH).double().requires_grad_()
    loss = _Remover.apply(x, model, optimizers[1])  # type: ignore[no-untyped-call]
    with pytest.raises(sw.StepError, match="in the middle of a step"):
        model(loss).sum().backward()


@on_ranks(2)
def test_a_deleted_model_frees_its_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        model = sw.fully_shard(build("stack"), units=Block)
        optimizer = adamw(model.parameters())
        handle = sw.optimizer_in_backward(model, optimizer)
        for _ in range(2):
            model(torch.randn(4, WIDTH).double()).sum().backward()
        shards = [weakref.ref(p.to_local()) for p in model.parameters()]
        del model, optimizer
        assert eventually(lambda: all(shard() is None for shard in shards))
        handle.remove()
    finally:
        gc.enable()


class StepsInBackward(Training):
    """A training with an optimizer in backward. The second unit can fail within its step."""

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy)
        self.optimizer.register_step_post_hook(self._trip_next)
        sw.optimizer_in_backward(self.model, self.optimizer)
        self.place = ""

    @property
    def num_steps(self) -> int:
        return self.optimizer.num_steps

    def _trip_next(self, *_: Any) -> None:
        self.optimizer.trips = self.place == "second step"

    def body(self, place: str) -> None:
        self.place = place
        batch = torch.randn(5, WIDTH)  # from the generator, whose state is restored
        self.model(batch).square().mean().backward()
        self.optimizer.param_groups[0]["lr"] *= 0.9
        if place == "after backward":
            raise ValueError("it hurts")


class Counting(torch.optim.SGD):
    """Counts its steps in param_groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def _refuse_late() -> None:
    """A frozen parameter may be missing from the optimizer, until it is unfrozen."""
    torch.manual_seed(0)
    lora = Lora().double()
    lora.layers[1].up.requires_grad_(False)
    model = sw.fully_shard(lora, units=LoraLinear)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    sw.optimizer_in_backward(model, optimizer)
    x = torch.randn(4, WIDTH).double()
    model(x).sum().backward()
    model = sw.fully_shard(Lora().double(), units=LoraLinear)
    down = model.layers[1].down
    assert isinstance(down, nn.Parameter)
    down.requires_grad_(False)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    sw.optimizer_in_backward(model, optimizer)
    down.requires_grad_(True)
    with pytest.raises(sw.StepError, match=r"layers\.1\.down has a gradient and is not in"):
        model(x).sum().backward()
    optimizer.add_param_group({"params": [down]})
    model(x).sum().backward()
    assert down in optimizer.state


class _Remover(torch.autograd.Function):
    """Removes the handle in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module, optimizer: Any) -> Tensor:
        ctx.handle = sw.optimizer_in_backward(model, optimizer)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.handle.remove()
