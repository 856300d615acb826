"""Assigning to parameters and gradients between steps, as programs for plain tensors do."""

import copy
import functools
import io
import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import PlanError, ShardedTensorError
from shardwise.fsdp import FullyShardedDataParallel, fully_shard
from shardwise.fsdp.wrap import ModuleWrapPolicy
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import local_of, sharding_of
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import BATCH, assert_equal_models, full, own_part


def shard_by_fsdp2(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def shard_by_fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)


INTERFACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp": lambda m: sw.fully_shard(m, units=Block),
    "zero2": lambda m: sw.fully_shard(m, units=Block, strategy="zero2"),
    "ddp": lambda m: sw.fully_shard(m, units=Block, strategy="ddp"),
    "dim": lambda m: sw.fully_shard(m, units=Block, granularity="dim"),
    "dim, ddp": lambda m: sw.fully_shard(m, units=Block, granularity="dim", strategy="ddp"),
    "the drop-in's FSDP2": shard_by_fsdp2,
    "the drop-in's FSDP1": shard_by_fsdp1,
}


def restore(model: nn.Module, _optimizer: Any) -> None:
    kept = [parameter.data.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value


def assign_whole(model: nn.Module, _optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data = full(parameter.detach()) * 2


def assign_gradient(model: nn.Module, _optimizer: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 2
        parameter.grad.data = full(parameter.grad.data) * 2


def perturb(model: nn.Module, _optimizer: Any) -> None:
    kept = [parameter.data for parameter in model.parameters()]
    gradients = [cast("Tensor", parameter.grad).data for parameter in model.parameters()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data + 1
        parameter.grad.data = parameter.grad.data * 2
    for parameter, value, gradient in zip(model.parameters(), kept, gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(full(value) + 1, full(parameter.data))
        parameter.data, parameter.grad.data = value, gradient


def exchange(model: nn.Module, _optimizer: Any) -> None:
    pairs = itertools.combinations(model.parameters(), 2)
    one, other = next((a, b) for a, b in pairs if a.shape == b.shape)
    for _ in range(3):
        one.data, other.data = other.data, one.data


def swap(model: nn.Module, _optimizer: Any) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))  # type: ignore[no-untyped-call]


def assign_parameters(model: nn.Module, optimizer: Any) -> None:
    for name, parameter in list(model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, nn.Parameter(parameter.detach() * 2))
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize("interface", ["fsdp", "zero2", "dim", "the drop-in's FSDP2"])
@on_ranks(2)
def test_shards_of_another_rank_are_refused(interface: str) -> None:
    """The first rank alone has saved. FSDP2 loads its rows on all ranks."""
    model = INTERFACES[interface](build("stack"))
    torch.save(model.state_dict(), file := io.BytesIO())
    dist.broadcast_object_list(box := [file.getvalue()])
    saved = torch.load(io.BytesIO(box[0]), weights_only=True)
    expected = [full(parameter.detach()) for parameter in model.parameters()]
    if dist.get_rank() == 0:
        model.load_state_dict(saved)
    else:
        message = r"has shard 0 of 2, and this rank stores shard 1\. .* sw\.save"
        with pytest.raises(sw.CheckpointError, match=message):
            model.load_state_dict(saved)
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(full(parameter.detach()), value)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "ddp", "granularity": "dim"},
        {"strategy": "ddp", "in_mesh": True},
        {"strategy": "hsdp", "sharding_factor": 2},
        {"strategy": "hsdp", "in_mesh": True},
    ],
    ids=str,
)
@on_ranks(4)
def test_ranks_load_what_another_rank_with_the_same_shards_has_saved(
    options: dict[str, Any],
) -> None:
    """The ranks of one replica save, as in programs for DDP; all of them train as one would."""
    options = dict(options)
    if options.pop("in_mesh", False):
        is_flat = options["strategy"] == "ddp"
        options["mesh"] = init_device_mesh("cpu", (4,) if is_flat else (2, 2))
    num_shards = 1 if options["strategy"] == "ddp" else 2

    def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        sw.fully_shard(model, units="auto", **options)
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer)
        return model, optimizer

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(3, WIDTH, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = trained(build("stack"))
    torch.save((model.state_dict(), optimizer.state_dict()), file := io.BytesIO())
    files: list[bytes] = [b""] * 4
    dist.all_gather_object(files, file.getvalue())
    saved = torch.load(io.BytesIO(files[dist.get_rank() % num_shards]), weights_only=True)
    train_step(model, optimizer)

    other, its_optimizer = trained(build("stack", seed=7))
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    state = its_optimizer.state_dict()["state"][0]["exp_avg"]
    if isinstance(state, ShardedTensor):
        assert state.sharding.mesh.group_rank == dist.get_rank()
    train_step(other, its_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(one.detach()), full(two.detach()))
        first, second = (x.state[p]["exp_avg"] for x, p in ((optimizer, one), (its_optimizer, two)))
        assert torch.equal(full(first), full(second))


def saved_file(**options: Any) -> bytes:
    model = sw.fully_shard(build("stack"), units="auto", **options)
    torch.save(model.state_dict(), file := io.BytesIO())
    return file.getvalue()


def load_on_rank(file: bytes, strategy: str) -> None:
    model = sw.fully_shard(build("stack", seed=7), units="auto", strategy=strategy)
    model.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
    assert_equal_models(model, build("stack"), 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_whole_model_that_a_rank_has_saved_is_loaded_anywhere(num_ranks: int) -> None:
    file = run_on(num_ranks, functools.partial(saved_file, strategy="ddp"))[0]
    plain = build("stack", seed=7)
    plain.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
    assert_equal_models(plain, build("stack"), 0)
    for num_others, strategy in ((4, "ddp"), (4, "fsdp"), (1, "fsdp")):
        run_on(num_others, load_on_rank, file, strategy)


def test_a_shard_without_its_ranks_is_refused() -> None:
    file = run_on(2, saved_file)[1]
    with pytest.raises(ShardedTensorError, match=r"has shard 1 of 2, .* sw\.save"):
        torch.load(io.BytesIO(file), weights_only=False)


@on_ranks(2)
def test_optimizer_states_of_another_rank_are_refused_by_the_step() -> None:
    model = sw.fully_shard(build("stack"), units="auto")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    dist.broadcast_object_list(box := [file.getvalue()])
    optimizer.load_state_dict(torch.load(io.BytesIO(box[0]), weights_only=True))
    if dist.get_rank() == 0:
        optimizer.step()
        return
    message = r"of shard [01] of .* and shard [01] of .* save with sw\.save"
    with pytest.raises(ShardedTensorError, match=message):
        optimizer.step()


@pytest.mark.parametrize("interface", INTERFACES)
@on_ranks(2)
def test_assignments_are_obeyed(interface: str) -> None:
    """FSDP2 ignores ``p.data = value``."""
    for event in (
        restore,
        perturb,
        exchange,
        assign_whole,
        assign_gradient,
        swap,
        assign_parameters,
    ):
        reference = build("stack")
        model = INTERFACES[interface](copy.deepcopy(reference))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        for _ in range(2):
            batch = torch.randn(BATCH, WIDTH).double()
            for m, x, optimizer in zip(
                (reference, model), (batch, own_part(batch)), optimizers, strict=True
            ):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                event(m, optimizer)
                optimizer.step()
        inner = model.module if isinstance(model, FullyShardedDataParallel) else model
        for parameter, expected in zip(inner.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.detach()), expected.detach())
        if inner is model:
            assert_equal_models(model, reference, 1)
            model(own_part(batch))
            assert all(sharding_of(parameter) is not None for parameter in model.parameters())


@pytest.mark.parametrize("interface", INTERFACES)
@on_ranks(2)
def test_assignments_that_do_not_fit_are_refused(interface: str) -> None:
    model = INTERFACES[interface](build("stack"))
    model(own_part(torch.randn(BATCH, WIDTH).double())).sum().backward()
    parameter = next(model.parameters())
    for value in (torch.zeros(3, dtype=torch.float64), torch.zeros(parameter.shape)):
        with pytest.raises(ShardedTensorError, match=r"\.data: expected a tensor of torch.float64"):
            parameter.data = value
        assert parameter.grad is not None
        with pytest.raises(ShardedTensorError, match=r"\.data: expected a tensor of torch.float64"):
            parameter.grad.data = value
    name = next(name for name, _ in model.named_parameters())
    path, _, attribute = name.rpartition(".")
    for dtype in (torch.float64, torch.float32):
        whole = nn.Parameter(full(parameter.detach()).to(dtype))
        setattr(model.get_submodule(path), attribute, whole)
        with pytest.raises(PlanError, match=r"was replaced.*: expected torch.float64"):
            model(own_part(torch.randn(BATCH, WIDTH).double()))


def exchange_by_state_dict(model: nn.Module, one: str, other: str) -> None:
    state = model.state_dict()
    state[one], state[other] = state[other], state[one]
    model.load_state_dict(state, assign=True)


def exchange_by_setattr(model: nn.Module, one: str, other: str) -> None:
    parameters = [model.get_parameter(name) for name in (one, other)]
    for name, parameter in zip((other, one), parameters, strict=True):
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, parameter)


