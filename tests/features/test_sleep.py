"""`sw.sleep` gives device memory back, and after `sw.wake` the next step has the same bits."""

import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise import fsdp
from shardwise._private import storage_id
from shardwise.errors import CheckpointError, PlanError, StepError
from shardwise.features import sleep as sleep_module
from shardwise.plan.strategy import PRESETS
from shardwise.tensor.sharding import local_of
from tests.covering import covered_first
from tests.models import CASES, build
from tests.optim.groups import matrix_groups
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, full, options_of, own_part, runtime_of
from tests.runtime.same_bits import assert_same_bits, bits_of
from tests.watching import without_frames

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "adamw": adamw,
    "muon": lambda p: sw.optim.Muon(matrix_groups(p)),
    "soap": lambda p: sw.optim.SOAP(matrix_groups(p)),
    "adam8bit": lambda p: sw.optim.Adam8bit(p, min_elements=1, block=4),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by dim": {"granularity": "dim"},
    "offloaded": {"offload_policy": sw.CPUOffloadPolicy()},
    "offloaded, with copies": {"offload_policy": sw.CPUOffloadPolicy(parameters=False)},
    "stepped on the device": {"offload_policy": sw.CPUOffloadPolicy(step="device")},
    "wires": {"wire": sw.Wire("int8", "int4", block=8, error_feedback=True)},
    "kept": {"reshard_after_forward": False},
}


def make(strategy: str, variant: str, optimizer: str, name: str = "gpt") -> tuple[Any, Optimizer]:
    options = options_of(strategy) | VARIANTS[variant]
    if optimizer == "adam8bit":
        options = {"granularity": "row"} | options
    model = sw.fully_shard(build(name), units="auto", **options)
    return model, OPTIMIZERS[optimizer](model.parameters())


def _supported(strategy: str, variant: str, optimizer: str) -> tuple[str, str]:
    """Others in place of combinations that are refused."""
    if strategy == "hfsdp" and variant == "by dim":
        variant = "plain"
    if optimizer == "adam8bit" and variant == "by dim":
        optimizer = "adamw"
    if optimizer in ("muon", "soap") and variant == "stepped on the device":
        optimizer = "adamw"
    return variant, optimizer


def train(model: nn.Module, optimizer: Optimizer, step: int, *, zeroes: bool = True) -> None:
    torch.manual_seed(step)
    case = CASES["gpt"]
    torch.autograd.backward(case.loss(model(own_part(case.batch(12)))))
    optimizer.step()
    if zeroes:
        optimizer.zero_grad()


