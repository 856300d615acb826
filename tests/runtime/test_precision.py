"""Mixed precision: where values are cast, and that nothing else changes."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.plan.strategy import PRESETS
from shardwise.runtime.casting import cast_tensors
from tests.models import WIDTH, Block, Stack
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_close, full, options_of, own_part

BF16 = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Wider than the shards, so that compute and reduction do not round what is compared.
WIDE = sw.MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
ULP = 2**-23
ONE_AXIS = [name for name, row in PRESETS.items() if row.num_axes == 1]


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        *((name, 2 * PRESETS[name].num_axes) for name in PRESETS),
        *(pytest.param(name, 4, marks=pytest.mark.thorough) for name in ONE_AXIS),
    ],
)
def test_only_the_cast_rounds(strategy: str) -> None:
    """Compare float32 shards that compute in float64 with a float64 copy of the weights."""
    torch.manual_seed(0)
    model = Stack()
    sw.fully_shard(model, units=Block, mp_policy=WIDE, **options_of(strategy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        with sw.gathered(model):
            reference = _plain_copy(model).double()
        for _ in range(2):
            batch = torch.randn(12, WIDTH)
            reference(batch.double()).square().mean().backward()
            model(own_part(batch)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.dtype == torch.float32
            error = (full(p.grad).double() - q.grad).norm()
            assert error <= 2 * ULP * q.grad.norm(), f"{name}: {error}"
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_every_dtype_is_where_the_policy_says() -> None:
    model = nn.ModuleList([Watcher()])[0]
    policy = sw.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.float64, buffer_dtype=torch.bfloat16
    )
    sw.fully_shard(model, mp_policy=policy)
    output = model(torch.randn(4, WIDTH), torch.arange(4))
    output.sum().backward()
    bf16 = torch.bfloat16
    assert model.seen == dict.fromkeys(("x", "linear", "norm", "y", "z"), bf16) | {
        "steps": torch.int64
    }
    assert output.dtype == torch.float64
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("name", ["a dataclass", "a frozen one", "with slots", "a dict"])
def test_tensors_in_dataclasses_are_cast(name: str) -> None:
    pack = PACKS[name]
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = sw.fully_shard(Unpacks(pack), mp_policy=policy)
    given = pack(torch.randn(4, WIDTH))
    returned = model(given)
    assert type(returned) is type(given)
    assert (unpacked(given).dtype, unpacked(returned).dtype) == (torch.float32, torch.float64)
    unpacked(returned).sum().backward()  # type: ignore[no-untyped-call]
    assert model.linear.weight.grad is not None


@on_ranks(2)
def test_a_list_to_which_a_unit_appends_is_the_callers() -> None:
    """A cast of arguments once copied all lists, so that losses in them were lost."""
    model = sw.fully_shard(Appends(), mp_policy=BF16)
    losses: list[Tensor] = []
    output = model(torch.randn(4, WIDTH), {"losses": losses})
    (output.sum() + losses[0]).backward()


@on_ranks(2)
def test_an_argument_may_contain_itself() -> None:
    given = Packed(torch.randn(4, WIDTH))
    given.more.append(given)
    model = sw.fully_shard(Unpacks(lambda x: x), mp_policy=BF16)
    assert model(given).dtype == torch.bfloat16


@on_ranks(2)
def test_modules_in_full_precision() -> None:
    model = Watcher()
    policy = sw.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, full_precision=(nn.LayerNorm,), buffer_dtype=torch.bfloat16
    )
    sw.fully_shard(model, mp_policy=policy)
    model(torch.randn(4, WIDTH), torch.arange(4)).sum().backward()
    assert model.seen["norm"] == torch.float32
    assert (model.seen["y"], model.seen["z"]) == (torch.bfloat16, torch.bfloat16)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_parameter_may_compute_in_its_own_dtype(strategy: str) -> None:
    def chosen(parameter: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if parameter.ndim == 1 else None

    torch.manual_seed(0)
    model = Affine()
    reference = copy.deepcopy(model)
    policy = sw.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype="keep", param_dtype_override_fn=chosen
    )
    sw.fully_shard(model, mp_policy=policy, strategy=strategy)
    x = torch.randn(4, WIDTH)
    model(own_part(x)).square().mean().backward()
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.float32]
    reference(x.bfloat16(), cast=torch.bfloat16).square().mean().backward()
    for name, tolerance in (("weight", 2**-7), ("bias", 2**-20)):  # the bias was never rounded
        found, expected = model.get_parameter(name).grad, reference.get_parameter(name).grad
        assert found is not None
        assert expected is not None
        assert found.dtype == torch.float32
        error = (full(found) - expected).norm()
        assert error <= tolerance * expected.norm(), name


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_the_dtypes_of_parameters_are_chosen_once(granularity: Any) -> None:
    """The function knows parameters by identity, and blocks have 16-bit parameters and masters."""
    model: Any = nn.Sequential(Affine(), Affine()).bfloat16()
    kept = {id(model[0].bias), id(model[1].weight)}
    policy = sw.MixedPrecisionPolicy(
        param_dtype=torch.float16,
        param_dtype_override_fn=lambda p: p.dtype if id(p) in kept else None,
    )
    for module in (*model, model):
        sw.fully_shard(module, mp_policy=policy, granularity=granularity)
    with torch.no_grad():
        for affine in model:
            affine.unshard()
            affine.seen = [affine.weight.dtype, affine.bias.dtype]
            affine.reshard()
    assert model[0].seen == [torch.float16, torch.bfloat16]
    assert model[1].seen == [torch.bfloat16, torch.float16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_tied_parameter_has_the_dtypes_of_the_units_that_use_it(is_late: bool) -> None:
    """An embedding and its head compute in full precision, and the blocks between them do not."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).double()
    reference = copy.deepcopy(model)
    reference[1].weight = reference[0].weight
    if not is_late:
        model[1].weight = model[0].weight
    for unit in model:
        sw.fully_shard(unit, mp_policy=sw.MixedPrecisionPolicy(reduce_dtype=torch.float64))
    sw.fully_shard(model, mp_policy=replace(BF16, cast_forward_inputs=False))
    model[1].weight = model[0].weight
    batch = torch.randn(4, WIDTH).double()
    losses = [
        one(part).square().mean() for one, part in ((model, own_part(batch)), (reference, batch))
    ]
    for loss in losses:
        loss.backward()
    assert model[0].weight is model[1].weight
    assert losses[0].dtype == torch.float64
    assert_close(model[0].weight.grad, reference[0].weight.grad, "weight")


