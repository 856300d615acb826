"""One rank of 8, 64 and 1,024 without a network: memory, host time and step time beside FSDP2.

The engines take turns in one process; each turn builds the model, trains it and frees it.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_figures import device_figures, product_flops, step_figures, synchronize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise._private import can_swap_storages
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.memory.step import Certificate, memory_certificate
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import plan_of, precision_of
from shardwise.forecast.time.step import StepTime, step_time
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.forecast.trace.tracing import trace
from shardwise.forecast.work import Workload
from shardwise.plan.plan import Plan
from tests.gpu.registry import Context, check

FAKE = "fake group"
TOLERANCE = 0.05
MOST_TIMED = 64  # ranks: torch's fake group copies a gathered buffer once for each of them
ROUNDS, STEPS = 2, 6
INIT_STD = 0.02
SHAPES = {
    "Llama-8B": Shape(
        arch="llama", layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=128_256
    ),
    "GPT-175B": Shape(
        arch="gpt", layers=4, hidden=12_288, heads=96, vocab=51_200, positions=2048,
        tied_embeddings=True,
    ),
}  # fmt: skip
BATCHES = {"Llama-8B": 2, "GPT-175B": 2}
SEQUENCE = 2048
# What a CPU trains in a second.
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
SMALL: dict[str, Any] = dict(zip(SIZES, (2, 64, 4, 2, 128, 256), strict=True))

for name in SHAPES:
    for num_ranks in (8, 64, 1024):

        @check(
            FAKE,
            f"blocks of {name}, {num_ranks} ranks",
            {"group": "none", "seconds": 100.0, "kinds": ("cuda", "cpu")},
            {"name": name, "num_ranks": num_ranks},
        )
        def _measure(context: Context, name: str, num_ranks: int) -> None:
            measure(context, name, num_ranks)


def measure(context: Context, name: str, num_ranks: int) -> None:
    """Report the figures of both engines, and compare memory with the certificate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    is_small = context.kind != "cuda"
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    shape = replace(SHAPES[name], **(SMALL if is_small else {}))
    configuration = Configuration(
        shard_size=num_ranks,
        micro_batch=BATCHES[name],
        sequence=64 if is_small else SEQUENCE,
        checkpointing="full",
        reduce_dtype=torch.bfloat16,
        clips=False,
    )
    work = Work(context.device, shape, configuration)
    certificate = work.certificate()
    context.report("certified live bytes", certificate.peak_bytes)
    context.report("certified reserved bytes", certificate.reserved_bytes)
    peak = product_flops(context.device)
    turns: dict[str, list[dict[str, float]]] = {"shardwise": [], "fsdp2": []}
    for number in range(1 if is_small else ROUNDS):
        for engine, start in (("shardwise", shard_ours), ("fsdp2", shard_fsdp2)):
            turns[engine].append(work.turn(start, profiles=number == 0))
            if not is_small:
                torch.cuda.empty_cache()
            rows = {
                key: statistics.median(turn[key] for turn in turns[engine] if key in turn)
                for key in turns[engine][0]
            }
            if num_ranks > MOST_TIMED:
                rows = {key: value for key, value in rows.items() if "seconds" not in key}
                context.report(engine, rows)
                continue
            tokens = configuration.micro_batch * configuration.sequence
            rows["tokens_per_second"] = tokens / rows["seconds"]
            # FLOP of the model: without recomputation and attention.
            rows["mfu"] = 6 * work.num_parameters * tokens / rows["seconds"] / peak
            context.report(engine, rows)
    if not is_small:
        assert_as_certified(context, certificate, turns["shardwise"][0])


def assert_as_certified(
    context: Context, certificate: Certificate, found: dict[str, float]
) -> None:
    live = found["allocated_peak"] / certificate.peak_bytes
    reserved = found["reserved_peak"] / certificate.reserved_bytes
    context.report("live memory / certified", live)
    context.report("reserved memory / certified", reserved)
    # From torch 2.13 on, the arena of gathered units is allocated at the peak, too.
    most = certificate.reserved_bytes / certificate.peak_bytes if can_swap_storages() else 1.0
    is_certified = 1 - TOLERANCE <= live <= most + TOLERANCE
    assert is_certified, f"live memory is {live:.3f} of the certified"
    # The reserve of the first step, which is over here, is not needed any more.
    assert reserved <= 1 + TOLERANCE, f"reserved memory is {reserved:.3f} of the certified"


class Work:
    """A transformer that both engines train."""

    def __init__(self, device: torch.device, shape: Shape, configuration: Configuration) -> None:
        self.device, self._shape, self._configuration = device, shape, configuration
        size = (configuration.micro_batch, configuration.sequence)
        self._tokens = torch.randint(shape.vocab, size).to(device)
        self.num_parameters = sum(p.numel() for p in build(shape).parameters())
        self.precision = precision_of(configuration)

    def _modes(self, model: nn.Module) -> dict[str, str]:
        plan = plan_of(model, self._configuration)
        names = (unit.name for unit in plan.units if unit.name)
        return dict.fromkeys(names, str(self._configuration.checkpointing))

    @cached_property
    def _planned(self) -> tuple[Plan, Workload]:
        model = build(self._shape)
        modes = self._modes(model)
        tokens = torch.zeros(self._tokens.shape, dtype=torch.long)
        workload = trace(
            model, [tokens] * 2, units=[*modes], precision=self.precision, checkpointing=modes
        )
        return plan_of(model, self._configuration), workload

    def certificate(self) -> Certificate:
        return memory_certificate(*self._planned, self._configuration)

    def step_time(self, cluster: str) -> StepTime:
        """Predict the time of a step on a rank of ``cluster``."""
        return step_time(*self._planned, Machine.of(parse_cluster(cluster)), self._configuration)

    def turn(self, shard: Callable[..., None], *, profiles: bool) -> dict[str, float]:
        """Build the model, train it, free it, and return figures of its steps."""
        figures = self._train(shard, profiles=profiles)
        gc.collect()  # FSDP2's modules are in reference cycles
        return figures

    def _train(self, shard: Callable[..., None], *, profiles: bool) -> dict[str, float]:
        model = build(self._shape)
        modes = self._modes(model)
        model.to_empty(device=self.device)
        if self._shape.tied_embeddings:  # `to_empty` unties parameters of the meta device
            model.head.weight = model.embedding.weight  # type: ignore[union-attr]
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=INIT_STD)
        checkpoint_blocks(model, modes)
        shard(model, [model.get_submodule(name) for name in modes], self.precision, self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(tokens: Tensor = self._tokens) -> Tensor:
            loss: Tensor = model(tokens, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        figures = step_figures(step, STEPS, self.device)
        few = self._tokens[:1, :16]  # with more, the host may wait for a full queue of the device
        step(few)
        synchronize(self.device)
        began = time.perf_counter()
        step(few)
        figures["host_seconds_per_unit"] = (time.perf_counter() - began) / (len(modes) + 1)
        synchronize(self.device)
        if profiles:
            figures |= device_figures(step, self.device)
        return figures


def shard_ours(
    model: nn.Module, _blocks: list[nn.Module], precision: Any, _device: torch.device
) -> None:
    sw.fully_shard(model, units="auto", mp_policy=precision)


def shard_fsdp2(
    model: nn.Module, blocks: list[nn.Module], precision: Any, device: torch.device
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
