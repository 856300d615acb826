"""``CPUOffloadPolicy(step="device")``: the same bits as without offload, and clear refusals."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

import shardwise as sw
from shardwise.comm.device import Device
from shardwise.features import device_step
from shardwise.features.device_step import DeviceSteps
from shardwise.features.transaction import ModelSnapshot
from shardwise.runtime.gradients import _accumulate
from shardwise.runtime.hooks import apply_gradient_hooks
from shardwise.runtime.module import keeping_gradients
from shardwise.tensor.sharding import local_of
from tests.covering import covered_first
from tests.models import CASES, build
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks
from tests.runtime.modules import raise_together
from tests.runtime.one_process import full, options_of, own_part, runtime_of
from tests.runtime.same_bits import assert_same_bits, bits_of

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
        assert_same_bits(bits_of(*offloaded), bits_of(*plain))


@on_ranks(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_part_of_the_model_may_stay_on_the_device(in_backward: bool) -> None:
    plain, mixed = build("stack"), build("stack")
    sw.fully_shard(plain, units="auto")
    for layer in list(mixed.layers)[1:]:
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
        assert_same_bits(bits_of(*pairs[1]), bits_of(*pairs[0]))
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
        assert_same_bits(bits_of(*other), bits_of(*pair))
    loaded = make(ON_DEVICE, optimizer)
    loaded[0].load_state_dict(pair[0].state_dict())
    loaded[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))
    for one in (pair, loaded):
        step(*one, 2)
    assert_same_bits(bits_of(*loaded), bits_of(*pair))


@on_ranks(2)
def test_a_transaction_undoes_the_step() -> None:
    pair = make(ON_DEVICE, "fused")
    step(*pair, 0)
    before = bits_of(*pair)

    def fail() -> None:
        with sw.transaction(*pair):
            step(*pair, 1)
            raise_together(ValueError("afterwards"), dist.group.WORLD)

    with pytest.raises(ValueError, match="afterwards"):
        fail()
    assert_same_bits(bits_of(*pair), before)
    with sw.transaction(*pair):
        step(*pair, 1)
    other = make(sw.OffloadPolicy(), "fused")
    for seed in range(2):
        step(*other, seed)
    assert_same_bits(bits_of(*pair), bits_of(*other))


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
        assert_same_bits(bits_of(*pairs[1]), bits_of(*pairs[0]))


@on_ranks(2)
def test_an_optimizer_of_other_tensors_steps_them() -> None:
    """For example the outer optimizer, which steps copies that are sharded like the parameters."""
    model, _ = make(ON_DEVICE, "fused")
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    before = bits_of(model, SGD(model.parameters()))
    expected = [local_of(one).detach() - 0.5 for one in copies]
    for one in copies:
        one.grad = torch.ones_like(one)
    SGD(copies, lr=0.5).step()
    for one, wanted in zip(copies, expected, strict=True):
        assert torch.equal(local_of(one).detach(), wanted)
    assert_same_bits(bits_of(model, SGD(model.parameters())), before)


class Undeclared(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        self.update()

    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    average = state.setdefault("average", torch.zeros_like(p))
                    average.mul_(0.9).add_(p.grad)
                    p.add_(average, alpha=-group["lr"])


class Declared(Undeclared):
    steps_units = True


class Redefined(Declared):
    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # noqa: ARG002
        self.update()


class WithArguments(Redefined):
    steps_units = True


class Nested(Declared):
    steps_units = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Counting(Declared):
    steps_units = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        self.update()


@on_ranks(2)
def test_what_cannot_be_stepped_by_unit_is_refused() -> None:
    for kind in (sw.optim.Muon, sw.optim.SOAP):
        model = sw.fully_shard(build("gpt"), units="auto", offload_policy=ON_DEVICE)
        with pytest.raises(sw.StepError, match=rf"{kind.__name__} works on whole .*step='host'"):
            step(model, kind(matrix_groups(model.parameters())), 0)
    model, _ = make(ON_DEVICE, "fused")
    before = bits_of(model, SGD(model.parameters()))
    for unknown in (Undeclared, Redefined):
        expected = rf"{unknown.__name__} is not known to .*steps_units = True.*step='host'"
        with pytest.raises(sw.StepError, match=expected):
            step(model, unknown(model.parameters()), 0)
    optimizer: Any = WithArguments(model.parameters())
    with pytest.raises(sw.StepError, match=r"WithArguments.step: .* no argument but closure"):
        optimizer.step(scale=2.0)
    assert_same_bits(bits_of(model, SGD(model.parameters())), before)
    with pytest.raises(sw.StepError, match=r"Counting changed k, .*step=.host"):
        step(model, Counting(model.parameters()), 0)
    with pytest.raises(sw.StepError, match=r"Nested.step\(\) calls step\(\) of another class"):
        step(model, Nested(model.parameters()), 0)
    with pytest.raises(sw.PlanError, match=r"step='gpu'\): expected 'host' or 'device'"):
        sw.CPUOffloadPolicy(step="gpu")  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match=r"is cut by a dim \(granularity='dim'"):
        make(ON_DEVICE, "fused", granularity="dim")


@on_ranks(2)
def test_a_declared_optimizer_steps_unit_by_unit() -> None:
    pairs = []
    for policy in (sw.OffloadPolicy(), ON_DEVICE):
        model, _ = make(policy, "fused")
        pairs.append((model, Declared(model.parameters())))
    for seed in range(3):
        for pair in pairs:
            step(*pair, seed, "kept gradients")
        assert all(p.grad is not None for p in pairs[1][0].parameters())
        assert_same_bits(bits_of(*pairs[1]), bits_of(*pairs[0]))


@on_ranks(2)
def test_a_hook_after_the_step_sees_gradients_and_may_drop_them() -> None:
    model, optimizer = make(ON_DEVICE, "fused")
    seen: list[bool] = []

    def drop(optimizer: Optimizer, *_: Any) -> None:
        seen.extend(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()

    optimizer.register_step_post_hook(drop)
    for seed in range(2):
        torch.manual_seed(seed)
        torch.autograd.backward(CASES["gpt"].loss(model(own_part(CASES["gpt"].batch(12)))))
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert seen
    assert all(seen)


def halve(parameter: Tensor) -> None:
    parameter.data.mul_(0.5)


def halve_all(optimizer: Optimizer, *_: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if p.grad is not None:
            halve(p)
            for value in optimizer.state[p].values():
                value.mul_(0.5)


@on_ranks(2)
@pytest.mark.parametrize("of", ["parameter", "optimizer"])
def test_hooks_in_backward_may_change_parameters_and_states(of: str) -> None:
    pairs = [make(policy, "momentum") for policy in (sw.OffloadPolicy(), ON_DEVICE)]
    for model, optimizer in pairs:
        if of == "parameter":
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        else:
            optimizer.register_step_pre_hook(halve_all)
        sw.optimizer_in_backward(model, optimizer)
    for seed in range(3):
        for pair in pairs:
            step(*pair, seed, "in backward")
        assert_same_bits(bits_of(*pairs[1]), bits_of(*pairs[0]))


@on_ranks(2)
def test_a_copy_that_fails_raises_at_the_end_of_the_step() -> None:
    model, optimizer = make(ON_DEVICE, "fused")
    step(model, optimizer, 0)
    host = {id(flat.codec.shard) for unit in runtime_of(model).units for flat in unit.flats}

    def fail(to: Tensor, of: Tensor) -> None:
        if id(to) in host:
            raise RuntimeError("no copy to the host")
        to.copy_(of)

    with (
        mock.patch.object(device_step, "copy_", fail),
        pytest.raises(RuntimeError, match="no copy to the host"),
    ):
        step(model, optimizer, 1)


@on_ranks(2)
def test_attributes_of_parameters_are_carried() -> None:
    model, optimizer = make(ON_DEVICE, "fused")
    step(model, optimizer, 0)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        model(own_part(CASES["gpt"].batch(12)))
    local_of(layer.weight)  # it has arrived
    vars(layer.weight)["tag"] = "a"
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, *_: seen.append(getattr(module.weight, "tag", "")))
    step(model, optimizer, 1)
    assert seen == ["a"]


@on_ranks(2)
def test_what_arrives_is_awaited() -> None:
    """Parameters that the optimizer does not have, parameters without dims, and state dicts."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * self.scale
            return out

    model = Scaled()
    sw.fully_shard(model, offload_policy=ON_DEVICE)
    optimizer = AdamW([model.inner.weight, model.scale])

    def train() -> None:
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()

    def waits(use: Callable[[], object]) -> int:
        with mock.patch.object(Device, "synchronize") as wait:
            use()
        return int(wait.call_count)

    train()
    assert waits(lambda: local_of(model.inner.bias)) == 1
    assert waits(lambda: local_of(model.inner.bias)) == 0
    assert waits(lambda: local_of(optimizer.state[model.scale]["exp_avg"])) == 1
    train()
    assert waits(optimizer.state_dict) == 4
    assert waits(optimizer.state_dict) == 0
    assert model.inner.bias not in optimizer.state