@on_ranks(1)
def test_a_parameter_may_not_compute_in_a_third_dtype() -> None:
    policy = sw.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, param_dtype_override_fn=lambda _: torch.float16
    )
    with pytest.raises(sw.PlanError, match=r"torch.float16 for a parameter in torch.float32: exp"):
        sw.fully_shard(nn.Linear(4, 4), mp_policy=policy)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, cast: torch.dtype | None = None) -> Tensor:
        self.seen = [x.dtype, self.weight.dtype, self.bias.dtype]
        weight = self.weight if cast is None else self.weight.to(cast)
        return (x @ weight).float() + self.bias


@on_ranks(2)
def test_gathers_move_the_compute_dtype() -> None:
    peaks = []
    for policy in (sw.MixedPrecisionPolicy(), BF16):
        model = Stack()
        sw.fully_shard(model, units=Block, mp_policy=policy)
        model(torch.randn(4, WIDTH)).sum().backward()
        peaks.append(sw.ledger(model).peak_gathered_bytes())
    assert peaks[1] * 2 == pytest.approx(peaks[0], rel=0.05)  # padding aside


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_masters_learn_what_16_bits_cannot(strategy: str) -> None:
    def trained(policy: sw.MixedPrecisionPolicy) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        sw.fully_shard(model, mp_policy=policy, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        for _ in range(50):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full(model.weight.detach()).double()

    expected = torch.ones(1, 4)
    for _ in range(50):
        expected -= 1e-5
    assert torch.equal(trained(sw.MixedPrecisionPolicy()), expected.double())
    kept = sw.MixedPrecisionPolicy(master_dtype=torch.bfloat16)
    assert torch.equal(trained(kept), torch.ones(1, 4).double())


@on_ranks(2)
def test_a_master_survives_being_gathered_and_written_back() -> None:
    torch.manual_seed(0)
    model = Stack()
    plain = [p.detach().clone() for p in model.parameters()]
    sw.fully_shard(model, units=Block, mp_policy=BF16)
    with sw.gathered(model, write_back=True):
        assert all(p.dtype == torch.float32 for p in model.parameters())
    for p, q in zip(model.parameters(), plain, strict=True):
        assert torch.equal(full(p.detach()), q)
    for p, q in zip(copy.deepcopy(model).parameters(), plain, strict=True):
        assert torch.equal(full(p.detach()), q)


@on_ranks(2)
def test_16_bit_gradients_add_to_masters() -> None:
    torch.manual_seed(0)
    model = Stack()
    low = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sw.fully_shard(model, units=Block, mp_policy=low)
    x = torch.randn(4, WIDTH)
    model(x).sum().backward()
    once = [full(p.grad) for p in model.parameters() if p.grad is not None]
    model(x).sum().backward()
    twice = [full(p.grad) for p in model.parameters() if p.grad is not None]
    assert once
    for one, two in zip(once, twice, strict=True):
        assert two.dtype == torch.float32
        assert torch.equal(two, 2 * one)


@on_ranks(2)
def test_blocks_keep_their_policy_when_the_root_is_sharded() -> None:
    model = nn.Sequential(Block(), Block())
    sw.fully_shard(model[0], mp_policy=BF16)
    sw.fully_shard(model)
    seen = []
    for block in model:
        block.register_forward_pre_hook(
            lambda module, args: seen.append((module.up.weight.dtype, args[0].dtype))
        )
    first = model[0].register_forward_hook(lambda _module, _args, output: output.float())
    model(torch.randn(4, WIDTH)).sum().backward()
    first.remove()
    bf16, fp32 = torch.bfloat16, torch.float32
    assert seen == [(bf16, bf16), (fp32, fp32)]


@on_ranks(2)
def test_16_bit_gradients_that_are_held_whole_add_up_as_those_in_shards() -> None:
    """A unit with child units once added them up in the compute dtype."""
    batches = torch.randn(8, 4, WIDTH)
    found = []
    for holds in (False, True):
        torch.manual_seed(0)
        model: Any = sw.fully_shard(Enclosing(), units=Block, mp_policy=BF16)
        for number, batch in enumerate(batches, start=1):
            model.set_requires_gradient_sync(not holds or number == len(batches))
            model(batch).float().square().mean().backward()
        found.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    for (name, _), in_shards, whole in zip(model.named_parameters(), *found, strict=True):
        # Sums of the same float32 numbers in another order: 2^-9 off if they were in bfloat16.
        assert (in_shards - whole).norm() <= 8 * ULP * in_shards.norm(), name


@on_ranks(2)
def test_a_policy_for_each_block_and_for_the_root_is_applied_once() -> None:
    """Norms in blocks once got the hooks of both calls, and returned float32."""
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, full_precision=(nn.LayerNorm,))
    norm = nn.LayerNorm(WIDTH)
    model = nn.Sequential(nn.Sequential(norm, nn.Linear(WIDTH, 8)))
    sw.fully_shard(model[0], mp_policy=policy)
    sw.fully_shard(model, mp_policy=policy)
    seen = []
    norm.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    model(torch.randn(4, WIDTH)).sum().backward()
    assert seen == [torch.bfloat16]


