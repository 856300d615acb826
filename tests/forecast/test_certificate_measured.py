"""Compares the memory certificate with training steps of ranks on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory.step import memory_certificate
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import plan_of, precision_of
from shardwise.forecast.states import state_bytes
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.forecast.trace.tracing import trace
from shardwise.tensor.sharding import local_of
from tests.forecast.peaks import forecast_peak, measured_peak
from tests.ranks import on_ranks
from tests.versions import needs_swap

LLAMA = Shape(arch="llama", layers=3, hidden=128, heads=4, vocab=1000, ffn=256)
GPT = Shape(
    arch="gpt", layers=3, hidden=128, heads=4, vocab=1000, positions=64, tied_embeddings=True
)
BASE = Configuration(shard_size=2, micro_batch=4, sequence=64, compute_dtype=torch.float32)
TOLERANCE = 0.05


@needs_swap
@on_ranks(2)
@pytest.mark.parametrize(
    ("shape", "mode", "options"),
    [
        (LLAMA, "none", {}),
        pytest.param(LLAMA, "full", {}, marks=pytest.mark.thorough),
        (GPT, "full", {"strategy": "zero2"}),
        pytest.param(GPT, "none", {}, marks=pytest.mark.thorough),
        pytest.param(LLAMA, "selective", {}, marks=pytest.mark.thorough),
        pytest.param(LLAMA, "products", {"prefetch": 2}, marks=pytest.mark.thorough),
        pytest.param(GPT, "full", {"optimizer_loop": "foreach"}, marks=pytest.mark.thorough),
        pytest.param(LLAMA, "full", {"compute_dtype": torch.bfloat16}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_step_allocates_what_is_certified(
    shape: Shape, mode: str, options: dict[str, Any]
) -> None:
    configuration = replace(BASE, **options)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    precision = precision_of(configuration)
    meta = build(shape)
    plan = plan_of(meta, configuration)
    modes = dict.fromkeys((unit.name for unit in plan.units if unit.name), mode)
    workload = trace(meta, [tokens] * 2, units=[*modes], precision=precision, checkpointing=modes)
    certificate = memory_certificate(plan, workload, configuration, on_cpu=True)

    torch.manual_seed(0)
    model = meta.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    checkpoint_blocks(model, modes)
    sw.fully_shard(
        model,
        units="auto",
        strategy=configuration.strategy,
        prefetch=configuration.prefetch,
        mp_policy=precision,
    )
    is_foreach = configuration.optimizer_loop == "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), fused=not is_foreach, foreach=is_foreach)
    measured = measured_peak(model, optimizer, tokens, tokens)
    assert forecast_peak(certificate) == pytest.approx(measured, rel=TOLERANCE)
    asleep = sw.sleep(model, optimizer)
    steps = 4 * len(optimizer.state)  # a count per parameter
    if not shape.tied_embeddings:  # `to_empty` has untied them
        assert asleep.host_bytes == certificate.asleep_host_bytes + steps
    assert asleep.remaining_bytes == certificate.asleep_bytes
    sw.wake(model, optimizer)


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
    torch.manual_seed(0)
    configuration = replace(BASE, optimizer=name)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    meta = build(LLAMA)
    predicted = state_bytes(plan_of(meta, configuration), configuration, offloaded=False)
    model = meta.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    sw.fully_shard(model, units="auto", granularity="row")
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
