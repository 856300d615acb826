"""`fit`: chooses the fastest configuration whose memory stays within a budget.

For every strategy, prefetch and micro-batch, the first blocks are recomputed, as few of them as the
budget allows. The fastest of these candidates wins. Memory is predicted by the certificate.
"""

import gc
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import PlanError
from shardwise.forecast.configuration import Checkpointing, Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.find import local_machine, machine_of
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.memory.process import (
    count_growth,
    growths,
    release_memory,
    set_mmap_threshold,
)
from shardwise.forecast.memory.step import Certificate
from shardwise.forecast.models.model import Model, model_of
from shardwise.forecast.options import bytes_of
from shardwise.forecast.search.applying import apply_to
from shardwise.forecast.trace.blocks import find_stacks
from shardwise.forecast.work import Workload
from shardwise.plan.policies import Units, choose_units
from shardwise.plan.strategy import PRESETS

__all__ = ["Fit", "Search", "choose", "fit"]

MODES: tuple[Checkpointing, ...] = ("products", "full")
_RETURNED_BYTES = 1 << 16  # malloc returns freed blocks of at least this size to the system
_WIDTH = 512  # width of the products for which libraries set up their buffers
_PREFETCHES = (0, 1, 2)
_STRATEGIES = [name for name, row in PRESETS.items() if row.num_axes == 1]


