"""`sw.verify` finds and names errors, and reports none for a correct engine."""

from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.cli.run_verify import BUILT_IN
from shardwise.plan.strategy import STRATEGIES
from shardwise.tensor.mesh import resolve_mesh
from shardwise.verification.batches import cut_batch
from shardwise.verification.exchange import RankExchange
from shardwise.verification.reference import Reference, Training
from tests.models import CASES, WIDTH, Block, Stack, UnusedAndReused, build
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import TOLERANCE, assert_close
from tests.verification.judging import judge

PRESETS = tuple(dict.fromkeys(row.name for row in STRATEGIES.values()))
CHEAP = ((2, "lora"),)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *CHEAP,
        *(
            pytest.param(ranks, name, marks=pytest.mark.thorough)
            for ranks in (2, 4)
            for name in BUILT_IN
            if (ranks, name) not in CHEAP
        ),
    ],
)
def test_every_preset_is_equal_on_every_model(ranks: int, name: str) -> None:
    for found in run_on(ranks, _presets, name):
        assert found.ok, found.explanation
        assert tuple(one.strategy for one in found.comparisons) == PRESETS
        assert all(one.num_steps == 2 for one in found.comparisons)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_corrupted_gradient_is_named_on_every_rank(ranks: int) -> None:
    name = "blocks.1.attention.out.weight"
    results = run_on(ranks, _presets, "gpt", name)
    assert len({found.table for found in results}) == 1
    found = results[0]
    assert [one.strategy for one in found.comparisons if not one.ok] == list(PRESETS)
    for one in found.comparisons:
        assert one.worst.name == one.parameter.name == name
        assert one.worst.error > 1e-3
        assert one.num_steps == 1
        assert one.loss.error < 1e-12
    with pytest.raises(sw.VerificationError, match=f"GPT with fsdp.*the gradient of {name}"):
        found.raise_for_difference()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_of_a_policy_is_equal_and_more_is_not(dtype: torch.dtype) -> None:
    policy = sw.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    arguments: dict[str, Any] = {
        "model_fn": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        "batch_fn": lambda _step: torch.randn(8, 4),
        "loss_fn": lambda model, batch: model(batch).double().square().mean(),
        "strategies": ("ddp", "fsdp"),
        "mp_policy": policy,
    }
    found = sw.verify(**arguments)
    assert found.ok, found.explanation
    worst = max(one.gradient.error for one in found.comparisons)
    assert torch.finfo(dtype).eps / 100 < worst, "the model computed in the dtype"
    assert not sw.verify(**arguments, tolerance=worst / 2).ok


@on_ranks(2)
def test_other_differences_are_reported() -> None:
    def louder(model: nn.Module, x: Tensor) -> Tensor:
        is_wrong = isinstance(model, sw.FSDPModule) and dist.get_rank() == 1
        return _square(model, x) + (1e-6 if is_wrong else 0.0)

    explanation = _differences(loss_fn=louder)
    assert "the loss in step 0 is off by" in explanation
    assert "gradient" not in explanation

    def faster(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        several = list(parameters)
        is_sharded = isinstance(several[0], sw.ShardedTensor)
        return torch.optim.SGD(several, lr=0.1 + 1e-6 * is_sharded)

    explanation = _differences(optimizer_fn=faster)
    assert "after the optimizer's step in step 0 is off by" in explanation
    assert "gradient" not in explanation

    def forgetful(model: Switched, x: Tensor) -> Tensor:
        model.on = not isinstance(model, sw.FSDPModule)
        return _square(model, x)

    explanation = _differences(Switched, loss_fn=forgetful, units=Block)
    assert f"the gradient of spare in step 0 is None, expected [{WIDTH}]" in explanation

    def eager(model: Switched, x: Tensor) -> Tensor:
        model.on = isinstance(model, sw.FSDPModule)
        return _square(model, x)

    explanation = _differences(Switched, loss_fn=eager, units=Block)
    assert "the gradient of spare in step 0 is a tensor, expected None" in explanation

    def not_a_number(model: nn.Module, x: Tensor) -> Tensor:
        return _square(model, x) * (torch.nan if isinstance(model, sw.FSDPModule) else 1.0)

    assert "the loss in step 0 is off by inf" in _differences(loss_fn=not_a_number)


@on_ranks(2)
def test_a_model_whose_own_gradients_are_not_finite_is_named() -> None:
    def infinite(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) * 0.0).sqrt().mean()
        return loss  # 0, and its gradient is not finite

    explanation = _differences(loss_fn=infinite)
    assert "is not finite in one process, so cannot be compared" in explanation


