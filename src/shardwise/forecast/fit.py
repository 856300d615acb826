"""The fastest configuration whose memory stays within a budget: `fit`.

For every strategy, prefetch and micro-batch, as few blocks are recomputed as the budget allows,
from the first one on; then the fastest of all is chosen. Memory is that of the certificate.
"""

import copy
import gc
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.api import fully_shard
from shardwise.errors import PlanError
from shardwise.features.activation_offload import offload_activations
from shardwise.forecast.blocks import find_stacks
from shardwise.forecast.certificate import Certificate, memory_certificate
from shardwise.forecast.configuration import Checkpointing, Configuration
from shardwise.forecast.machine import Machine
from shardwise.forecast.machines import local_machine, machine_of
from shardwise.forecast.models import Model, workload_of
from shardwise.forecast.numbers import bytes_of
from shardwise.forecast.planned import offload_of, plan_of, precision_of
from shardwise.forecast.process import (
    release_memory,
    resident_bytes,
    set_mmap_threshold,
)
from shardwise.forecast.recomputing import checkpoint_blocks
from shardwise.forecast.timeline import step_time
from shardwise.forecast.work import Workload
from shardwise.plan.plan import Plan
from shardwise.plan.units import Units, choose_units

__all__ = ["Fit", "Search", "choose", "fit"]

