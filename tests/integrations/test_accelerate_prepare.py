"""What accelerate's `Accelerator` keeps between calls of `prepare`, and what it frees."""

import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import shardwise as sw
from shardwise.integrations.accelerate import Accelerator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS = torch.arange(12, dtype=torch.float64).view(3, 4) / 12


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    options = getattr(request, "param", {})
    yield Accelerator(cpu=True, fully_shard={"units": nn.Linear}, **options)
    AcceleratorState._reset_state(reset_partial_state=True)


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(ROWS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def expected_after(num_steps: int) -> list[Tensor]:
    model, optimizer = build()
    for _ in range(num_steps):
        step(model, optimizer)
    return [parameter.detach() for parameter in model.parameters()]


def assert_after(model: nn.Module, num_steps: int) -> None:
    with sw.gathered(model):
        for found, expected in zip(model.parameters(), expected_after(num_steps), strict=True):
            torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("release", ["free_memory", "clear"])
def test_a_model_prepared_after_free_memory_loads_the_state(
    accelerator: Accelerator, tmp_path: Path, release: str
) -> None:
    model, optimizer = accelerator.prepare(*build())
    step(model, optimizer)
    accelerator.save_state(str(tmp_path))
    before = weakref.ref(model), weakref.ref(optimizer.optimizer), weakref.ref(model[0].weight)
    model, optimizer = getattr(accelerator, release)(model, optimizer)
    gc.collect()
    assert [reference() for reference in before] == [None, None, None]
    model, optimizer = accelerator.prepare(*build(seed=1))
    accelerator.load_state(str(tmp_path))
    step(model, optimizer)
    assert_after(model, 2)


def test_a_second_prepare_neither_repeats_nor_forgets_an_optimizer(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model, optimizer = accelerator.prepare(*build())
    assert accelerator.prepare(optimizer) is optimizer
    assert accelerator.prepare(model) is model
    assert list(accelerator.sharded.values()) == [[optimizer.optimizer]]
    step(model, optimizer)
    accelerator.save_state(str(tmp_path))
    step(model, optimizer)
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(*build(seed=1))
    accelerator.load_state(str(tmp_path))
    step(model, optimizer)
    assert_after(model, 2)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_model_and_its_optimizer_may_be_prepared_separately(
    accelerator: Accelerator, tmp_path: Path, order: str
) -> None:
    parts: Any = build()
    for index in (0, 1) if order == "model first" else (1, 0):
        parts = [accelerator.prepare(one) if index == n else one for n, one in enumerate(parts)]
    model, optimizer = parts
    step(model, optimizer)
    accelerator.save_state(str(tmp_path))
    step(model, optimizer)
    assert_after(model, 2)
    accelerator.load_state(str(tmp_path))
    assert_after(model, 1)
    step(model, optimizer)
    assert_after(model, 2)


def test_an_optimizer_that_has_taken_a_step_before_is_refused(accelerator: Accelerator) -> None:
    model, optimizer = build()
    step(model, optimizer)
    model = accelerator.prepare(model)
    with pytest.raises(sw.PlanError, match="has taken steps before its parameters were sharded"):
        accelerator.prepare(optimizer)


@pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], indirect=True)
def test_outputs_in_mixed_precision_are_in_float32(accelerator: Accelerator) -> None:
    """As accelerate itself does, so that a loss outside of the model is not in bfloat16."""
    model = accelerator.prepare(build()[0].float())
    outputs = []
    for layer in (model[0], model[2], model):
        layer.register_forward_hook(lambda _module, _args, output: outputs.append(output.dtype))
    assert model(ROWS.float()).dtype == torch.float32
    assert outputs[:2] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], indirect=True)
def test_a_model_that_was_sharded_before_keeps_its_dtype_with_a_warning(
    accelerator: Accelerator,
) -> None:
    model = sw.fully_shard(build()[0].float())
    with pytest.warns(UserWarning, match=r"compute in float32, and keeps.*Policy\(torch\.bfloat16"):
        assert accelerator.prepare(model) is model
    assert model(ROWS.float()).dtype == torch.float32


class Watching(nn.Linear):
    """Keeps whether it was compiled."""

    def forward(self, x: Tensor) -> Tensor:
        self.is_compiled = torch.compiler.is_compiling()
        return super().forward(x)


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("accelerator", [{"dynamo_backend": "eager"}], indirect=True)
def test_models_are_compiled(accelerator: Accelerator, regional: bool, tmp_path: Path) -> None:
    accelerator.state.dynamo_plugin.use_regional_compilation = regional
    model: Any = build()[0]
    model[2] = Watching(4, 2, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    step(model, optimizer)
    assert model[2].is_compiled
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))