@dataclass(frozen=True)
class Fit:
    """A configuration within a budget."""

    configuration: Configuration
    certificate: Certificate
    seconds: float  # predicted step time
    on_cpu: bool

    @property
    def num_bytes(self) -> int:
        """Peak bytes on one rank's device. On a CPU, memory that the process had does not count."""
        return _bytes(self.certificate, self.on_cpu)

    @property
    def checkpointing(self) -> tuple[Checkpointing, ...]:
        """The checkpointing mode of each block; empty if no block is recomputed."""
        modes = self.configuration.checkpointing
        return modes if isinstance(modes, tuple) else ()

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` with this configuration and return it.

        Pass it batches of ``configuration.micro_batch`` rows.
        """
        return apply_to(model, self.configuration)


def fit(
    model: nn.Module,
    *,
    budget: int | str,
    batch: int,
    sequence: int,
    units: Units = "auto",
    configuration: Configuration | None = None,
    cluster: str = "",
) -> Fit:
    """Shard ``model`` with the fastest configuration that stays within a memory budget per rank.

    ::

        fitted = sw.fit(model, budget="24 GB", batch=32, sequence=2048)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for tokens in batches.split(fitted.configuration.micro_batch): ...

    It chooses the strategy, the prefetch, the micro-batch, which blocks are recomputed in backward,
    and whether activations are offloaded to the host.

    Args:
        model: takes tokens [batch, time], and targets of that shape if it has a second argument;
            returns the loss or logits. It may be on the meta device.
        budget: bytes of a rank's device, such as "24 GB" (10^9) or "24 GiB" (2^30). On a CPU, the
            budget covers the model and everything that the process allocates after this call:
            tensors, and the buffers of libraries, which are measured, as is what ``sw.fit`` imports
            if it is the first name of the package that is used. From this call on, glibc
            returns freed blocks to the system, which takes some time in every step.
        batch: sequences per rank and step.
        sequence: tokens per sequence.
        units: must select the repeated blocks.
        configuration: dtypes, optimizer and offload; None: the model's dtype and AdamW.
        cluster: hardware that runs the model, such as "8xH100", or "2xFILE" with a file written by
            `shardwise doctor --calibrate FILE`. It determines how compute compares to
            communication. "": one device like this one per rank; on a CPU, rates of typical
            servers.

    Raises:
        PlanError: no configuration fits. The message says how much is missing and what would help.
        ConfigError: ``cluster`` is unknown, or it was not given and this GPU is unknown.
    """
    if choose_units(model, units) != choose_units(model, "auto"):
        raise PlanError(
            f"units={units!r}: sw.fit expects the repeated blocks as units; pass units='auto'"
        )
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    given = configuration or Configuration(
        compute_dtype=next(model.parameters()).dtype, master_dtype=next(model.parameters()).dtype
    )
    base = replace(given, shard_size=num_ranks, micro_batch=batch, sequence=sequence)
    machine = machine_of(cluster) if cluster else local_machine(num_ranks)
    on_cpu = not torch.cuda.is_available()
    search = Search(model_of(model), machine, on_cpu)
    if on_cpu:
        search.overhead_bytes = _overhead_bytes(search, base)
    fitted = choose(search, base, bytes_of(budget))
    fitted.apply(model)
    del search
    _release()
    return fitted


def _overhead_bytes(search: "Search", base: Configuration) -> int:
    """Return the memory beyond tensors since the first call of `fit`, as a maximum over ranks.

    The overhead is measured by using each library once and running one search whose result is
    discarded. It includes that of importing `fit`.
    """
    set_mmap_threshold(_RETURNED_BYTES)
    with count_growth():
        _use_libraries()
        with suppress(PlanError):
            choose(search, base, 0)
        _release()
    found = torch.tensor(sum(growths))
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def _release() -> None:
    gc.collect()
    release_memory()


def _use_libraries() -> None:
    """Run a training step, which starts threads and loads kernels and lazily imported modules."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.enable_grad():
        model(torch.zeros(_WIDTH, _WIDTH)).sum().backward()
    optimizer.step()


def choose(search: "Search", base: Configuration, budget: int, *, whole: bool = False) -> Fit:
    """Choose the fastest configuration within ``budget`` bytes.

    Args:
        search: forecasts of a model on a machine.
        base: the settings that are not chosen; its micro-batch is all of a rank's batch.
        budget: bytes per rank.
        whole: whether to recompute either all blocks or none.

    Raises:
        PlanError: no configuration fits.
    """
    fits: list[Fit] = []
    for candidate, mode in product(search.bases(base), MODES):
        counts = [0, search.num_blocks] if whole else list(range(search.num_blocks + 1))
        options = [search.recomputing(candidate, mode, count) for count in counts]
        if search.num_bytes(options[0]) <= budget:
            fits.append(search.fit(options[0]))
        elif search.num_bytes(options[-1]) <= budget:  # fewer blocks may suffice
            index = bisect_left(
                options, True, key=lambda option: search.num_bytes(option) <= budget
            )
            fits.append(search.fit(options[index]))
    if fits:
        return min(fits, key=lambda found: found.seconds)
    raise PlanError(_missing(search, base, budget))


class Search(Forecaster):
    """Forecasts of one model on one machine, of which any number of blocks may be recomputed."""

    def __init__(self, model: Model, machine: Machine, on_cpu: bool = False) -> None:
        super().__init__(model, machine)
        self.on_cpu = on_cpu
        self.overhead_bytes = 0  # memory of the process beyond tensors, on a CPU
        stacks = find_stacks(model.build(Configuration()))
        self._blocks = stacks[0].blocks if len(stacks) == 1 else ()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that may be recomputed; 0 unless there is exactly one stack."""
        return len(self._blocks)

    def bases(self, base: Configuration) -> Iterator[Configuration]:
        """Yield all combinations of strategy, prefetch, micro-batch and activation offload."""
        ranks, batch = base.shard_size, base.micro_batch
        sizes = [size for size in range(1, batch + 1) if batch % size == 0]
        offloads = (False,) if self.on_cpu else (False, True)
        strategies = _STRATEGIES if ranks > 1 else ("fsdp",)
        for strategy, prefetch, size, offload in product(strategies, _PREFETCHES, sizes, offloads):
            if strategy != "fsdp" and prefetch != 1:
                continue
            is_whole = strategy == "ddp"
            yield replace(
                base,
                strategy=strategy,
                shard_size=1 if is_whole else ranks,
                replicas=ranks if is_whole else 1,
                prefetch=prefetch,
                micro_batch=size,
                accumulation=batch // size,
                activation_offload=offload,
            )

    def recomputing(self, base: Configuration, mode: Checkpointing, count: int) -> Configuration:
        """Return ``base`` with its first ``count`` blocks recomputed."""
        if not count:
            return replace(base, checkpointing="none")
        kept: list[Checkpointing] = ["none"] * (self.num_blocks - count)
        return replace(base, checkpointing=(*[mode] * count, *kept))

    def num_bytes(self, configuration: Configuration) -> int:
        """Predict the peak bytes on a rank's device."""
        return _bytes(self.certificate(configuration), self.on_cpu)

    def certificate(self, configuration: Configuration) -> Certificate:
        found = self.memory(configuration).memory
        return replace(found, overhead_bytes=found.overhead_bytes + self.overhead_bytes)

    def fit(self, configuration: Configuration) -> Fit:
        """Predict memory and time."""
        seconds = self.forecast(configuration).step.seconds
        return Fit(configuration, self.certificate(configuration), seconds, self.on_cpu)

    def workload(self, configuration: Configuration, stage: int = -1) -> Workload:
        """Trace every kind of block once, and repeat the trace as the configuration requires."""
        modes = configuration.checkpointing
        if isinstance(modes, str) or len(set(modes)) == 1:
            return super().workload(configuration, stage)
        count, half = sum(mode != "none" for mode in modes), self.num_blocks // 2
        workload = super().workload(self.recomputing(configuration, modes[0], half))
        if count == half:
            return workload
        order = [min(n, half - 1) if n < count else max(n, half) for n in range(self.num_blocks)]
        stack, _, _ = self._blocks[0].rpartition(".")
        return workload.repeated(stack, order)


def _bytes(certificate: Certificate, on_cpu: bool) -> int:
    if not on_cpu:
        return certificate.device_bytes
    # The memory of gathered units is kept from step to step.
    arena = max(moment.gathered for moment in certificate.timeline)
    others = max(moment.total - moment.gathered for moment in certificate.timeline)
    return arena + others + certificate.host_bytes + certificate.overhead_bytes


def _missing(search: Search, base: Configuration, budget: int) -> str:
    """Explain why no configuration fits, and what would help."""
    options = [
        search.recomputing(candidate, mode, count)
        for candidate in search.bases(base)
        for mode in MODES
        for count in {0, search.num_blocks}
        if candidate.micro_batch == 1
    ]
    least = min(options, key=search.num_bytes)
    size = search.num_bytes(least)
    peak = search.certificate(least).peak
    largest = sorted(peak.by_category().items(), key=lambda pair: -pair[1])[:2]
    ranks = least.shard_size * least.replicas
    changes = {
        "optimizer='sgd'": replace(least, optimizer="sgd"),
        "optimizer='adam8bit'": replace(least, optimizer="adam8bit"),
        f"{2 * ranks} ranks": replace(least, strategy="fsdp", shard_size=2 * ranks, replicas=1),
    }
    if not search.on_cpu:
        changes["offload='parameters'"] = replace(least, offload="parameters")
    saved = {name: size - search.num_bytes(change) for name, change in changes.items()}
    best = max(saved, key=lambda name: saved[name])
    held = " and ".join(f"{name} ({num_bytes:,} bytes)" for name, num_bytes in largest)
    return (
        f"budget={budget:,} bytes: no configuration fits; the smallest needs {size:,} bytes per "
        f"rank ({size - budget:,} more) with strategy={least.strategy!r}, micro_batch=1 and every "
        f"block {'kept' if least.checkpointing == 'none' else 'recomputed'}; its peak "
        f"({peak.label}) is mostly {held}; {best} would save {saved[best]:,} bytes"
    )