@on_ranks(2)
def test_gradients_elsewhere_than_the_shards_are_kept() -> None:
    """As on a GPU; the gradients are on meta here."""

    def assert_elsewhere() -> None:
        for p in model.parameters():
            assert p.grad is not None
            assert (p.grad.device.type, local_of(p.grad).device.type) == ("cpu", "meta")

    model, _ = make(ON_DEVICE, "fused")
    for unit in runtime_of(model).units:
        for p in unit.parameters:
            p.sharded.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
            elsewhere = torch.empty(p.local.numel(), device="meta")
            gradient = apply_gradient_hooks(p.sharded, p.sharding.wrap_gradient(elsewhere))
            _accumulate(p, gradient)
    assert_elsewhere()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2  # reports meta
    assert_elsewhere()
    snapshot = ModelSnapshot(model, runtime_of(model).scheduler, torch.device("cpu"))
    model.zero_grad()
    snapshot.restore()
    assert_elsewhere()
    with keeping_gradients(model):
        model.zero_grad()
    assert_elsewhere()


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "row"])
def test_a_gradient_elsewhere_that_is_cut_differently_is_refused(granularity: Any) -> None:
    model = sw.fully_shard(nn.Linear(6, 4), granularity=granularity, offload_policy=ON_DEVICE)
    mesh = init_device_mesh("cpu", (2,))
    cuts: list[Any] = [Replicate(), Shard(1)]  # with as many elements as the shard, too
    elsewhere = torch.empty(4, 6, device="meta")
    for placement in cuts:
        gradient = distribute_tensor(elsewhere, mesh, [placement])
        with pytest.raises(sw.ShardedTensorError, match=r"weight.grad: expected .* compute it"):
            model.weight.grad = gradient