@on_ranks(2)
def test_autocast_inside_and_outside() -> None:
    torch.manual_seed(0)
    for inside in (False, True):
        model = nn.Sequential(Casting(), Casting()) if inside else Stack()
        reference = copy.deepcopy(model)
        sw.fully_shard(model, units=(Casting if inside else Block))
        _assert_equal_under_autocast(model, reference, enabled=not inside)


@on_ranks(2)
def test_several_forwards_under_one_autocast() -> None:
    """Autocast keeps the casts of weights, which would tie a forward to the graph of an earlier."""
    torch.manual_seed(0)
    model = Stack()
    reference = copy.deepcopy(model)
    sw.fully_shard(model, units=Block)
    batches = torch.randn(3, 4, WIDTH)  # the same on both ranks
    for one, is_cached in ((reference, False), (model, True)):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            with torch.no_grad():
                one(batches[0])
            for batch in batches[1:]:
                one(batch).float().square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.grad, q.grad, name)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "master_dtype", "buffer_dtype"])
def test_a_dtype_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(sw.PlanError, match=f"{name}=torch.int8: expected a floating-point"):
        sw.MixedPrecisionPolicy(**{name: torch.int8})  # type: ignore[arg-type]


def _plain_copy(model: nn.Module) -> nn.Module:
    """A plain copy of a model whose parameters are gathered."""
    twin = Stack()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.data.copy_(q)
    return twin


