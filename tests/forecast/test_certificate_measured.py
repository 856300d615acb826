"""The memory certificate against training steps of real ranks on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import profile

import shardwise as sw
from shardwise.forecast.certificate import memory_certificate
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.planned import plan_of, precision_of
from shardwise.forecast.recomputing import checkpoint_blocks
from shardwise.forecast.tracing import trace
from shardwise.forecast.transformer import Shape, build
from tests.ranks import on_ranks

LLAMA = Shape(arch="llama", layers=3, hidden=128, heads=4, vocab=1000, ffn=256)
GPT = Shape(
    arch="gpt", layers=3, hidden=128, heads=4, vocab=1000, positions=64, tied_embeddings=True
)
BASE = Configuration(shard_size=2, micro_batch=4, sequence=64, compute_dtype=torch.float32)
TOLERANCE = 0.05


@on_ranks(2)
@pytest.mark.parametrize(
    ("shape", "word", "options"),
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
    shape: Shape, word: str, options: dict[str, Any]
) -> None:
    configuration = replace(BASE, **options)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    precision = precision_of(configuration)
    meta = build(shape)
    plan = plan_of(meta, configuration)
    words = dict.fromkeys((unit.name for unit in plan.units if unit.name), word)
    workload = trace(meta, [tokens] * 2, units=[*words], precision=precision, checkpointing=words)
    certificate = memory_certificate(plan, workload, configuration, on_cpu=True)

    torch.manual_seed(0)
    model = meta.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    checkpoint_blocks(model, words)
    sw.fully_shard(
        model,
        units="auto",
        strategy=configuration.strategy,
        prefetch=configuration.prefetch,
        mp_policy=precision,
    )
    is_foreach = configuration.optimizer_loop == "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), fused=not is_foreach, foreach=is_foreach)

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with profile(profile_memory=True) as profiled:
        step()
    # The memory of shards, states and gathered units is not allocated anew.
    predicted = max(
        moment.activations + moment.communication + moment.gradients + moment.temporaries
        for moment in certificate.timeline
    )
    assert predicted == pytest.approx(_peak_of(profiled), rel=TOLERANCE)


def _peak_of(profiled: Any) -> int:
    """The most bytes that PyTorch's allocator had given out more than at the beginning."""
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak
