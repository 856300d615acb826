"""C7: initial values have the same bits on any number of ranks, with and without a meta device."""

import hashlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.local_devices import peak_memory_bytes
from shardwise.plan.policies import Units
from tests.forked import run_forked
from tests.models import CASES, WIDTH, Block, Stack
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import (
    adamw,
    assert_equal_steps,
    full,
    options_of,
    rank,
    runtime_of,
    world_size,
)

SEED = 11


class Attention(nn.Module):
    """Units that initialize a parameter of a module inside them, and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x)[0]
        y: Tensor = self.norm(x)
        return y


def fill(module: nn.Module) -> None:
    """A user's initialization."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.3)  # as many models do, without autograd
        else:
            tensor.zero_()


TRANSFORMER = partial(nn.Transformer, WIDTH, 2, 1, 2, 8, batch_first=True)
MODELS: dict[str, tuple[Callable[[], nn.Module], Units, Callable[[nn.Module], None] | None]] = {
    name: (CASES[name].build, CASES[name].units, None)
    for name in (
        "stack",
        "stack, every layer",
        "stack, by size",
        "gpt",
        "frozen",
        "tied",
        "recurrent",
    )
}
MODELS |= {
    f"{name}, filled": (CASES[name].build, CASES[name].units, fill)
    for name in ("conv", "unused and reused", "lora", "tiny", "mixed dtypes", "tied")
}
MODELS |= {
    "attention": (Attention, nn.MultiheadAttention, None),
    "transformer": (TRANSFORMER, None, None),
}


# Strategies by world size, and models. `make test` has every strategy, and every model.
SOME = ["gpt", "tied, filled", "attention"]


@pytest.mark.parametrize(
    ("ranks", "strategies", "models"),
    [
        (2, ["fsdp"], [*MODELS]),
        (2, ["ddp", "zero2"], SOME),
        (4, ["hsdp"], SOME),
        *(
            pytest.param(ranks, strategies, [*MODELS], marks=pytest.mark.thorough)
            for ranks, strategies in (
                *((size, ["fsdp", "ddp", "zero2"]) for size in (1, 2, 3)),
                (4, ["fsdp", "ddp", "zero2", "hsdp"]),
            )
        ),
    ],
)
def test_sharding_a_meta_model_gives_the_bits_of_one_process(
    ranks: int, strategies: list[str], models: list[str]
) -> None:
    expected = _digests_of_eager(models)
    for found in run_on(ranks, _digests, strategies, models):
        assert set(found) == set(strategies)
        for strategy, digests in found.items():
            assert digests == expected, strategy


def test_values_depend_only_on_seed_and_name() -> None:
    layers = [nn.Linear(3, 4), nn.Linear(3, 4)]
    model = nn.Sequential(*layers)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sw.initialize(model, SEED)
    assert torch.equal(torch.get_rng_state(), before)
    digest = hashlib.sha256(f"{SEED} 1".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8]) >> 1)
    expected = nn.Linear(3, 4)
    assert torch.equal(layers[1].weight, expected.weight)
    assert torch.equal(layers[1].bias, expected.bias)
    assert not torch.equal(layers[0].weight, layers[1].weight)
    sw.initialize(model, SEED + 1)
    assert not torch.equal(layers[1].weight, expected.weight)


def test_a_module_overrides_the_values_of_modules_inside_it() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2)
    assert attention.out_proj.bias is not None
    attention.out_proj.bias.data.fill_(1.0)
    sw.initialize(attention, SEED)
    assert not attention.out_proj.bias.any()  # Linear.reset_parameters fills it with random values


@on_ranks(2)
def test_a_model_from_the_meta_device_trains_like_any_other() -> None:
    reference = Stack()
    sw.initialize(reference, SEED)
    reference.double()
    with torch.device("meta"):
        model = Stack().double()
    # In float64 another stream of numbers is drawn, so these come from the reference.
    values = dict(reference.named_parameters())
    names = {id(module): name for name, module in model.named_modules()}

    def look_up(module: nn.Module) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            parameter.copy_(values[f"{names[id(module)]}.{key}"])

    sw.fully_shard(model, units=Block, init=sw.Initialization(init_fn=look_up))
    assert_equal_steps(model, reference, make_optimizer=adamw)


def test_ties_are_kept_and_no_generator_is_advanced() -> None:
    with torch.device("meta"):
        model = CASES["gpt"].build()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sw.fully_shard(model, units=CASES["gpt"].units)  # init=sw.Initialization(seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


def test_at_most_one_unit_is_whole_at_any_time() -> None:
    with torch.device("meta"):
        model = Stack(depth=4)
    peaks = []

    def count(module: nn.Module) -> None:
        plain = {p for p in model.parameters() if not isinstance(p, sw.ShardedTensor)}
        peaks.append(sum(p.nbytes for p in plain if not p.is_meta))
        fill(module)

    sw.fully_shard(model, units=Block, init=sw.Initialization(init_fn=count))
    units = runtime_of(model).plan.units
    assert max(peaks) == max(sum(p.num_bytes for p in unit.parameters) for unit in units)


def test_the_memory_of_the_process_holds_shards_and_one_unit() -> None:
    grown, shards, unit = run_forked(_measure)
    assert grown < 1.1 * (shards + unit), (grown, shards, unit)


class Unfilled(nn.Module):
    """Does not initialize one of its tensors; ``missing`` is the kind of tensor."""

    def __init__(self, missing: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.missing = missing
        if missing == "parameter":
            self.scale = nn.Parameter(torch.ones(3))
        elif missing == "part of it":
            self.rows = nn.Parameter(torch.ones(3, 2))
            self.reset_parameters = lambda: nn.init.zeros_(self.rows[0])
        elif missing == "buffer":
            self.register_buffer("angles", torch.arange(3.0), persistent=False)
        else:
            self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("missing", "name"),
    [("parameter", "scale"), ("part of it", "rows"), ("buffer", "angles"), ("flags", "mask")],
)
def test_uninitialized_tensors_are_named(missing: str, name: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Unfilled(missing))
    with pytest.raises(sw.PlanError, match=rf"^1\.{name}: .*pass init_fn"):
        sw.fully_shard(model, units=Unfilled, init=sw.Initialization())


def test_a_module_may_replace_a_tensor() -> None:
    class Rebuilt(Unfilled):
        def reset_parameters(self) -> None:  # type: ignore[override]
            self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())

    with torch.device("meta"):
        model = Rebuilt("flags")
    sw.fully_shard(model, init=sw.Initialization())
    assert torch.equal(model.get_buffer("mask"), torch.ones(3, 3, dtype=torch.bool).tril())


def test_parameters_that_initialize_does_not_fill_are_named() -> None:
    with pytest.raises(sw.PlanError, match=r"^scale: .*pass init_fn"):
        sw.initialize(Unfilled("parameter"))
    sw.initialize(Unfilled("buffer"))  # its values were not drawn at random


def test_writing_to_a_unit_inside_is_refused() -> None:
    with torch.device("meta"):
        model = TRANSFORMER()
    with pytest.raises(sw.PlanError, match=r"the root: initializing a Transformer.*pass init_fn"):
        sw.fully_shard(model, units=nn.TransformerEncoderLayer, init=sw.Initialization())


def test_writing_to_a_unit_outside_is_refused() -> None:
    class Meddling(nn.Linear):
        friends: tuple[nn.Linear, ...] = ()

        def reset_parameters(self) -> None:
            super().reset_parameters()
            for friend in self.friends:
                nn.init.zeros_(friend.weight)

    with torch.device("meta"):
        friend, meddling = nn.Linear(2, 2), Meddling(2, 2)
    meddling.friends = (friend,)
    model = nn.Sequential(friend, meddling)
    with pytest.raises(sw.PlanError, match=r"^1: initializing a Meddling.*pass init_fn"):
        sw.fully_shard(model, units=Meddling, init=sw.Initialization())


def test_mistakes_are_named() -> None:
    with pytest.raises(sw.PlanError, match=r"0\.bias is on the meta device and 1\.bias is"):
        sw.fully_shard(
            nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)), init=sw.Initialization()
        )
    with pytest.raises(sw.PlanError, match=r"call sw\.initialize"):
        sw.fully_shard(nn.Linear(2, 2), init=sw.Initialization(3))
    with pytest.raises(sw.PlanError, match=r"weight is on the meta device.*fully_shard"):
        sw.initialize(nn.Linear(2, 2, device="meta"))
    with pytest.raises(sw.PlanError, match=r"weight is sharded already"):
        sw.initialize(sw.fully_shard(nn.Linear(2, 2)))
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    for block in model:
        sw.fully_shard(block, init=sw.Initialization())
    with pytest.raises(sw.PlanError, match=r"^0 was initialized on its own.*units=Block"):
        sw.fully_shard(model)


@on_ranks(2)
def test_ranks_that_initialize_differently_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    with pytest.raises(sw.PlanError, match="differs between ranks 0 and 1"):
        sw.fully_shard(model, units=Block, init=sw.Initialization(seed=rank()))


def _digests_of_eager(models: list[str]) -> dict[str, str]:
    found = {}
    for name in models:
        make, _, init_fn = MODELS[name]
        model = make()
        sw.initialize(model, SEED, init_fn=init_fn)
        found[name] = _digest(model)
    return found


def _digests(strategies: list[str], models: list[str]) -> dict[str, dict[str, str]]:
    torch.manual_seed(rank())
    return {
        strategy: {name: _digest(_from_meta(name, strategy)) for name in models}
        for strategy in strategies
    }


def _from_meta(name: str, strategy: str) -> nn.Module:
    make, units, init_fn = MODELS[name]
    with torch.device("meta"):
        model = make()
    init = sw.Initialization(SEED, init_fn)
    options = options_of(strategy) if world_size() > 1 else {"strategy": strategy}
    return sw.fully_shard(model, units=units, init=init, **options)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(name.encode() + full(tensor.detach()).numpy().tobytes())
    return digest.hexdigest()


def _measure() -> tuple[int, int, int]:
    """Bytes: the growth of one of eight ranks, its shards, and the largest unit."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    with torch.device("meta"):
        small = nn.Sequential(nn.Linear(64, 64))
    sw.fully_shard(
        small, init=sw.Initialization()
    )  # excludes imports and other one-time allocations
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048)) for _ in range(16)))
    before = _peak_bytes()
    sw.fully_shard(model, units="auto", init=sw.Initialization())
    grown = _peak_bytes() - before
    plan = runtime_of(model).plan
    unit = max(unit.gathered_bytes for unit in plan.units)
    return grown, plan.shard_bytes, unit


def _peak_bytes() -> int:
    return peak_memory_bytes(torch.device("cpu"))
