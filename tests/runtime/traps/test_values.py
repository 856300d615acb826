"""Traps: averages, ties, unusual dtypes and sizes, buffers, optimizers and copies."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise import fsdp
from tests.models import CASES, WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    adamw,
    assert_close,
    assert_equal_models,
    assert_equal_steps,
    assert_equal_training,
    full,
    own_part,
    rank,
    sharded_pair,
    step_all,
    world_size,
)


@on_ranks(3)
def test_a_loss_per_token_of_the_global_batch() -> None:
    """If ranks have different numbers of tokens, the mean of their means is not the global mean.
    A loss that is weighted by each rank's share gives the gradients of one process.
    """
    reference, model = sharded_pair(nn.Sequential(Block(), Block()).double(), units=Block)
    counts = [1, 2, 7]
    batch = torch.randn(sum(counts), WIDTH).double()
    own = batch.split(counts)[rank()]  # type: ignore[no-untyped-call]
    total = torch.tensor(len(own))
    dist.all_reduce(total)
    (model(own).square().sum() / total * world_size()).backward()
    (reference(batch).square().sum() / len(batch)).backward()
    assert_equal_models(model, reference, 0)


@on_ranks(2)
def test_tied_parameters_count_once_in_norm_and_optimizer() -> None:
    """Peers count parameters that are tied across units twice, or untie them."""
    for name in ("gpt", "tied"):
        model = assert_equal_training(name, clip=0.01)  # the norm is compared as well
        parameters = list(model.parameters())
        assert len({id(p) for p in parameters}) == len(parameters)
    reference = build("gpt")
    model = sw.fully_shard(build("gpt"), units="auto")
    assert model.head.weight is model.embedding.weight
    total = sum(p.square().sum() for p in model.parameters())
    assert isinstance(total, Tensor)
    wanted = sum(p.square().sum() for p in reference.parameters())
    assert isinstance(wanted, Tensor)
    assert_close(total.detach(), wanted.detach(), "sum of squares")


@on_ranks(2)
@pytest.mark.parametrize("drop_in", [False, True])
def test_modules_with_one_weight_may_be_units_of_their_own(drop_in: bool) -> None:
    """FSDP2 once left the rows of the last rank as they were, and refuses such units now."""
    shard = fsdp.fully_shard if drop_in else sw.fully_shard
    reference: Any = build("gpt")
    model = copy.deepcopy(reference)
    for module in (model.embedding, *model.layers, model.head, model):
        shard(module)
    assert model.head.weight is model.embedding.weight
    make_batch = CASES["gpt"].batch
    assert_equal_steps(
        model,
        reference,
        loss=lambda one, tokens: one(tokens),
        batch=lambda: make_batch(BATCH),
        make_optimizer=adamw,
    )


@on_ranks(2)
@pytest.mark.parametrize("meta", [False, True])
def test_an_attribute_that_is_computed_from_its_parameter(meta: bool) -> None:
    """As in layers whose weight is pruned or quantized when it is read."""
    reference: Any = nn.Sequential(Masked(), Masked()).double()
    with torch.device("meta" if meta else "cpu"):
        model: Any = nn.Sequential(Masked(), Masked()).double()
    for module in (*model, model):
        sw.fully_shard(module, granularity="dim", on_different_values="warn")
    model.to_empty(device="cpu")
    with sw.gathered(model, write_back=True):
        for name, value in nn.Module.named_parameters(reference):
            dict(nn.Module.named_parameters(model))[name].data.copy_(value)
    for one, other in zip(model.buffers(), reference.buffers(), strict=True):
        one.copy_(other)
    optimizers = [adamw(one.parameters()) for one in (model, reference)]
    for _ in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        for one, part in ((model, own_part(batch)), (reference, batch)):
            one(part).square().mean().backward()
        step_all(optimizers)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(full(p.detach()), q.detach(), "weight")


@on_ranks(1, 2, 4)
def test_trainable_float32_and_float64_in_one_unit() -> None:
    """FSDP2 refuses mixed dtypes in one unit; here each dtype has a buffer."""
    layers = nn.Sequential(MixedTrainable(), MixedTrainable())
    reference, model = sharded_pair(layers, units=MixedTrainable)
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for _ in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        for m, part in ((model, own_part(batch)), (reference, batch)):
            x, y = m((part, part.float()))
            (x.square().mean() + y.square().mean()).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.dtype == p.grad.dtype == q.dtype
            bound = 1e-12 if p.dtype == torch.float64 else 1e-6
            error = (full(p.grad).double() - q.grad.double()).norm().item()
            assert error <= bound, f"{name}: {error:.1e}"
        step_all(optimizers)


@on_ranks(4)
@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
def test_ranks_without_any_elements(kind: str) -> None:
    """In peers, empty shards break foreach kernels, clipping and CPU Adam; scalars are refused."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=1e-2, eps=1e-3, foreach=kind == "foreach", fused=kind == "fused"
        )

    model = assert_equal_training("tiny", make_optimizer=make, clip=0.01)
    empty = [p for p in model.parameters() if isinstance(p, sw.ShardedTensor)]
    assert any(not p.to_local().numel() for p in empty), "no rank is without elements: a weak test"
    some = [p for p in empty if p.numel()]  # torch has no infinity norm of empty tensors
    for order in (1.0, 2.0, float("inf")):
        found = nn.utils.get_total_norm([p.detach() for p in some], order)
        wanted = nn.utils.get_total_norm([p.full_tensor() for p in some], order)
        assert_close(found, wanted, f"norm {order}")