@on_ranks(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_no_entries_without_states(in_backward: bool) -> None:
    pair = make(ON_DEVICE, "without states")
    if in_backward:
        sw.optimizer_in_backward(*pair)
    step(*pair, 0, "in backward" if in_backward else "clipped")
    assert not pair[1].state


@on_ranks(2)
def test_a_step_outside_of_backward_is_finished() -> None:
    model, optimizer = make(ON_DEVICE, "fused")
    sw.optimizer_in_backward(model, optimizer)
    step(model, optimizer, 0, "in backward")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with mock.patch.object(DeviceSteps, "finish", autospec=True) as finish:
        optimizer.step()
    assert finish.call_count == 1


@on_ranks(2)
def test_gradients_stay_after_an_error_in_other_parameters() -> None:
    model, _ = make(ON_DEVICE, "fused")
    head = nn.Linear(2, 2)

    class Failing(Declared):
        def update(self) -> None:
            if any(p is head.weight for group in self.param_groups for p in group["params"]):
                raise_together(ValueError("head"), dist.group.WORLD)
            super().update()

    optimizer = Failing([*model.parameters(), *head.parameters()])
    torch.autograd.backward(head(torch.ones(2)).sum())
    with pytest.raises(ValueError, match="head"):
        step(model, optimizer, 0)
    assert all(p.grad is not None for p in (*model.parameters(), *head.parameters()))


@on_ranks(2)
def test_units_leave_the_device_after_an_error() -> None:
    pair, other = make(ON_DEVICE, "fused"), make(sw.OffloadPolicy(), "fused")
    for one in (pair, other):
        step(*one, 0)
    torch.manual_seed(1)
    torch.autograd.backward(CASES["gpt"].loss(pair[0](own_part(CASES["gpt"].batch(12)))))
    group = pair[1].param_groups[0]
    betas, group["betas"] = group["betas"], None
    dist.barrier()  # otherwise a rank could end the backward of one that is late
    with pytest.raises(TypeError):
        pair[1].step()
    group["betas"] = betas
    pair[1].zero_grad()
    for one in (pair, other):
        step(*one, 2)
    assert_same_bits(bits_of(*pair), bits_of(*other))
