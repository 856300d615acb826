"""Traps: changes to a model between its forwards, backwards and steps."""

import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import shardwise as sw
from shardwise.features.unused import UsedParameterSync
from shardwise.schedule.events import EventKind
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    adamw,
    assert_close,
    assert_equal_models,
    assert_equal_steps,
    options_of,
    own_part,
    sharded_pair,
    squares,
)
from tests.waiting import eventually

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


def sharded(**options: Any) -> Any:
    return sw.fully_shard(build("stack"), units=Block, **options)


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, WIDTH, generator=generator).double()


def check_step(model: nn.Module) -> None:
    """Compare a step with that of one process on the same parameters."""
    reference = build("stack")
    with torch.no_grad():
        for whole, own in zip(reference.parameters(), model.parameters(), strict=True):
            whole.copy_(own.full_tensor())  # type: ignore[attr-defined]
    assert_equal_steps(model, reference, 1, batch=batch, zeroes=True)


# -- unshard and reshard ---------------------------------------------------------------------------


@on_ranks(2)
def test_a_change_after_unshard_fails_reshard_alone() -> None:
    model = sharded()
    for is_assigned in (False, True):
        model.layers[0].unshard()
        with torch.no_grad():
            if is_assigned:
                model.layers[0].up.weight = nn.Parameter(model.layers[0].up.weight + 1.0)
            else:
                model.layers[0].up.weight.add_(1.0)
        with pytest.raises(sw.StepError, match=r"layers\.0\.up\.weight: changed in place"):
            model.layers[0].reshard()
        check_step(model)
        with sw.gathered(model):
            pass
        check_step(model)