class Watcher(nn.Module):
    """Records the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        y = self.linear(x)
        z: Tensor = self.norm(y) * self.scale
        self.seen = {
            "x": x.dtype,
            "steps": steps.dtype,
            "linear": self.linear.weight.dtype,
            "norm": self.norm.weight.dtype,
            "y": y.dtype,
            "z": z.dtype,
        }
        return z


@dataclass
class Packed:
    """A tensor, and a field that the constructor does not take."""

    x: Tensor
    more: list[Any] = field(init=False, default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Mapped(dict[str, Any]):
    """A class derived from dict."""


PACKS: dict[str, Callable[[Any], Any]] = {
    "a dataclass": Packed,
    "a frozen one": Frozen,
    "with slots": Slotted,
    "a dict": lambda x: Mapped(x=x),
}


def unpacked(value: Any) -> Tensor:
    x: Tensor = value["x"] if isinstance(value, dict) else value.x
    return x


class Unpacks(nn.Module):
    """A linear layer of what it unpacks, packed again."""

    def __init__(self, pack: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pack = pack

    def forward(self, value: Any) -> Any:
        return self.pack(self.linear(unpacked(value)))


class Appends(nn.Linear):
    """Appends its loss to a list."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Any) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        more["losses"].append(y.square().sum())
        return y


class Enclosing(nn.Module):
    """Has parameters of its own around units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.first(x))
        return y


class Casting(Block):
    """Half of it runs under autocast and is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = checkpoint(self.up, x, use_reentrant=False)
        y: Tensor = self.down(torch.tanh(hidden.float()))
        return x + y


def _assert_equal_under_autocast(model: nn.Module, reference: nn.Module, *, enabled: bool) -> None:
    x = torch.randn(4, WIDTH)
    for one in (reference, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            one(x).float().square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(full(p.grad), q.grad), name  # both ranks have the same batch


@pytest.mark.parametrize("before", [torch.bfloat16, torch.float16, torch.float32])
@on_ranks(1)
def test_a_model_computes_in_the_dtype_that_its_masters_are_converted_to(
    before: torch.dtype,
) -> None:
    model = sw.fully_shard(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)).to(before))
    ids = torch.arange(4)
    assert model(ids).dtype == before
    for after in (torch.float32, before, torch.float64, before, torch.float32):
        model.to(after)
        for parameter in model.parameters():
            parameter.grad = None
        model(ids).sum().backward()
        assert model(ids).dtype == after
        masters = torch.float64 if after == torch.float64 else torch.float32
        assert {p.dtype for p in model.parameters()} == {masters}
    kept = sw.MixedPrecisionPolicy(param_dtype=before)
    embedding = sw.fully_shard(nn.Embedding(4, 4), mp_policy=kept)
    assert embedding.float()(ids).dtype == before, "the policy decides"


def test_a_cast_keeps_nothing_alive() -> None:
    """Not until the garbage collector runs: an activation would be held for as long."""
    inputs = [torch.randn(4), {"y": [torch.randn(4)]}]
    kept = weakref.ref(inputs[0])
    gc.disable()
    try:
        cast_tensors(inputs, torch.float64)
        del inputs
        assert kept() is None
    finally:
        gc.enable()