@on_ranks(2)
def test_buffers_are_whole_and_each_ranks_own() -> None:
    """Buffers are neither sharded nor synchronized; each rank keeps its own values."""
    alone, model = sharded_pair(nn.Sequential(Counting(), Counting()).double(), units=Counting)
    batch = torch.randn(BATCH, WIDTH).double()
    for _ in range(2):
        model(own_part(batch)).square().mean().backward()
        alone(own_part(batch)).square().mean().backward()
    for (name, buffer), expected in zip(model.named_buffers(), alone.buffers(), strict=True):
        assert not isinstance(buffer, sw.ShardedTensor)
        assert torch.equal(buffer, expected), name
    assert "0.mean" in model.state_dict()
    assert "0.scale" not in model.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("name", ["stack", "recurrent", "gpt"])
def test_an_optimizer_that_was_built_too_early_trains(name: str) -> None:
    """In FSDP2 it holds the old parameters, and trains nothing."""
    case = CASES[name]
    model, reference = build(name), build(name)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    held = list(model.parameters())
    sw.fully_shard(model, units=case.units)
    for _ in range(2):
        assert_equal_steps(
            model, reference, 1, loss=lambda m, x: case.loss(m(x)), batch=lambda: case.batch(BATCH)
        )
        assert all(old.grad is p.grad for p, old in zip(model.parameters(), held, strict=True))
        step_all(optimizers)
    assert_equal_models(model, reference, 2)


@on_ranks(2)
def test_an_optimizer_with_states_of_whole_parameters_is_refused() -> None:
    model = build("stack")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, WIDTH).double()).square().sum().backward()
    optimizer.step()
    sw.fully_shard(model, units=Block)
    model(torch.randn(4, WIDTH).double()).square().sum().backward()
    with pytest.raises(sw.PlanError, match="build the optimizer after fully_shard"):
        optimizer.step()


@on_ranks(2)
def test_a_copy_of_a_recurrent_model_is_sharded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(sw.fully_shard(build("recurrent"), units=nn.LSTM))


@on_ranks(2)
def test_seeds_by_rank_are_refused_for_any_unit() -> None:
    """They would combine different initializations into one weight."""
    model = build("stack")
    with torch.no_grad():
        model.get_parameter("layers.2.down.bias")[0] += 1e-16 + 1e-9 * rank()
    with pytest.raises(sw.PlanError, match=r"down\.bias differs between ranks 0 and 1"):
        sw.fully_shard(checkpoint_wrapper(copy.deepcopy(model.layers[2])))
    with pytest.raises(sw.PlanError, match=r"layers\.2\.down\.bias differs between ranks 0 and 1"):
        sw.fully_shard(model, units=Block)