def exchange_by_swap(model: nn.Module, one: str, other: str) -> None:
    parameters = [model.get_parameter(name) for name in (one, other)]
    torch.utils.swap_tensors(*parameters)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("interface", [name for name in INTERFACES if "FSDP1" not in name])
@on_ranks(2)
def test_parameters_may_be_exchanged(interface: str) -> None:
    """Also those of different units."""
    one, other = "layers.0.up.weight", "layers.1.up.weight"
    for exchange in (exchange_by_state_dict, exchange_by_setattr, exchange_by_swap):
        model = INTERFACES[interface](build("stack"))
        values = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
        values[one], values[other] = values[other], values[one]
        exchange(model, one, other)
        with sw.gathered(model):
            pass
        exchange(model, one, other)
        exchange(model, one, other)
        model(own_part(torch.randn(BATCH, WIDTH).double()))
        for name, parameter in model.named_parameters():
            assert torch.equal(full(parameter.detach()), values[name]), name


def exchange_models(how: str, one: nn.Module, other: nn.Module) -> None:
    """Exchange the parameters of two models."""
    for path, module in one.named_modules():
        beside = other.get_submodule(path)
        for name in list(module._parameters):
            pair = module.get_parameter(name), beside.get_parameter(name)
            if how == "swap":
                torch.utils.swap_tensors(*pair)  # type: ignore[no-untyped-call]
            else:
                setattr(module, name, pair[1])
                setattr(beside, name, pair[0])


