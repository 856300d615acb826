"""Compares the memory certificate with training steps of ranks on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile

import shardwise as sw
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory.step import Certificate, memory_certificate
from shardwise.forecast.memory.update import update_bytes
from shardwise.forecast.models.adapted import adapt
from shardwise.forecast.models.model import Model, workload_of
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import plan_of, precision_of, sharding_of
from shardwise.forecast.states import state_bytes
from shardwise.forecast.time.traffic import sent_bytes
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.forecast.trace.tracing import trace
from shardwise.runtime.module import handle_of
from shardwise.tensor.sharding import local_of
from tests.forecast.peaks import peak_of
from tests.ranks import on_ranks
from tests.versions import needs_swap
from tests.watching import without_frames

LLAMA = Shape(arch="llama", layers=3, hidden=128, heads=4, vocab=1000, ffn=256)
GPT = Shape(
    arch="gpt", layers=3, hidden=128, heads=4, vocab=1000, positions=64, tied_embeddings=True
)
MIDDLE = Shape(arch="llama", layers=8, hidden=640, heads=10, vocab=8000, ffn=1792)  # 51 M
BASE = Configuration(shard_size=2, micro_batch=4, sequence=64, compute_dtype=torch.float32)
TOLERANCE = 0.05


LORA = {"adapters": Adapters(rank=8)}
QLORA = {"adapters": Adapters(rank=8, quantized=True)}
DORA = {"adapters": Adapters(rank=8, dora=True)}
thorough = pytest.mark.thorough


def real(shape: Shape, configuration: Configuration) -> nn.Module:
    """Build the model with values, and the adapters and checkpointing of ``configuration``."""
    torch.manual_seed(0)
    model = build(shape).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    if configuration.adapters is not None:
        adapt(model, configuration.adapters, base=torch.float32, trained=torch.float32)
    checkpoint_blocks(model, configuration.checkpointing)
    return model


def measured_peak(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> int:
    """Return the bytes that the third step allocates.

    Shards, states and gathered units keep their memory from step to step.
    """

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with without_frames(), profile(profile_memory=True) as profiled:
        step()
    return peak_of(profiled)


def forecast_peak(certificate: Certificate) -> int:
    """Return the bytes that `measured_peak` should find."""
    return max(
        moment.activations + moment.communication + moment.gradients + moment.temporaries
        for moment in certificate.timeline
    )


@needs_swap
@on_ranks(2)
@pytest.mark.parametrize(
    ("shape", "mode", "options"),
    [
        (LLAMA, "none", {}),
        (LLAMA, "none", LORA),
        (LLAMA, "none", QLORA),
        (GPT, "full", {"strategy": "zero2"}),
        pytest.param(LLAMA, "full", {}, marks=thorough),
        pytest.param(GPT, "none", {}, marks=thorough),
        pytest.param(LLAMA, "selective", {}, marks=thorough),
        pytest.param(LLAMA, "products", {"prefetch": 2}, marks=thorough),
        pytest.param(GPT, "full", {"optimizer_loop": "foreach"}, marks=thorough),
        pytest.param(LLAMA, "full", {"compute_dtype": torch.bfloat16}, marks=thorough),
        pytest.param(LLAMA, "none", DORA, marks=thorough),
        pytest.param(LLAMA, "full", QLORA, marks=thorough),
        pytest.param(GPT, "full", LORA, marks=thorough),
        pytest.param(MIDDLE, "none", LORA, marks=thorough),
        pytest.param(MIDDLE, "full", QLORA, marks=thorough),
    ],
    ids=str,
)
def test_a_step_allocates_and_sends_what_is_forecast(
    shape: Shape, mode: Any, options: dict[str, Any]
) -> None:
    configuration = replace(BASE, checkpointing=mode, **options)
    forecast = Model("model", shape)
    meta = forecast.build(configuration)
    plan, workload = plan_of(meta, configuration), workload_of(forecast, configuration)
    buffers = sum(buffer.nbytes for buffer in meta.buffers())
    certificate = memory_certificate(
        plan, workload, configuration, buffer_bytes=buffers, on_cpu=True
    )
    model = sw.fully_shard(real(shape, configuration), **sharding_of(configuration))
    if not shape.tied_embeddings:  # `to_empty` has untied them
        assert handle_of(model).runtime.plan == plan
    is_foreach = configuration.optimizer_loop == "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), fused=not is_foreach, foreach=is_foreach)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    measured = measured_peak(model, optimizer, tokens, tokens)
    assert forecast_peak(certificate) == pytest.approx(measured, rel=TOLERANCE)
    if not shape.tied_embeddings:
        assert sw.ledger(model).sent_bytes() == sent_bytes(plan)
    asleep = sw.sleep(model, optimizer)
    steps = 4 * len(optimizer.state)  # a count per parameter
    if not shape.tied_embeddings:
        assert asleep.host_bytes == certificate.asleep_host_bytes + steps
    assert asleep.remaining_bytes == certificate.asleep_bytes
    sw.wake(model, optimizer)


class _Unit(nn.Sequential):
    """Contains a linear layer. One that is a unit itself would not use the reduce buffer."""


class _Wide(nn.Sequential):
    """Linear layers whose weights have far more elements than their activations."""

    def __init__(self) -> None:
        super().__init__(*(_Unit(nn.Linear(512, 512, bias=False)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:  # [rows, 512]
        total: Tensor = super().forward(x).sum()  # type: ignore[no-untyped-call]
        return total


@needs_swap
@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_in_the_dtype_of_the_reduction_takes_no_memory_of_its_own(
    dtype: torch.dtype,
) -> None:
    """It is computed in the reduce buffer; one in bfloat16 is first allocated, and then copied."""
    configuration = Configuration(
        shard_size=2,
        units="_Unit",
        master_dtype=dtype,
        compute_dtype=dtype,
        reduce_dtype=torch.float32,
        optimizer="sgd",
    )
    torch.manual_seed(0)
    model, batch = _Wide().to(dtype), torch.randn(4, 512, dtype=dtype)
    plan = plan_of(model, configuration)
    units = [unit.name for unit in plan.units]
    workload = trace(model, [batch], units=units, precision=precision_of(configuration))
    certificate = memory_certificate(plan, workload, configuration, on_cpu=True)
    sw.fully_shard(model, **sharding_of(configuration))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    measured = measured_peak(model, optimizer, batch)
    assert forecast_peak(certificate) == pytest.approx(measured, rel=TOLERANCE)


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "muon": lambda model: sw.optim.Muon(sw.optim.parameter_groups(model)),
    "soap": lambda model: sw.optim.SOAP(sw.optim.parameter_groups(model)),
    "adam8bit": lambda model: sw.optim.Adam8bit(model.parameters()),
}


@pytest.mark.thorough
@on_ranks(2)
@pytest.mark.parametrize("name", MAKERS)
def test_states_take_what_is_certified(name: str) -> None:
    """Compares the mean over ranks, because owners of whole matrices differ in bytes."""
    configuration = replace(BASE, optimizer=name)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    plan = plan_of(build(LLAMA), configuration)
    predicted = state_bytes(plan, configuration, offloaded=False)
    model = sw.fully_shard(real(LLAMA, configuration), units="auto", granularity="row")
    optimizer = MAKERS[name](model)
    model(tokens, tokens).backward()
    optimizer.step()
    states = [
        local_of(value).nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    ]
    total = torch.tensor(float(sum(states)))
    dist.all_reduce(total)
    assert predicted == pytest.approx(total.item() / 2, rel=0.02)
    with profile(profile_memory=True) as profiled:
        optimizer.step()
    assert peak_of(profiled) <= 1.1 * update_bytes(plan, configuration, on_cpu=True)