WORDS: tuple[Checkpointing, ...] = ("products", "full")
_RETURNED_BYTES = 1 << 16  # blocks from here on are not kept by malloc when they are freed
_WIDTH = 512  # of the products for which libraries set up their buffers
_PREFETCHES = (0, 1, 2)
_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class Fit:
    """A configuration within a budget."""

    configuration: Configuration
    certificate: Certificate
    seconds: float  # of a step, predicted
    on_cpu: bool

    @property
    def num_bytes(self) -> int:
        """Of a rank's device at the peak; on a CPU without the process as it was before."""
        return _bytes(self.certificate, self.on_cpu)

    @property
    def words(self) -> tuple[Checkpointing, ...]:
        """The checkpointing of each block; empty if none is recomputed."""
        words = self.configuration.checkpointing
        return words if isinstance(words, tuple) else ()

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` so; returns it. Its batches have ``configuration.micro_batch`` rows."""
        configuration = self.configuration
        checkpoint_blocks(model, dict(zip(_blocks(model), self.words, strict=False)))
        is_whole = not configuration.row.shards
        fully_shard(
            model,
            units="auto",
            strategy=configuration.strategy,
            prefetch=configuration.prefetch,
            mp_policy=precision_of(configuration),
            offload_policy=offload_of(configuration),
            reshard_after_forward=None if is_whole else configuration.reshard_after_forward,
        )
        if configuration.activation_offload:
            _offload_in_forward(model)
        return model


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
    """Shard ``model`` as is fastest within ``budget`` bytes of each rank.

    ::

        fitted = sw.fit(model, budget="24 GB", batch=32, sequence=2048)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for tokens in batches.split(fitted.configuration.micro_batch): ...

    The strategy, the prefetch, the micro-batch, which blocks are recomputed in backward, and
    whether activations wait on the host are chosen.

    Args:
        model: takes tokens [batch, time], and targets of that shape if it has a second argument;
            returns the loss or logits. It may be on the meta device.
        budget: of the memory of a rank's device, such as "24 GB" (10^9) or "24 GiB" (2^30). On a
            CPU it is for the model and all that the process takes from this call on: tensors, and
            libraries on their first use, which are measured. From then on glibc returns freed
            blocks to the system, which takes some time in every step.
        batch: sequences of a rank in a step.
        sequence: tokens in a sequence.
        units: the repeated blocks.
        configuration: dtypes, optimizer and offload; float32 and AdamW if it is None.
        cluster: what runs it, as "8xH100" or "2xFILE" of `shardwise doctor --calibrate FILE`; it
            weighs compute against communication. "" is as many GPUs like this one, or the usual
            CPU, as there are ranks.

    Raises:
        PlanError: nothing fits; the message says how much is missing and what would help.
        ConfigError: ``cluster`` is not known, or was not given and this GPU is not known.
    """
    if choose_units(model, units) != choose_units(model, "auto"):
        raise PlanError(f"units={units!r}: sw.fit chooses per repeated block; pass units='auto'")
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    given = configuration or Configuration(
        compute_dtype=next(model.parameters()).dtype, master_dtype=next(model.parameters()).dtype
    )
    base = replace(given, shard_size=num_ranks, micro_batch=batch, sequence=sequence)
    machine = machine_of(cluster) if cluster else local_machine(num_ranks)
    on_cpu = not torch.cuda.is_available()
    search = Search(Model(type(model).__name__, factory=partial(_on_meta, model)), machine, on_cpu)
    if on_cpu:
        search.overhead_bytes = _overhead_bytes(search, base)
    fitted = choose(search, base, bytes_of(budget))
    fitted.apply(model)
    del search
    _release()
    return fitted


_overheads = [0]  # of the calls of `fit` in this process, whose libraries stay


def _overhead_bytes(search: "Search", base: Configuration) -> int:
    """What this process has beyond tensors since the first call of `fit`, the most of all ranks.

    It is measured: libraries are used for the first time, and a search is made once in vain.
    """
    set_mmap_threshold(_RETURNED_BYTES)
    before = resident_bytes()
    _use_libraries()
    with suppress(PlanError):
        choose(search, base, 0)
    _release()
    _overheads.append(max(0, resident_bytes() - before))
    found = torch.tensor(sum(_overheads))
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def _release() -> None:
    gc.collect()
    release_memory()


def _use_libraries() -> None:
    """A training step: threads, kernels and modules that are imported when they are needed."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.enable_grad():
        model(torch.zeros(_WIDTH, _WIDTH)).sum().backward()
    optimizer.step()


def choose(search: "Search", base: Configuration, budget: int, *, whole: bool = False) -> Fit:
    """The fastest configuration within ``budget`` bytes; ``base`` has all of a rank's batch.

    Args:
        search: of a model on a machine.
        base: what is not chosen.
        budget: bytes of a rank.
        whole: all blocks are recomputed, or none.

    Raises:
        PlanError: none fits.
    """
    fits: list[Fit] = []
    for one, word in product(search.bases(base), WORDS):
        counts = [0, search.num_blocks] if whole else list(range(search.num_blocks + 1))
        ways = [search.recomputing(one, word, count) for count in counts]
        if search.num_bytes(ways[0]) <= budget:
            fits.append(search.fit(ways[0]))
        elif search.num_bytes(ways[-1]) <= budget:  # so some fewer may do
            place = bisect_left(ways, True, key=lambda way: search.num_bytes(way) <= budget)
            fits.append(search.fit(ways[place]))
    if fits:
        return min(fits, key=lambda found: found.seconds)
    raise PlanError(_missing(search, base, budget))


class Search:
    """Forecasts of one model on one machine; traces and plans are made once."""

    def __init__(self, model: Model, machine: Machine, on_cpu: bool = False) -> None:
        self._model, self._machine, self.on_cpu = model, machine, on_cpu
        self.overhead_bytes = 0  # of the process, on a CPU
        self._traces: dict[tuple[int, tuple[Checkpointing, ...], bool], Workload] = {}
        self._plans: dict[Configuration, Plan] = {}

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that may be recomputed: those of the only stack, if there is one."""
        return len(_blocks(self._model.build(Configuration())))

    def bases(self, base: Configuration) -> Iterator[Configuration]:
        """All strategies, prefetches, micro-batches and places of activations."""
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

    def recomputing(self, base: Configuration, word: Checkpointing, count: int) -> Configuration:
        """The same with its first ``count`` blocks recomputed."""
        if not count:
            return replace(base, checkpointing="none")
        kept: list[Checkpointing] = ["none"] * (self.num_blocks - count)
        return replace(base, checkpointing=(*[word] * count, *kept))

    def num_bytes(self, configuration: Configuration) -> int:
        """Of a rank's device."""
        return _bytes(self.certificate(configuration), self.on_cpu)

    def certificate(self, configuration: Configuration) -> Certificate:
        plan, workload = self._plan(configuration), self._workload(configuration)
        found = memory_certificate(plan, workload, configuration, on_cpu=self.on_cpu)
        return replace(found, overhead_bytes=found.overhead_bytes + self.overhead_bytes)

    def fit(self, configuration: Configuration) -> Fit:
        """With memory and time."""
        plan, workload = self._plan(configuration), self._workload(configuration)
        time = step_time(plan, workload, self._machine, configuration)
        return Fit(configuration, self.certificate(configuration), time.seconds, self.on_cpu)

    def _plan(self, configuration: Configuration) -> Plan:
        key = replace(
            configuration,
            micro_batch=1,
            accumulation=1,
            checkpointing="none",
            prefetch=1,
            activation_offload=False,
        )
        if key not in self._plans:
            self._plans[key] = plan_of(self._model.build(key), key)
        return replace(self._plans[key], prefetch=configuration.prefetch)

    def _workload(self, configuration: Configuration) -> Workload:
        """A trace of all kinds of blocks, repeated as the configuration has them."""
        words = configuration.checkpointing
        if isinstance(words, str) or len(set(words)) == 1:
            return self._trace(configuration, words if isinstance(words, tuple) else ())
        count, depth = sum(word != "none" for word in words), len(words)
        half = depth // 2
        kept: list[Checkpointing] = ["none"] * (depth - half)
        mixed = (*[words[0]] * half, *kept)
        workload = self._trace(configuration, mixed)
        if count == half:
            return workload
        (stack,) = find_stacks(self._model.build(configuration))
        order = [min(n, half - 1) if n < count else max(n, half) for n in range(depth)]
        return workload.repeated(stack.name, order)

    def _trace(self, configuration: Configuration, words: tuple[Checkpointing, ...]) -> Workload:
        key = configuration.micro_batch, words, configuration.compiled
        if key not in self._traces:
            one = replace(
                configuration,
                checkpointing=words or "none",
                strategy="fsdp",
                shard_size=1,
                replicas=1,
                accumulation=1,
                activation_offload=False,
            )
            self._traces[key] = workload_of(self._model, one)
        return self._traces[key]


def _bytes(certificate: Certificate, on_cpu: bool) -> int:
    if not on_cpu:
        return certificate.device_bytes
    # The memory of gathered units stays from step to step.
    arena = max(moment.gathered for moment in certificate.timeline)
    others = max(moment.total - moment.gathered for moment in certificate.timeline)
    return arena + others + certificate.host_bytes + certificate.overhead_bytes


def _missing(search: Search, base: Configuration, budget: int) -> str:
    """Why nothing fits."""
    options = [
        search.recomputing(one, word, count)
        for one in search.bases(base)
        for word in WORDS
        for count in {0, search.num_blocks}
        if one.micro_batch == 1
    ]
    least = min(options, key=search.num_bytes)
    size = search.num_bytes(least)
    peak = search.certificate(least).peak
    largest = sorted(peak.by_category().items(), key=lambda pair: -pair[1])[:2]
    ranks = least.shard_size * least.replicas
    changes = {
        "optimizer='sgd'": replace(least, optimizer="sgd"),
        "optimizer='adamw8bit'": replace(least, optimizer="adamw8bit"),
        f"{2 * ranks} ranks": replace(least, strategy="fsdp", shard_size=2 * ranks, replicas=1),
    }
    if not search.on_cpu:
        changes["offload='parameters'"] = replace(least, offload="parameters")
    saved = {name: size - search.num_bytes(change) for name, change in changes.items()}
    best = max(saved, key=lambda name: saved[name])
    held = " and ".join(f"{name} ({num_bytes:,} bytes)" for name, num_bytes in largest)
    return (
        f"budget={budget:,} bytes: nothing fits; the least is {size:,} bytes a rank, "
        f"{size - budget:,} more, with strategy={least.strategy!r}, micro_batch=1 and every block "
        f"{'kept' if least.checkpointing == 'none' else 'recomputed'}; at its peak "
        f"({peak.label}) most are {held}; {best} would save {saved[best]:,} bytes"
    )


def _blocks(model: nn.Module) -> tuple[str, ...]:
    stacks = find_stacks(model)
    return stacks[0].blocks if len(stacks) == 1 else ()


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device, which copies no data."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _offload_in_forward(model: nn.Module) -> None:
    """What a forward of ``model`` saves waits on the host."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(offload_activations(model))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