def test_a_save_before_the_first_step_changes_nothing(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model, optimizer = accelerator.prepare(*build())
    accelerator.save_state(str(tmp_path))
    for _ in range(2):
        step(model, optimizer)
    assert_after(model, 2)
    accelerator.load_state(str(tmp_path))
    step(model, optimizer)
    assert_after(model, 1)


def test_states_that_an_optimizer_has_before_its_first_step_are_sharded(
    accelerator: Accelerator,
) -> None:
    def prepared(model: nn.Module) -> Any:
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=2.0)

    reference, model = (prepared(build()[0]) for _ in range(2))
    model = accelerator.prepare(*model)
    for _ in range(2):
        step(*reference)
        step(*model)
    with sw.gathered(model[0]):
        for one, plain in zip(model[0].parameters(), reference[0].parameters(), strict=True):
            torch.testing.assert_close(one.detach(), plain.detach(), rtol=1e-12, atol=1e-12)


class Partly(nn.Module):
    """Has layers that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)
        self.unused = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.used(x).tanh())
        return y


def test_states_of_frozen_and_unused_parameters_are_loaded(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    reference = Partly()
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1)
    model, optimizer = Partly(), None
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for one, its in ((reference, expected), (model, optimizer)):
        step(one, its)
        one.head.requires_grad_(False)
        step(one, its)
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    model = Partly()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.load_state(str(tmp_path))
    for one, its in ((reference, expected), (model, optimizer)):
        one.head.requires_grad_(True)
        step(one, its)
    with sw.gathered(model):
        for found, plain in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), plain.detach(), rtol=1e-12, atol=1e-12)


def test_an_optimizer_of_two_models_is_loaded(accelerator: Accelerator, tmp_path: Path) -> None:
    """As in training scripts for a generator with its encoder of texts."""

    def prepared() -> Any:
        models = [build(seed)[0] for seed in (0, 1)]
        parameters = itertools.chain(*(model.parameters() for model in models))
        return accelerator.prepare(*models, torch.optim.AdamW(parameters, lr=0.1))

    def train(first: nn.Module, second: nn.Module, optimizer: Any) -> float:
        loss: Tensor = (first(ROWS) - second(ROWS)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    parts = prepared()
    train(*parts)
    accelerator.save_state(str(tmp_path))
    expected = [train(*parts) for _ in range(3)]
    accelerator.free_memory()
    parts = prepared()
    accelerator.load_state(str(tmp_path))
    assert [train(*parts) for _ in range(3)] == pytest.approx(expected, rel=1e-12)


def test_hooks_of_a_program_may_load_models(accelerator: Accelerator, tmp_path: Path) -> None:
    """As in the training scripts of diffusers, which write files of their own."""

    def save(models: list[nn.Module], weights: list[Any], directory: str) -> None:
        torch.save(accelerator.get_state_dict(models[0]), Path(directory) / "own.pt")
        weights.pop()

    def load(models: list[nn.Module], directory: str) -> None:
        models.pop().load_state_dict(torch.load(Path(directory) / "own.pt"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    model, optimizer = accelerator.prepare(*build())
    step(model, optimizer)
    accelerator.save_state(str(tmp_path))
    assert not (tmp_path / "model.safetensors").exists()
    for _ in range(2):
        step(model, optimizer)
    accelerator.load_state(str(tmp_path))
    step(model, optimizer)
    assert_after(model, 2)


def test_a_load_that_is_not_strict_keeps_what_is_missing(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model = accelerator.prepare(build()[0])
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    larger: Any = build(seed=1)[0]
    larger.append(nn.Linear(2, 2, dtype=torch.float64))
    added = copy.deepcopy(larger[3].weight.detach())
    model = accelerator.prepare(larger)
    with pytest.raises(RuntimeError, match=r"Missing key.*3\.weight"):
        accelerator.load_state(str(tmp_path))
    accelerator.load_state(str(tmp_path), strict=False)
    with sw.gathered(model):
        expected: Any = build()[0]
        assert torch.equal(model[0].weight, expected[0].weight)
        assert torch.equal(model[3].weight, added)


def test_a_backward_in_no_sync_may_reduce(accelerator: Accelerator) -> None:
    model, optimizer = accelerator.prepare(*build())
    with accelerator.no_sync(model):
        first, second = (model(rows).square().sum() / 6 for rows in (ROWS[:1], ROWS[1:]))
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    optimizer.step()
    assert_after(model, 1)
