"""The rows of the comparison, and which of them a request means."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.bench import peers
from shardwise.bench.setting import Request, choose_words
from shardwise.bench.work import Trainee, Work
from shardwise.errors import ConfigError

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
ALONE, ALONE_BF16 = "alone", "alone-bf16"  # no engine, to be subtracted from what is copied
OURS = "shardwise"


@dataclass(frozen=True, slots=True)
class Engine:
    """A row: an engine in one of its settings."""

    name: str
    family: str  # what --vs or --ours calls it, with its other settings
    start: Callable[[Work], Trainee]
    keeps_whole: bool = False  # parameters and states of the whole model on each rank
    autocasts: bool = False  # bf16 by torch.autocast, in the place of a policy
    by_default: bool = True
    least_ranks: int = 2

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)

    def suits(self, ranks: int) -> bool:
        """Whether it can run on so many; on a mesh of two rows they must be even."""
        return ranks >= self.least_ranks and (self.least_ranks == 2 or ranks % 2 == 0)  # noqa: PLR2004


@dataclass(frozen=True, slots=True)
class Ours:
    """`sw.fully_shard`, each block a unit."""

    strategy: str
    prefetch: int = 1
    transaction: bool = False

    def __call__(self, work: Work) -> Trainee:
        half = torch.bfloat16
        policy = sw.MixedPrecisionPolicy(half, half) if work.bf16 else sw.MixedPrecisionPolicy()
        is_hybrid = self.strategy in {"hsdp", "hfsdp"}
        model = sw.fully_shard(
            work.make(),
            units=work.block,
            strategy=self.strategy,
            prefetch=self.prefetch,
            sharding_factor=dist.get_world_size() // 2 if is_hybrid else None,
            mp_policy=policy,
        )
        return _InTransactions(work, model) if self.transaction else Trainee(work, model)


class _InTransactions(Trainee):
    def around(self) -> AbstractContextManager[None]:
        return sw.transaction(self.model, self.optimizer)


def _ours(name: str, start: Ours, *, by_default: bool = True) -> Engine:
    return Engine(
        name=f"{OURS}-{name}",
        family=name,
        start=start,
        keeps_whole=start.strategy in {"ddp", "zero1", "zero2"},
        by_default=by_default,
        least_ranks=4 if start.strategy in {"hsdp", "hfsdp"} else 2,
    )


_ROWS = (
    Engine(BASE, "ddp", peers.start_ddp, keeps_whole=True, autocasts=True),
    Engine(
        "zero-optimizer",
        "zero-optimizer",
        peers.start_zero_optimizer,
        keeps_whole=True,
        autocasts=True,
    ),
    Engine("fsdp1", "fsdp1", peers.Fsdp1(original_parameters=False)),
    Engine("fsdp1-orig", "fsdp1", peers.Fsdp1(original_parameters=True)),
    Engine("fsdp2", "fsdp2", peers.Fsdp2()),
    Engine("fsdp2-no-reshard", "fsdp2", peers.Fsdp2(reshard=False)),
    Engine("fsdp2-async", "fsdp2", peers.Fsdp2(unshard_async=True)),
    Engine("deepspeed", "deepspeed", peers.start_deepspeed),
    _ours("ddp", Ours("ddp")),
    _ours("zero1", Ours("zero1")),
    _ours("zero2", Ours("zero2")),
    _ours("fsdp", Ours("fsdp")),
    _ours("hsdp", Ours("hsdp")),
    _ours("hfsdp", Ours("hfsdp")),
    _ours("fsdp-no-prefetch", Ours("fsdp", prefetch=0), by_default=False),
    _ours("fsdp-transaction", Ours("fsdp", transaction=True), by_default=False),
)
_ALONE = (
    Engine(ALONE, "", peers.start_alone, keeps_whole=True, autocasts=True),
    Engine(ALONE_BF16, "", peers.start_alone_bf16, keeps_whole=True),
)
ENGINES = {row.name: row for row in (*_ROWS, *_ALONE)}


def choose_engines(request: Request) -> tuple[str, ...]:
    """Names of the rows that ``request`` means; the base comes first, asked for or not.

    Raises:
        ConfigError: there is no such engine, or it cannot run here.
    """
    peers_asked = _choose("--vs", request.vs, [row for row in _ROWS if not row.is_ours], request)
    ours_asked = _choose("--ours", request.ours, [row for row in _ROWS if row.is_ours], request)
    return tuple(dict.fromkeys((BASE, *peers_asked, *ours_asked)))


def missing_peers(request: Request) -> tuple[str, ...]:
    """Peers that would have been compared, had they been installed."""
    return () if peers.has_deepspeed() or request.vs is not None else ("deepspeed",)


def _choose(
    option: str, asked: tuple[str, ...] | None, rows: Sequence[Engine], request: Request
) -> list[str]:
    if asked is None:
        runnable = [row for row in rows if row.suits(request.ranks) and row.by_default]
        return [row.name for row in runnable if row.name not in missing_peers(request)]
    families = list(dict.fromkeys(row.family for row in rows))
    choose_words(option, asked, families)
    chosen = [row for row in rows if row.family in asked]
    for row in chosen:
        if not row.suits(request.ranks):
            raise ConfigError(
                f"{option} {row.family}: needs {row.least_ranks} ranks or more, an even number of "
                f"them, got --ranks {request.ranks}"
            )
        if row.name == "deepspeed" and not peers.has_deepspeed():
            raise ConfigError(f"{option} deepspeed: is not installed; pip install deepspeed")
    return [row.name for row in chosen]