@on_ranks(2)
@pytest.mark.parametrize(
    ("when", "granularity"),
    [("before", "element"), ("after a step", "dim"), ("with gradients", "element")],
)
def test_a_deep_copy_trains_on_its_own(when: str, granularity: Any) -> None:
    """In peers, copies share memory or hooks with the original."""
    reference = build("gpt")
    tokens = torch.randint(0, 11, (4, 7))
    if when == "before":
        original = build("gpt")
        model = sw.fully_shard(copy.deepcopy(original), units="auto")
    else:
        original = sw.fully_shard(build("gpt"), units="auto", granularity=granularity)
        original(own_part(tokens)).backward()
        reference(tokens).backward()
        if when == "after a step":
            for m in (original, reference):
                torch.optim.SGD(m.parameters(), lr=0.1).step()
        model = copy.deepcopy(original)
        reference.zero_grad()  # torch copies no gradients of parameters
    kept = [full(p.detach()).clone() for p in original.parameters()]
    assert_equal_steps(
        model, reference, loss=lambda m, x: m(x), batch=lambda: tokens, make_optimizer=adamw
    )
    for p, old in zip(original.parameters(), kept, strict=True):
        assert torch.equal(full(p.detach()), old), "the original is left alone"
    with pytest.raises(sw.PlanError, match="copy the whole model"):
        copy.deepcopy(model.layers[0])
    with pytest.raises(sw.PlanError, match="copy the whole model"):
        copy.deepcopy(model.layers[0])


@on_ranks(2)
def test_methods_that_need_a_unit_say_so() -> None:
    """A method other than forward that reads parameters finds shards: refused, with the way out,
    or works where it calls units.
    """
    reference, model = sharded_pair(Talker().double(), units=Block)
    tokens = torch.randint(0, 11, (2, 3))
    x = torch.randn(BATCH, WIDTH).double()
    refused = [(model.embed, tokens), (model.project, x), (model.scale, x)]
    for method, argument in refused:
        with pytest.raises(sw.ShardedTensorError, match=r"full_tensor\(\).*sw\.gathered\(model\)"):
            method(argument)
    assert torch.equal(model.generate(tokens, 4), reference.generate(tokens, 4))
    with sw.gathered(model):
        assert_close(model.embed(tokens), reference.embed(tokens).detach(), "embed")
        assert_close(model.project(x).detach(), reference.project(x).detach(), "project")
    assert_equal_steps(model, reference, 1, loss=lambda m, x: m.encode(x).square().mean())


class Masked(nn.Linear):
    """Its attribute ``weight`` is the parameter times a mask."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) < 0.5).double())

    def __getattribute__(self, name: str) -> Any:
        if name == "weight" and "mask" in self._buffers:
            return self._parameters["weight"] * self._buffers["mask"]  # type: ignore[operator]
        return super().__getattribute__(name)


class MixedTrainable(nn.Module):
    """Two streams, one in each precision, with scalars and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.double_ = nn.Linear(WIDTH, WIDTH).double()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(2, 0))

    def forward(self, streams: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = streams
        y = self.single(y) * self.gain + self.nothing.sum()
        return torch.tanh(self.double_(x) + self.shift), torch.tanh(y)


class Counting(nn.Module):
    """A running mean of its input, kept in a buffer; another buffer is not in the state dict."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        y: Tensor = self.linear(x * self.scale)
        return y


class Talker(nn.Module):
    """A model with methods beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = (x * self.gain) @ self.embedding.weight.T
        return y

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            following = self(tokens)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens

    def encode(self, x: Tensor) -> Tensor:
        """Calls units, and nothing else."""
        for layer in self.layers:
            x = layer(x)
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.embedding(tokens)
        return y

    def project(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0].up(x)  # type: ignore[operator]
        return y

    def scale(self, x: Tensor) -> Tensor:
        return x * self.gain
