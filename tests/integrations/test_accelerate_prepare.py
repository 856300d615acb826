"""What accelerate's `Accelerator` keeps between calls of `prepare`, and what it frees."""

import gc
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