@on_ranks(4)
def test_each_rank_has_its_own_buffers() -> None:
    found = sw.verify(Steered, _rows, "fsdp", loss_fn=_square, units=Block, steps=3, quiet=True)
    assert found.ok, found.explanation


@on_ranks(3)
def test_the_reference_trains_on_the_whole_batch() -> None:
    """This holds for a model that treats rows independently."""
    peers = RankExchange(dist.group.WORLD)
    training = Training(Stack, _square, None)
    reference = Reference(training, resolve_mesh(None, STRATEGIES["ddp"]), peers)
    batches = [cut_batch(_rows, step, peers, reference.device) for step in range(3)]
    outcomes = [reference.step(parts, zeros=False) for parts in batches]
    model = training.build()
    optimizer = training.optimizer(model)
    for parts, outcome in zip(batches, outcomes, strict=True):
        loss = _square(model, torch.cat([part.rows for part in parts]))
        loss.backward()  # type: ignore[no-untyped-call]
        assert abs(outcome.loss - loss.item()) < TOLERANCE
        for name, parameter in model.named_parameters():
            assert_close(outcome.gradients[name], parameter.grad, name)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert_close(outcome.parameters[name], parameter.detach(), name)


@on_ranks(4)
def test_a_mesh_and_one_of_its_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = sw.verify(Stack, _rows, mesh=mesh, loss_fn=_square, steps=1, quiet=True)
    assert found.ok
    assert {"hsdp"} <= {one.strategy for one in found.comparisons} < set(PRESETS)
    row = mesh["shard"]
    found = sw.verify(Stack, _rows, mesh=row, loss_fn=_square, steps=1, quiet=True)
    assert found.num_ranks == 2
    assert {"fsdp"} <= {one.strategy for one in found.comparisons} < set(PRESETS)


@on_ranks(2, thorough=(4,))
def test_other_arguments() -> None:
    """These arguments change the computation, but the result is equal."""
    usual: dict[str, Any] = {"loss_fn": _square, "quiet": True}
    for options in ({"unused": "zeros", "units": None}, {"prefetch": 0, "units": Block}):
        found = sw.verify(UnusedAndReused, _rows, "fsdp", **usual, **options)
        assert found.ok, found.explanation
    for policy in (sw.CPUOffloadPolicy(), sw.CPUOffloadPolicy(parameters=False)):
        assert sw.verify(Stack, _rows, ("zero2", "fsdp"), offload_policy=policy, **usual).ok
    batch = {"x": torch.randn(8, WIDTH), "scale": 3}
    found = sw.verify(KeywordLoss, lambda _: batch, "fsdp", quiet=True)
    assert found.ok
    assert sw.verify(lambda: build("recurrent"), _rows, "fsdp", units=nn.LSTM, **usual).ok
    case = CASES["mixed dtypes"]
    assert sw.verify(case.build, _rows, "fsdp", units=case.units, **usual).ok