# -- parameters that change ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_step_between_forward_and_backward_is_refused(strategy: str) -> None:
    model = sharded(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (model(own_part(batch())).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(sw.StepError, match=r"first\.weight.*changed between a forward of"):
        second.backward()
    check_step(model)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@on_ranks(2)
def test_a_step_of_torchs_dtensors_between_forward_and_backward_is_refused(kind: str) -> None:
    model = sharded(granularity="dim")
    options: Any = {kind: True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    first, second = (model(own_part(batch())).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(sw.StepError, match=r"first\.weight.*changed between a forward of"):
        second.backward()


def change_local(model: nn.Module) -> None:
    model.get_parameter("layers.1.up.weight").to_local().detach().mul_(2)  # type: ignore[attr-defined]


def load(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


def write_back(model: nn.Module) -> None:
    with sw.gathered(model, write_back=True), torch.no_grad():
        model.get_parameter("layers.1.up.weight").mul_(2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_local, "layers.1.up.weight"),
        (load, "first.weight"),
        (write_back, "layers.1.up.weight"),
    ],
)
@on_ranks(2)
def test_any_change_between_forward_and_backward_is_refused(
    change: Callable[[nn.Module], None], name: str
) -> None:
    model = sharded()
    loss = model(own_part(batch())).square().mean()
    change(model)
    with pytest.raises(sw.StepError, match=name + ".*changed between a forward of"):
        loss.backward()
    change(model)
    check_step(model)


class Momentum(nn.Module):
    """Changes units after the forward of the first: one with a target, as MoCo does, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.target, self.second = Block(), Block(), Block()
        self.target.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            for own, source in zip(self.target.parameters(), self.first.parameters(), strict=True):
                own.data = own.data * 0.9 + source.data * 0.1
            self.second.up.weight.mul_(0.5)
            target = self.target(x)
        output: Tensor = self.second(x) - target
        return output


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_forward_may_change_units_that_it_calls_later(strategy: str) -> None:
    """Also from the second step on, when they were gathered ahead."""
    torch.manual_seed(0)
    reference, model = sharded_pair(Momentum().double(), units=Block, **options_of(strategy))
    assert_equal_steps(model, reference, 4, make_optimizer=adamw, zeroes=True)


@on_ranks(2)
def test_gathering_between_forward_and_backward_changes_nothing() -> None:
    model = sharded()
    loss = model(own_part(batch())).square().mean()
    with sw.gathered(model, write_back=True):
        pass
    loss.backward()
    check_step(model)


# -- modules that change ---------------------------------------------------------------------------


def replace_head(model: Any) -> None:
    model.norm = nn.LayerNorm(WIDTH).double()


def add_adapter(model: Any) -> None:
    model.layers[1].adapter = nn.Linear(WIDTH, 2)


def add_parameter(model: Any) -> None:
    model.layers[1].up.scale = nn.Parameter(torch.ones(1))


def append_block(model: Any) -> None:
    model.layers.append(Block().double())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_head, r"norm\.weight, norm\.bias"),
        (add_adapter, r"layers\.1\.adapter\.weight"),
        (add_parameter, r"layers\.1\.up\.scale"),
        (append_block, r"layers\.3\.\w+\.weight"),
    ],
)
@on_ranks(2)
def test_parameters_that_are_added_after_fully_shard_are_named(
    change: Callable[[Any], None], name: str
) -> None:
    model = sharded()
    change(model)
    with pytest.raises(sw.PlanError, match=name + r".*added or replaced after fully_shard"):
        model(own_part(batch()))


@on_ranks(2)
def test_modules_without_parameters_may_come_and_go() -> None:
    model = sharded()
    model.layers[1].drop = nn.Dropout(0.5)
    check_step(model)
    del model.layers[1].drop
    check_step(model)


# -- tensors that are kept -------------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps a tensor of its forward somewhere, and returns another."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.where = where
        self.kept: Any = SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x).tanh()
        match self.where:
            case "attribute":
                self.kept = y
            case "dict of lists":
                self.kept = {"of": [None, y]}
            case "object":
                self.kept.y = y
            case "buffer":
                del self.kept
                self.register_buffer("kept", y, persistent=False)
        z: Tensor = self.second(y)
        return z

    @property
    def tensor(self) -> Tensor:
        kept = self.kept
        match self.where:
            case "dict of lists":
                kept = kept["of"][1]
            case "object":
                kept = kept.y
        assert isinstance(kept, Tensor)
        return kept


@pytest.mark.parametrize("where", ["attribute", "dict of lists", "object", "buffer"])
@on_ranks(2)
def test_a_tensor_kept_by_a_module_has_a_backward(where: str) -> None:
    layers = nn.Sequential(Keeps(where), Keeps(where)).double()
    reference, model = sharded_pair(layers, units=Keeps)
    for step in range(3):
        for m, x in ((model, own_part(batch())), (reference, batch())):
            m.zero_grad()
            m(x)
            losses = [part.tensor.square().mean() for part in m if isinstance(part, Keeps)]
            losses[step % 2].backward()  # type: ignore[no-untyped-call]
        assert_equal_models(model, reference, step)


# -- what is refused -------------------------------------------------------------------------------


@on_ranks(2)
def test_an_embedding_that_rescales_rows_in_forward_is_refused() -> None:
    for strategy in ("ddp", "fsdp"):
        for kind in (nn.Embedding, nn.EmbeddingBag):
            model = nn.Sequential(OrderedDict(words=kind(8, 4, max_norm=1.0)))
            with pytest.raises(sw.PlanError, match=r"words\.weight: max_norm=1\.0"):
                sw.fully_shard(model, strategy=strategy)


@pytest.mark.parametrize("has_accelerator", [False, True])
@pytest.mark.parametrize("size", [None, "1", "2"])
def test_fully_shard_under_torchrun_joins_the_other_ranks(
    size: str | None, has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a process group, ranks train separate models, and a single one stays on the CPU."""
    joined: list[bool] = []
    monkeypatch.setattr(dist, "init_process_group", lambda: joined.append(True))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    launched = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
    for name, value in launched.items():
        monkeypatch.delenv(name, raising=False)
        if size is not None and value is not None:
            monkeypatch.setenv(name, value)
    sharded()
    assert joined == [True] * (size == "2" or (size == "1" and has_accelerator))


def test_fully_shard_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(sw.PlanError, match=r"torch\.inference_mode"):
        sharded()


@on_ranks(2)
def test_the_gradient_accumulator_of_a_sharded_parameter_is_not_revealed() -> None:
    """Zero-bubble pipeline schedules find the weight gradients through it."""
    model = sharded()
    x = own_part(batch()).requires_grad_()
    loss = model(x).square().mean()
    with pytest.raises(sw.ShardedTensorError, match=r"first\.weight.*shardwise\.pipeline"):
        stage_backward_input([loss], None, [x], model.parameters())
    with torch.no_grad():
        assert model.first.weight.view_as(model.first.weight) is not None


# -- steps in backward -----------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_without_gradients_is_named() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(own_part(batch())).square().mean().backward(inputs=list(model.parameters()))
    with pytest.warns(
        UserWarning, match=r"SGD steps, and none of its \d+ .*call loss\.backward\(\)"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # said once
    optimizer.zero_grad()
    check_step(model)


@on_ranks(2)
def test_a_closure_may_compute_the_gradients_of_a_step() -> None:
    model, expected = sharded(), build("stack")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        model(own_part(batch())).square().mean().backward()
        return 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
        optimizer.zero_grad()
        optimizer.step(closure=closure)
    for _ in range(2):
        reference.zero_grad()
        expected(batch()).square().mean().backward()
        reference.step()
    assert_equal_models(model, expected, 1)


@on_ranks(2)
def test_the_first_step_with_an_optimizer_in_backward_holds_few_gradients() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(own_part(batch())).square().mean().backward()
    optimizer.zero_grad()
    sw.optimizer_in_backward(model, optimizer)
    model(own_part(batch())).square().mean().backward()
    kinds = [event.kind for event in sw.ledger(model).events()]
    held = [
        kinds[:i].count(EventKind.FINISH_REDUCE) - kinds[:i].count(EventKind.STEP)
        for i in range(len(kinds))
    ]
    assert max(held) <= 2


# -- errors at the end of backward -----------------------------------------------------------------


@on_ranks(2)
def test_an_exchange_under_way_outlives_the_step_that_failed() -> None:
    model = sharded()
    seen: list[weakref.ref[UsedParameterSync]] = []

    def wait(sync: UsedParameterSync, _comm: Any) -> None:
        seen.append(weakref.ref(sync))
        raise RuntimeError("here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UsedParameterSync, "wait", wait)
        with pytest.raises(RuntimeError):
            model(own_part(batch())).square().mean().backward()
    assert seen[0]() is not None, "other ranks may write its flags"
    check_step(model)
    gc.collect()  # the frames of the exception are in a cycle
    assert eventually(lambda: seen[0]() is None)


# -- the ledger ------------------------------------------------------------------------------------


@on_ranks(2)
def test_evaluation_keeps_no_more_records_than_one_forward() -> None:
    model = sharded()
    for _ in range(2):
        model(own_part(batch())).square().mean().backward()
    trained = sw.ledger(model).events()
    with torch.no_grad():
        model(own_part(batch()))
        once = len(sw.ledger(model).records(2))
        for _ in range(10):
            model(own_part(batch()))
    assert once
    assert len(sw.ledger(model).records(2)) == once
    model(own_part(batch())).square().mean().backward()
    assert sw.ledger(model).events() == trained


@on_ranks(2)
def test_a_module_that_was_replaced_trains_once_it_is_sharded() -> None:
    model = sharded()
    check_step(model)
    torch.manual_seed(3)
    model.layers[1] = Block().double()
    sw.fully_shard(model.layers[1])
    for _ in range(2):
        check_step(model)


# -- memory of a parameter that is replaced in forward ---------------------------------------------


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Parametrized(Block):
    """A block whose weight is parametrized while it computes, as peft does for expert weights."""

    def forward(self, x: Tensor) -> Tensor:
        register_parametrization(self.up, "weight", Halved())  # calls `weight.set_(weight)`
        try:
            return super().forward(x)
        finally:
            remove_parametrizations(self.up, "weight", leave_parametrized=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("granularity", ["element", "dim"])
@on_ranks(2)
def test_a_parametrization_within_forward_trains_as_in_one_process(
    granularity: Any, strategy: str
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Parametrized() for _ in range(3))).double()
    options = {"strategy": strategy, "granularity": granularity}
    reference, model = sharded_pair(layers, units=Parametrized, **options)
    assert_equal_steps(model, reference, 2, batch=batch, make_optimizer=adamw)
    with torch.no_grad():
        assert_close(model(batch()), reference(batch()), "output")


class Replacing(Block):
    """A block that replaces its weight, or the memory of it, in forward by twice its values."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        if "data" in self.how:
            weight.data = weight.data * 2
        elif "set" in self.how:
            with torch.no_grad():
                weight.set_(weight * 2)  # type: ignore[call-overload]
        elif "assign" in self.how:
            self.up.weight = nn.Parameter(weight.detach() * 2, requires_grad=weight.requires_grad)
        if "raise" in self.how:
            raise ValueError(self.how)
        return super().forward(x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["data", "set", "assign"])
@on_ranks(2)
def test_replaced_memory_is_taken_over_or_refused(how: str, strategy: str) -> None:
    """An assigned parameter is refused in any case: its gradient would not be reduced."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Replacing() for _ in range(3))).double()
    reference, model = sharded_pair(layers, units=Replacing, strategy=strategy)
    # Then the parameters are never freed, so no change of their memory is lost.
    is_whole = strategy == "ddp" and how != "assign"
    model[1].how = how
    if is_whole:
        reference[1].how = how
        assert_equal_steps(model, reference, 1, zeroes=True)
    else:
        with pytest.raises(sw.StepError, match=r"1\.up\.weight: changed in place"):
            squares(model, own_part(batch())).backward()
    model[1].how = reference[1].how = ""
    assert_equal_steps(model, reference, 1, zeroes=True)
    for one, x in (model, own_part(batch())), (reference, batch()):
        one[1].how = f"{how}, raise"
        with pytest.raises((ValueError, sw.StepError)):
            one(x)
        one[1].how = ""
    if not is_whole:  # the change is dropped with the step
        with torch.no_grad():
            reference[1].up.weight.div_(2)
    assert_equal_steps(model, reference, 1, zeroes=True)