@pytest.mark.parametrize("interface", [name for name in INTERFACES if "FSDP1" not in name])
@on_ranks(2)
def test_parameters_of_two_models_may_be_exchanged(interface: str) -> None:
    """As for evaluations with averaged weights."""
    references = [build("stack", seed) for seed in range(2)]
    models = [INTERFACES[interface](copy.deepcopy(reference)) for reference in references]
    batch = torch.randn(BATCH, WIDTH).double()
    for number, how in itertools.product(range(3), ["setattr", "swap"]):
        for pair, x in (references, batch), (models, own_part(batch)):
            exchange_models(how, *pair)
            for model in pair[:number]:  # with 0 and 1, the next exchange comes before a forward
                model(x).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad)  # type: ignore[arg-type]
    for model, reference in zip(models, references, strict=True):
        assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_a_conversion_that_changes_nothing_writes_nothing() -> None:
    parameter = next((model := sw.fully_shard(build("stack"), units=Block)).parameters())
    local, before = local_of(parameter), local_of(parameter)._version
    model.to(torch.float64)
    model(own_part(torch.randn(BATCH, WIDTH).double()))
    assert local_of(parameter) is local
    assert local._version == before


@on_ranks(1)
def test_untying_a_sharded_model_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    sw.fully_shard(model)
    for index in (0, 1):
        before = model[index].weight
        model[index].weight = nn.Parameter(before.detach() * 2)
        with pytest.raises(PlanError, match=r"0\.weight, 1\.weight: .* hold different tensors"):
            model(torch.randn(BATCH, WIDTH))
        model[index].weight = before
    doubled = model[0].weight.detach() * 2
    model.load_state_dict(
        model.state_dict() | dict.fromkeys(("0.weight", "1.weight"), doubled), assign=True
    )
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert model[0].weight is model[1].weight
    assert torch.equal(full(model[0].weight.detach()), full(doubled))


TIED = {
    "runs": {"units": nn.Sequential},
    "units of their own": {"units": nn.Linear},
    "chunks": {"units": nn.Sequential, "granularity": "dim"},
    "ddp": {"units": nn.Sequential, "strategy": "ddp"},
    "offload": {"units": nn.Sequential, "offload_policy": sw.CPUOffloadPolicy()},
}


