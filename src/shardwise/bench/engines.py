"""The rows of the comparison, and their selection by the options."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.bench import baselines
from shardwise.bench.options import BenchOptions, check_choices
from shardwise.bench.work import LEARNING_RATE, TrainedModel, Work, fused_adamw
from shardwise.errors import ConfigError
from shardwise.plan.strategy import resolve_strategy
from shardwise.tensor.mesh import Communicators

__all__ = [
    "ALONE",
    "ALONE_BF16",
    "BASE",
    "ENGINES",
    "OURS",
    "Engine",
    "choose_engines",
    "missing_peers",
]

BASE = "ddp"
ALONE, ALONE_BF16 = "alone", "alone-bf16"  # without an engine; their copies are subtracted
OURS = "shardwise"


@dataclass(frozen=True, slots=True)
class Engine:
    """A row: one engine with one set of options."""

    name: str
    family: str  # name in --vs or --ours, the same for all its rows
    start: Callable[[Work], TrainedModel]
    is_exact: bool = True  # makes the same updates as the base, up to rounding
    is_replicated: bool = False  # each rank holds the parameters and states of the whole model
    uses_autocast: bool = False  # bf16 by torch.autocast instead of a policy
    by_default: bool = True  # runs with --full, and without it if it `is_quick`
    is_quick: bool = False
    min_ranks: int = 2
    needs_even_ranks: bool = False  # needs an even number of ranks

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)

    def supports_ranks(self, ranks: int) -> bool:
        """Whether the engine runs on ``ranks`` ranks; two-level strategies need an even number."""
        return ranks >= self.min_ranks and not (self.needs_even_ranks and ranks % 2)


@dataclass(frozen=True, slots=True)
class Ours:
    """`sw.fully_shard` with each block as a unit."""

    strategy: str
    prefetch: int = 1
    transaction: bool = False
    granularity: Literal["element", "row", "dim"] = "element"
    communicators: Communicators = "separate"
    wire: sw.Wire = field(default_factory=sw.Wire)
    optimizer: Literal["adamw", "adam8bit", "muon"] = "adamw"
    outer: sw.Outer | None = None  # synchronizes two replicas, each with half of the ranks

    @property
    def is_exact(self) -> bool:
        return self.optimizer == "adamw" and self.wire == sw.Wire() and self.outer is None

    @property
    def is_hybrid(self) -> bool:
        return resolve_strategy(self.strategy).num_axes > 1

    def __call__(self, work: Work) -> TrainedModel:
        half = torch.bfloat16
        policy = sw.MixedPrecisionPolicy(half, half) if work.bf16 else sw.MixedPrecisionPolicy()
        half_the_ranks = dist.get_world_size() // 2
        mesh = None
        if self.outer is not None:
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", (2, half_the_ranks), mesh_dim_names=names)
        model = sw.fully_shard(
            work.make(),
            units=work.block,
            strategy=self.strategy,
            prefetch=self.prefetch,
            granularity=self.granularity,
            communicators=self.communicators,
            sharding_factor=half_the_ranks if self.is_hybrid else None,
            mesh=None if mesh is None else mesh["shard"],
            mp_policy=policy,
            wire=self.wire,
        )
        kind = _InTransactions if self.transaction else TrainedModel
        optimizer = _OPTIMIZERS[self.optimizer](model)
        if self.outer is not None and mesh is not None:
            group = mesh.get_group("replicate")
            sw.outer_optimizer(model, optimizer, self.outer, group=group)
        return kind(work, model, optimizer)


_OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: fused_adamw(model.parameters()),
    "adam8bit": lambda model: sw.optim.Adam8bit(model.parameters(), lr=LEARNING_RATE),
    "muon": lambda model: sw.optim.Muon(
        sw.optim.parameter_groups(model), lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"
    ),
}


class _InTransactions(TrainedModel):
    def around(self) -> AbstractContextManager[None]:
        return sw.transaction(self.model, self.optimizer)


def _ours(name: str, start: Ours, *, by_default: bool = True) -> Engine:
    return Engine(
        name=f"{OURS}-{name}",
        family=name,
        start=start,
        is_exact=start.is_exact,
        # With two ranks, each is a replica.
        is_replicated=start.strategy in {"ddp", "zero1", "zero2"} or start.outer is not None,
        by_default=by_default,
        is_quick=name in {"zero2", "fsdp", "fsdp-dim"},
        min_ranks=4 if start.is_hybrid else 2,
        needs_even_ranks=start.is_hybrid or start.outer is not None,
    )


_ROWS = (
    Engine(BASE, "ddp", baselines.start_ddp, is_replicated=True, uses_autocast=True, is_quick=True),
    Engine(
        "zero-optimizer",
        "zero-optimizer",
        baselines.start_zero_optimizer,
        is_replicated=True,
        uses_autocast=True,
    ),
    Engine("fsdp1", "fsdp1", baselines.Fsdp1(original_parameters=False), is_quick=True),
    Engine("fsdp1-orig", "fsdp1", baselines.Fsdp1(original_parameters=True)),
    Engine("fsdp2", "fsdp2", baselines.Fsdp2(), is_quick=True),
    Engine("fsdp2-no-reshard", "fsdp2", baselines.Fsdp2(reshard=False)),
    Engine("fsdp2-async", "fsdp2", baselines.Fsdp2(unshard_async=True)),
    Engine("deepspeed", "deepspeed", baselines.DeepSpeed),
    _ours("ddp", Ours("ddp")),
    _ours("zero1", Ours("zero1")),
    _ours("zero2", Ours("zero2")),
    _ours("fsdp", Ours("fsdp")),
    _ours("fsdp-dim", Ours("fsdp", granularity="dim")),  # FSDP2's placements
    _ours("hsdp", Ours("hsdp")),
    _ours("hfsdp", Ours("hfsdp")),
    _ours("fsdp-no-prefetch", Ours("fsdp", prefetch=0), by_default=False),
    _ours("fsdp-shared", Ours("fsdp", communicators="shared"), by_default=False),
    _ours("fsdp-wire", Ours("fsdp", wire=sw.Wire("int8", "int4")), by_default=False),
    _ours("fsdp-muon", Ours("fsdp", optimizer="muon"), by_default=False),
    _ours("fsdp-adam8bit", Ours("fsdp", granularity="row", optimizer="adam8bit"), by_default=False),
    # Each step synchronizes one of two fragments, so all steps cost about the same.
    _ours("fsdp-outer", Ours("fsdp", outer=sw.Outer(every=2, fragments=2)), by_default=False),
    _ours("fsdp-transaction", Ours("fsdp", transaction=True), by_default=False),
)
_ALONE = (
    Engine(ALONE, "", baselines.start_alone, is_replicated=True, uses_autocast=True),
    Engine(ALONE_BF16, "", baselines.start_alone_bf16, is_replicated=True),
)
ENGINES = {row.name: row for row in (*_ROWS, *_ALONE)}


def choose_engines(options: BenchOptions) -> tuple[str, ...]:
    """Return the names of the rows that ``options`` select, the base first."""
    peers = _choose("--vs", options.vs, [row for row in _ROWS if not row.is_ours], options)
    ours = _choose("--ours", options.ours, [row for row in _ROWS if row.is_ours], options)
    return tuple(dict.fromkeys((BASE, *peers, *ours)))


def missing_peers(options: BenchOptions) -> tuple[str, ...]:
    """Return engines that are left out because they are not installed."""
    is_wanted = options.full and options.vs is None
    return ("deepspeed",) if is_wanted and not baselines.has_deepspeed() else ()


def _choose(
    option: str, requested: tuple[str, ...] | None, rows: Sequence[Engine], options: BenchOptions
) -> list[str]:
    if requested is None:
        runnable = [row for row in rows if row.supports_ranks(options.ranks)]
        chosen = [row for row in runnable if (row.by_default if options.full else row.is_quick)]
        return [row.name for row in chosen if row.name not in missing_peers(options)]
    families = list(dict.fromkeys(row.family for row in rows))
    check_choices(option, requested, families)
    chosen = [row for row in rows if row.family in requested]
    for row in chosen:
        if not row.supports_ranks(options.ranks):
            raise ConfigError(
                f"{option} {row.family}: expected an even number of {row.min_ranks} or more "
                f"ranks, got --ranks {options.ranks}"
            )
        if row.name == "deepspeed" and not baselines.has_deepspeed():
            raise ConfigError(f"{option} deepspeed: not installed; pip install deepspeed")
    return [row.name for row in chosen]