def test_one_process_without_a_group(capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    found = sw.verify(Stack, _rows, loss_fn=_square, units=Block)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.ok
    assert not any("hsdp" in one.strategy for one in found.comparisons)
    assert capfd.readouterr().out.strip() == found.table
    assert found.table.startswith("Stack, 1 rank against one process")
    assert sw.verify(Stack, _rows, "fsdp", loss_fn=_square, quiet=True).ok
    assert capfd.readouterr().out == ""


def test_the_first_rank_shows_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on(2, _shown) == [True, False]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategies": "zero9"}, "strategy='zero9': expected one of"),
        ({"strategies": []}, "expected at least one of ddp"),
        ({"strategies": "hsdp"}, "needs a mesh with two dimensions"),
        ({"steps": 0}, "steps=0.*expected steps of 1 or more"),
        ({"tolerance": -1.0}, "tolerance=-1.0"),
        ({"units": "Blok"}, "units="),
        ({"corrupt": "frist.weight"}, "'frist.weight'.*did you mean 'first.weight'"),
        ({"loss_fn": lambda model, x: model(x)}, r"the loss is shape \[12, 6\]: expected a scalar"),
        ({"loss_fn": lambda model, x: 3.0}, "the loss is float"),  # noqa: ARG005
        ({"model_fn": lambda: "model"}, "model_fn returned str: expected a new torch.nn.Module"),
        ({"model_fn": nn.ReLU}, "ReLU without parameters"),
        ({"model_fn": lambda: sw.fully_shard(Stack())}, "that is not sharded"),
        ({"batch_fn": lambda step: step}, r"batch_fn\(0\) has no tensors"),
        ({"batch_fn": torch.tensor}, "a scalar tensor"),
        ({"batch_fn": lambda step: (torch.ones(4), torch.ones(6))}, "4 and 6 rows"),  # noqa: ARG005
        ({"batch_fn": lambda step: torch.ones(0, 6)}, r"0 rows.*return 1"),  # noqa: ARG005
    ],
)
def test_a_mistake_is_reported(arguments: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {
        "model_fn": Stack,
        "batch_fn": _rows,
        "loss_fn": _square,
        "quiet": True,
    }
    with pytest.raises(sw.PlanError, match=message):
        sw.verify(**(usual | arguments))


def test_a_frozen_parameter_cannot_be_corrupted() -> None:
    subject = BUILT_IN["lora"]
    with pytest.raises(
        sw.PlanError, match=r"'head\.weight': no parameter of this name gets a grad"
    ):
        sw.verify(
            subject.model_fn, subject.batch_fn, loss_fn=subject.loss_fn, corrupt="head.weight"
        )


@on_ranks(2)
def test_mistakes_on_some_ranks_are_reported_on_all() -> None:
    def refused(message: str, model_fn: Callable[[], nn.Module], batch_fn: Any = _rows) -> None:
        with pytest.raises(sw.PlanError, match=message):
            sw.verify(model_fn, batch_fn, "fsdp", loss_fn=_square, quiet=True)

    refused("model_fn gave second different values in a second call", Forgotten)
    model = Stack()
    refused(r"model_fn returned first\.weight twice", lambda: model)
    several = iter([Stack(depth=1), Stack(depth=2)])
    refused(r"built layers\.1\.down\.bias.* in one call and not", lambda: next(several))
    rank = dist.get_rank()
    refused(
        "has 5 rows, which do not divide evenly over 2 ranks; return 4 or 6 rows",
        Stack,
        lambda _: torch.ones(5, WIDTH),
    )
    refused(
        r"batch_fn\(0\) differs between ranks 0 and 1",
        Stack,
        lambda _: torch.full((4, WIDTH), rank),
    )
    # Detected on one rank, reported on both.
    refused(r"has 3 rows.*\(on rank 1\)", Stack, lambda _: torch.ones(2 + rank, WIDTH))

    def fickle() -> nn.Module:
        model = Stack()
        if rank == 1:
            nn.init.normal_(model.norm.weight, generator=other)
        return model

    other = torch.Generator()
    refused(r"model_fn gave norm\.weight different values.*\(on rank 1\)", fickle)
    refused(r"first\.bias differs between ranks 0 and 1", partial(_by_rank, rank))


# -- on a rank -----------------------------------------------------------------------------------


def _rows(_step: int) -> Tensor:
    return torch.randn(12, WIDTH)


def _square(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


def _presets(model: str, corrupt: str | None = None) -> sw.Verification:
    return judge(model, corrupt=corrupt)


def _shown() -> bool:
    with redirect_stdout(StringIO()) as shown:
        found = sw.verify(Stack, _rows, loss_fn=_square, units=Block)
    assert shown.getvalue().strip() in ("", found.table)
    return bool(shown.getvalue())


class Switched(nn.Module):
    """Uses the parameter ``spare`` only while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.block = Block()
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y * self.spare if self.on else y


def _differences(model_fn: Callable[[], nn.Module] = Stack, **arguments: Any) -> str:
    """Return the explanation of the differences with fsdp, which begin in the first step."""
    usual: dict[str, Any] = {"strategies": "fsdp", "loss_fn": _square, "quiet": True}
    found = sw.verify(model_fn, _rows, **(usual | arguments))
    assert not found.ok
    assert found.comparisons[0].num_steps == 1
    return found.explanation


class Steered(nn.Module):
    """Its output depends on the inputs it has seen, and on the number of calls."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + x.mean()
        self.calls += 1
        y: Tensor = self.block(x + self.seen)
        return y * self.calls


class KeywordLoss(nn.Module):
    """Takes a batch as keyword arguments and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: Tensor, scale: int) -> Tensor:
        y: Tensor = self.stack(x)
        return y.square().mean() * scale


class Forgotten(nn.Module):
    """Builds different values each time, independent of torch's seed."""

    num_built = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_built += 1
        self.first = nn.Linear(WIDTH, 1)
        self.second = nn.Parameter(torch.full((WIDTH,), float(self.num_built)))


def _by_rank(rank: int) -> nn.Module:
    model = Stack()
    nn.init.constant_(model.first.bias, rank)
    return model