@pytest.mark.parametrize("options", TIED.values(), ids=TIED)
@on_ranks(2)
def test_parameters_may_be_tied_before_the_first_forward(options: dict[str, Any]) -> None:
    """Programs tie again what initialization or loading untied; one process does the same."""
    found = []
    for own in (None, options):
        torch.manual_seed(0)
        model: Any = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        ).double()
        model.append(nn.Linear(WIDTH, WIDTH).double())
        if own is not None:
            sw.fully_shard(model, **own)
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        inputs = torch.arange(4.0 * WIDTH).double().view(4, WIDTH).sin()
        for _ in range(3):
            part = inputs if own is None else inputs.chunk(2)[dist.get_rank()]
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[2].weight is model[0].weight
        found.append([full(one.detach()) for one in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_held", [False, True], ids=["reduced", "held"])
@on_ranks(2)
def test_a_tie_between_micro_batches_keeps_gradients(is_held: bool) -> None:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
        inputs = torch.arange(4.0 * WIDTH).double().view(4, WIDTH).sin()
        if is_sharded:
            sw.fully_shard(model)
            model.set_requires_gradient_sync(not is_held)
            inputs = inputs.chunk(2)[dist.get_rank()]
        model(inputs).square().mean().backward()
        if is_sharded:
            model.set_requires_gradient_sync(True)
        model[2].weight = model[0].weight
        model(2 * inputs).square().mean().backward()
        found.append([full(one.grad) for one in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@on_ranks(1)
def test_what_gathers_units_alone_needs_a_forward_after_a_new_tie() -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sw.fully_shard(model, units=nn.Linear)
    model[1].weight = model[0].weight
    inputs = torch.randn(BATCH, WIDTH)
    for function in (sw.gathered(model).__enter__, lambda: model[1](inputs)):
        with pytest.raises(PlanError, match=r"1\.weight was tied to 0\.weight .* before a forward"):
            function()
    model(inputs).sum().backward()
    with sw.gathered(model):
        assert torch.equal(model[1].weight, model[0].weight)


@pytest.mark.parametrize("interface", INTERFACES)
@on_ranks(1)
def test_parameters_listed_before_sharding_have_no_values(interface: str) -> None:
    model = build("stack")
    before = list(model.parameters())
    model = INTERFACES[interface](model)
    sizes = [(p.numel(), p.shape, p.dtype) for p in before]
    assert sizes == [(p.numel(), p.shape, p.dtype) for p in model.parameters()]
    assert len(dict.fromkeys(before)) == len(before)
    assert [repr(p) for p in before] == [repr(p) for p in model.parameters()]
    uses: list[Callable[[nn.Parameter], Any]] = [
        lambda p: p.square().sum(),
        lambda p: p.mul_(0.5),
        lambda p: torch.stack([p]),
        lambda p: setattr(p, "data", torch.zeros(p.shape)),
    ]
    with torch.no_grad():
        for use in uses:
            with pytest.raises(ShardedTensorError, match=r"list model.parameters\(\) after"):
                use(before[0])
    model(torch.randn(BATCH, WIDTH).double()).sum().backward()
    optimizer = torch.optim.SGD(before, lr=0.1)
    assert nn.utils.clip_grad_norm_(before, 1.0) > 0
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    its_parameters = its_optimizer.param_groups[0]["params"]
    assert set(map(id, its_parameters)) == set(map(id, copied.parameters()))


@on_ranks(2)
def test_a_parameter_in_chunks_is_pickled_as_a_dtensor() -> None:
    parameter = next(sw.fully_shard(build("stack"), granularity="dim").parameters())
    buffer = io.BytesIO()
    torch.save(parameter, buffer)
    buffer.seek(0)
    loaded: Tensor = torch.load(buffer, weights_only=False)
    assert type(loaded) is DTensor
    assert loaded.requires_grad
    assert torch.equal(full(loaded.detach()), full(parameter.detach()))


@on_ranks(1)
def test_a_weak_reference_that_would_leave_optimizers_with_old_parameters_is_refused() -> None:
    model = build("stack").requires_grad_(False)
    next(model.parameters()).requires_grad_(True)
    sw.fully_shard(model)
    by_parameter: weakref.WeakKeyDictionary[nn.Parameter, str] = weakref.WeakKeyDictionary()
    by_parameter.update({p: name for name, p in model.named_parameters()})
    model.requires_grad_(True)
    with pytest.raises(PlanError, match="holds a weak reference to this parameter"):
        model(torch.randn(BATCH, WIDTH).double())
    assert by_parameter


@on_ranks(2)
def test_a_parameter_in_chunks_its_gradient_and_a_state_dict_are_copied() -> None:
    model = sw.fully_shard(build("stack"), granularity="dim")
    model(own_part(torch.randn(BATCH, WIDTH).double())).sum().backward()
    parameter = next(model.parameters())
    copied = copy.deepcopy(parameter)
    assert isinstance(copied, nn.Parameter)
    assert copied.grad is not None
    assert parameter.grad is not None
    for one, other in ((copied, parameter), (copied.grad, parameter.grad)):
        assert local_of(one).data_ptr() != local_of(other).data_ptr()
        assert torch.equal(full(one.detach()), full(other.detach()))
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {DTensor}
    for name, value in copy.deepcopy(state).items():
        assert torch.equal(full(value), full(state[name]))