def held_bytes() -> int:
    """The bytes of all tensors of this process."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and not hasattr(found, "placements"):
            storage = found.untyped_storage()
            storages[storage_id(storage)] = storage.nbytes()
    return sum(storages.values())


def on_two_or_four(*factors: Iterable[str]) -> list[object]:
    """Rows of strategies and other factors, on two ranks if the strategy has one axis."""
    rows = product(PRESETS, *factors, (2, 4))
    return covered_first(row for row in rows if PRESETS[str(row[0])].num_axes == 1 or row[-1] == 4)


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "variant", "optimizer", "world_size"), on_two_or_four(VARIANTS, OPTIMIZERS)
)
def test_the_next_step_has_the_same_bits(strategy: str, variant: str, optimizer: str) -> None:
    variant, optimizer = _supported(strategy, variant, optimizer)
    awake, asleep = (make(strategy, variant, optimizer) for _ in range(2))
    for step in range(3):
        for pair in (awake, asleep):
            train(*pair, step)
        for _ in range(2):  # also before there are states of the second step
            before = bits_of(*asleep, gradients=True)
            sw.sleep(*asleep)
            assert_same_bits(bits_of(*asleep, gradients=True), before)  # the copies on the host
            sw.wake(*asleep)
        assert_same_bits(bits_of(*asleep, gradients=True), bits_of(*awake, gradients=True))


@on_ranks(2)
def test_two_models_with_one_optimizer_sleep() -> None:
    both = nn.ModuleList(make("fsdp", "plain", "adamw")[0] for _ in range(2))
    optimizer = adamw(both.parameters())
    for model in both:
        train(model, optimizer, 0)
    before = bits_of(both, optimizer)
    for asleep, awake in (([both], [both]), (both, both), (both, reversed(both))):
        for model in asleep:
            sw.sleep(model, optimizer)
        assert_same_bits(bits_of(both, optimizer), before)
        for model in awake:
            sw.wake(model, optimizer)
        assert_same_bits(bits_of(both, optimizer), before)
    train(both[0], optimizer, 1)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "ddp"])
def test_gradients_sleep(strategy: str) -> None:
    model, optimizer = make(strategy, "plain", "adamw")
    train(model, optimizer, 0, zeroes=False)
    before = bits_of(model, optimizer, gradients=True)
    assert any(name.endswith(" grad") for name in before)
    sw.sleep(model, optimizer)
    sw.wake(model, optimizer)
    assert_same_bits(bits_of(model, optimizer, gradients=True), before)
    train(model, optimizer, 1)  # adds to the gradients


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "variant", "optimizer", "world_size", "cycles"),
    [
        ("fsdp", "plain", "adamw", 2, 12),
        ("zero1", "wires", "muon", 2, 12),
        ("ddp", "by dim", "soap", 2, 12),
        ("hsdp", "offloaded", "adam8bit", 4, 12),
        *(
            pytest.param(*row, 4, 50, marks=pytest.mark.thorough)
            for row in product(PRESETS, VARIANTS, OPTIMIZERS)
        ),
    ],
)
def test_all_cycles_hold_the_same_bytes(
    strategy: str, variant: str, optimizer: str, cycles: int
) -> None:
    model, stepper = make(strategy, *_supported(strategy, variant, optimizer))
    for step in range(3):
        train(model, stepper, step)
    runtime, is_offloaded = runtime_of(model), "offload_policy" in VARIANTS[variant]
    awake, sleeping = set(), set()
    with without_frames():
        for cycle in range(cycles):
            reported = sw.sleep(model, stepper)
            assert sum(pool.held_bytes for pool in runtime.pools) == 0
            if not is_offloaded:
                assert reported.remaining_bytes == sum(b.nbytes for b in model.buffers())
            host_bytes, remaining_bytes = reported.host_bytes, reported.remaining_bytes
            sleeping.add((held_bytes() - host_bytes, host_bytes, remaining_bytes))
            sw.wake(model, stepper)
            awake.add(held_bytes())
            if cycle % 10 == 0:
                train(model, stepper, cycle)
    assert len(sleeping) == 1
    assert len(awake) <= 2  # before the first of these steps, and after it


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit"])
def test_the_bytes_are_as_foreseen(optimizer: str) -> None:
    model, stepper = make("fsdp", "plain", optimizer)
    train(model, stepper, 0)
    shards = sum(unit.shard_bytes for unit in runtime_of(model).plan.units)
    states = {
        storage_id(storage): storage.nbytes()
        for state in stepper.state.values()
        for value in state.values()
        for storage in [
            (local_of(value) if hasattr(value, "placements") else value).untyped_storage()
        ]
    }
    reported = sw.sleep(model, stepper)
    assert reported.host_bytes == shards + sum(states.values())
    assert reported.freed_bytes >= reported.host_bytes
    sw.wake(model, stepper)


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "variant"),
    covered_first(product(("fsdp", "zero1", "ddp"), ("plain", "wires", "by dim"))),
)
def test_everything_is_freed(strategy: str, variant: str) -> None:
    """Nothing but the host copy is left of what the model and its optimizer held."""
    with without_frames():
        model, optimizer = make(strategy, variant, "adamw")
        train(model, optimizer, 0)
        del model, optimizer
        nothing = held_bytes()  # with memory of communicators, which all models use
        model, optimizer = make(strategy, variant, "adamw")
        for step in range(3):
            train(model, optimizer, step)
        reported = sw.sleep(model, optimizer)
        left = held_bytes() - nothing - reported.host_bytes
        assert left < 2000, left  # rows of flags
        sw.wake(model, optimizer)
        assert held_bytes() - nothing >= reported.host_bytes


# -- asleep --------------------------------------------------------------------------------------


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "variant", "world_size"), on_two_or_four(("plain", "by dim", "offloaded"))
)
def test_weights_can_be_read_published_saved_and_changed(
    strategy: str, variant: str, tmp_path: Path
) -> None:
    if strategy == "hfsdp" and variant == "by dim":
        variant = "plain"
    model, optimizer = make(strategy, variant, "adamw")
    train(model, optimizer, 0)
    expected = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    sw.publish(model, tmp_path / "published")
    sw.sleep(model, optimizer)
    assert_same_bits(dict(sw.full_tensors(model)), expected)
    batch = CASES["gpt"].batch(2)
    with sw.gathered(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        model(batch)
    sw.publish(model, tmp_path / "published")
    sw.save(tmp_path / "saved", model=model, optimizer=optimizer)
    with torch.no_grad(), sw.gathered(model, write_back=True):
        for parameter in model.parameters():
            parameter.add_(1)
    sw.wake(model, optimizer)
    changed = {name: full(p).detach() for name, p in model.named_parameters()}
    assert_same_bits(changed, {name: value + 1 for name, value in expected.items()})
    other, states = make("fsdp", "plain", "adamw")
    train(other, states, 7)
    sw.load(tmp_path / "saved", model=other, optimizer=states)
    assert_same_bits({n: full(p).detach() for n, p in other.named_parameters()}, expected)
    train(model, optimizer, 1)


@on_ranks(2)
def test_a_checkpoint_may_be_loaded_asleep(tmp_path: Path) -> None:
    model, optimizer = make("fsdp", "plain", "adamw")
    train(model, optimizer, 0)
    sw.save(tmp_path / "saved", model=model, optimizer=optimizer)
    before = bits_of(model, optimizer, gradients=True)
    train(model, optimizer, 1)
    sw.sleep(model, optimizer)
    sw.load(tmp_path / "saved", model=model, optimizer=optimizer)
    sw.wake(model, optimizer)
    assert_same_bits(bits_of(model, optimizer, gradients=True), before)
    train(model, optimizer, 2)


@on_ranks(2)
def test_steps_are_refused_asleep() -> None:
    model, optimizer = make("fsdp", "plain", "adamw")
    train(model, optimizer, 0)
    before = bits_of(model, optimizer, gradients=True)
    sw.sleep(model, optimizer)
    batch = CASES["gpt"].batch(2)
    for action in (lambda: model(batch), optimizer.step, model.unshard):
        with pytest.raises(StepError, match="sleeps; call"):
            action()
    with pytest.raises(StepError, match="sleeps; call"):
        sw.sleep(model, optimizer)
    with pytest.raises(PlanError, match="expected the optimizer"):
        sw.wake(model)
    sw.wake(model, optimizer)
    with pytest.raises(StepError, match="does not sleep"):
        sw.wake(model, optimizer)
    assert_same_bits(bits_of(model, optimizer, gradients=True), before)
    train(model, optimizer, 1)


@on_ranks(2)
def test_a_backward_waits_until_the_model_is_awake() -> None:
    (model, optimizer), awake = (make("fsdp", "plain", "adamw") for _ in range(2))
    for pair in ((model, optimizer), awake):
        train(*pair, 0)
    loss = CASES["gpt"].loss(model(own_part(CASES["gpt"].batch(12))))
    sw.sleep(model, optimizer)
    with pytest.raises(StepError, match="sleeps; call"):
        torch.autograd.backward(loss)
    sw.wake(model, optimizer)
    for pair in ((model, optimizer), awake):
        train(*pair, 1)
    assert_same_bits(bits_of(model, optimizer), bits_of(*awake))


@on_ranks(2)
@pytest.mark.parametrize("shard", ["FullyShardedDataParallel", "fully_shard"])
def test_models_of_the_drop_in_sleep(shard: str) -> None:
    awake, asleep = (getattr(fsdp, shard)(build("gpt")) for _ in range(2))
    optimizers = [adamw(model.parameters()) for model in (awake, asleep)]
    for step in range(3):
        for model, optimizer in zip((awake, asleep), optimizers, strict=True):
            train(model, optimizer, step)
        sw.sleep(asleep, optimizers[1])
        assert len(dict(sw.full_tensors(asleep))) == len(list(asleep.parameters()))
        sw.wake(asleep, optimizers[1])
    assert_same_bits(
        bits_of(asleep, optimizers[1], gradients=True),
        bits_of(awake, optimizers[0], gradients=True),
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.fully_shard(model, units=nn.Linear)
    with pytest.raises(PlanError, match="0 is a unit inside a sharded model"):
        sw.sleep(model[0])
    with pytest.raises(PlanError, match="is not sharded"):
        sw.sleep(build("gpt"))


@on_ranks(2)
def test_too_little_host_memory_changes_nothing() -> None:
    model, optimizer = make("fsdp", "plain", "adamw")
    train(model, optimizer, 0)
    before = bits_of(model, optimizer, gradients=True)
    original, left = sleep_module._copy, [3]

    def copy(storage: torch.UntypedStorage) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return original(storage)

    with mock.patch.object(sleep_module, "_copy", copy), pytest.raises(MemoryError):
        sw.sleep(model, optimizer)
    assert_same_bits(bits_of(model, optimizer, gradients=True), before)
    train(model, optimizer, 1)


@on_ranks(2)
def test_a_model_sleeps_only_between_steps() -> None:
    model, optimizer = make("fsdp", "plain", "adamw")
    with sw.gathered(model), pytest.raises(StepError, match="in the middle of a step"):
        sw.sleep(model, optimizer)
    model.set_requires_gradient_sync(False)
    torch.autograd.backward(model(CASES["gpt"].batch(2)))
    with pytest.raises(StepError, match="not reduced yet"):
        sw.sleep(model, optimizer)
    with pytest.raises(PlanError, match="expected 'host' or 'discard'"):
        sw.sleep(model, optimizer, to="disk")  # type: ignore[arg-type]


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_discarded_values_are_loaded_again(strategy: str, tmp_path: Path) -> None:
    model, optimizer = make(strategy, "plain", "adamw")
    train(model, optimizer, 0)
    sw.save(tmp_path / "saved", model=model, optimizer=optimizer)
    before = bits_of(model, optimizer, gradients=True)
    assert sw.sleep(model, optimizer, to="discard").host_bytes == 0
    for action in (
        lambda: sw.save(tmp_path / "again", model=model),
        lambda: sw.full_tensors(model),
        lambda: sw.publish(model, tmp_path / "published"),
    ):
        with pytest.raises(CheckpointError, match="values were discarded"):
            action()
    with pytest.raises(StepError, match="sleeps; call"), sw.gathered(model):
        pass
    sw.wake(model, optimizer)
    assert not any(
        value.any()
        for name, value in bits_of(model, optimizer, gradients=True).items()
        if "step" not in name
    )
    sw.load(tmp_path / "saved", model=model, optimizer=optimizer)
    assert_same_bits(bits_of(model, optimizer, gradients=True), before)
    train(model, optimizer, 1)
