"""The configurations that a search compares: ways to divide a model and a batch over the ranks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, get_args

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import (
    MODEL_AXES,
    Checkpointing,
    Configuration,
    Offload,
    OffloadStep,
)
from shardwise.plan.spelling import counted, divisors, expected_one_of
from shardwise.plan.strategy import PRESETS, resolve_strategy

__all__ = ["OBJECTIVES", "Degree", "Goal", "Objective", "configurations", "offloaded"]

Objective = Literal["tokens/s", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
Degree = int | Literal["auto"]

# Of equal configurations, the first is best: the one that shards the most.
_STRATEGIES = tuple(sorted(PRESETS, key=lambda name: -PRESETS[name].inner))
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "products", "full")
_MAX_MICRO_BATCH = 64
_AUTO_CHUNKS = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What to train, and the choices that a search may try, as in `sw.estimate`.

    Args:
        settings: sequence length, dtypes, optimizer and everything else that candidates share.
        objective: ``"tokens/s"`` ranks candidates by speed, ``"memory"`` by peak memory, and
            ``"cost"`` by the price of a token on all or a part of the cluster.
        tensor: "auto" tries powers of two within a node, here and for the other degrees.
        chunks: "auto" tries 1, 2 and 4.
    """

    global_batch: int
    settings: Configuration = field(default_factory=Configuration)
    objective: Objective = "tokens/s"
    tensor: Degree = 1
    pipeline: Degree = 1
    chunks: Degree = 1
    context: Degree = 1
    expert: Degree = 1
    strategies: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    checkpointing: tuple[Checkpointing, ...] = ()
    offload: tuple[Offload, ...] = ("none", "optimizer", "parameters")

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective={self.objective!r}: expected one of {', '.join(OBJECTIVES)}"
            )
        if not isinstance(self.global_batch, int) or self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch!r}: expected 1 or more sequences")
        degrees = {name: getattr(self, name) for name in (*MODEL_AXES, "chunks")}
        counts = degrees | {f"micro_batches[{n}]": one for n, one in enumerate(self.micro_batches)}
        for name, count in counts.items():
            if not (count == "auto" and name in degrees) and (
                not isinstance(count, int) or count < 1
            ):
                auto = ', or "auto"' if name in degrees else ""
                raise ConfigError(f"{name}={count!r}: expected an integer of 1 or more{auto}")
        if self.chunks != "auto" and self.chunks > 1 and self.pipeline == 1:
            raise ConfigError(f"chunks={self.chunks}: expected pipeline to be 2 or more, got 1")
        if self.settings.units is None and set(self.checkpointing) - {"none"}:
            raise ConfigError(
                f"checkpointing={', '.join(self.checkpointing)}: the model has no repeated blocks"
            )
        for kind in self.offload:
            if kind not in get_args(Offload):
                raise ConfigError(f"offload={kind!r}: {expected_one_of(get_args(Offload), kind)}")


def configurations(goal: Goal, num_ranks: int, ranks_per_node: int) -> list[Configuration]:
    """Return the configurations that divide ``num_ranks`` and the batch evenly, without offload.

    Raises:
        ConfigError: there are none. The message says which batch or degrees would work.
    """
    found = []
    reasons: dict[str, None] = {}
    wrong: dict[int, int] = {}  # micro-batches that do not divide the batch of a rank
    replicas = goal.settings.outer_replicas
    if num_ranks % replicas or goal.global_batch % replicas:
        raise ConfigError(
            f"replicas={replicas}: expected a divisor of {counted(num_ranks, 'rank')} and of "
            f"{counted(goal.global_batch, 'sequence')}"
        )
    goal = replace(goal, global_batch=goal.global_batch // replicas)
    num_ranks //= replicas
    for degrees in _degrees(goal, ranks_per_node):
        model_ranks = degrees["tensor"] * degrees["pipeline"] * degrees["context"]
        if num_ranks % model_ranks:
            reasons[_indivisible(degrees, num_ranks, model_ranks)] = None
            continue
        num_replicas = num_ranks // model_ranks
        if goal.global_batch % num_replicas:
            reasons[_batch_problem(goal, num_replicas)] = None
            continue
        if num_replicas % degrees["expert"]:
            reasons[_indivisible(degrees, num_replicas, degrees["expert"])] = None
            continue
        rank_batch = goal.global_batch // num_replicas
        wrong |= {one: rank_batch for one in goal.micro_batches if rank_batch % one}
        near = max(1, ranks_per_node // (degrees["tensor"] * degrees["context"]))
        fitting = list(_of_degrees(goal, degrees, num_replicas, near))
        found += fitting
        if fitting:
            continue
        if not list(_shardings(goal.strategies or _STRATEGIES, num_replicas, near)):
            reasons[
                f"strategy={', '.join(goal.strategies)}: expected more than "
                f"{counted(near, 'data-parallel rank')}, which are on one node; add fsdp"
            ] = None
        elif not _micro_batches(goal, rank_batch):  # if reproducible, or in ``wrong``
            reasons[
                f"reproducible={goal.settings.reproducible}: expected a divisor of the "
                f"{counted(goal.global_batch, 'sequence')} of a step, and a multiple of the "
                f"{num_replicas} data-parallel ranks"
            ] = None
        else:
            reasons[
                f"chunks={goal.chunks}: no number of micro-batches is a multiple of "
                f"pipeline={degrees['pipeline']}"
            ] = None
    _check_micro_batches(wrong, found)
    if not found:
        raise ConfigError("; ".join(reasons) or "there is no configuration to compare")
    return found


def _check_micro_batches(wrong: Mapping[int, int], found: Iterable[Configuration]) -> None:
    """Raise a ConfigError if a micro-batch divides the batch of no rank.

    Args:
        wrong: micro-batches, and a batch of a rank that each does not divide.
        found: the candidates.
    """
    tried = {one.micro_batch for one in found}
    for size, batch in wrong.items():
        if size not in tried:
            raise ConfigError(
                f"micro_batch={size}: expected a divisor of the "
                f"{counted(batch, 'sequence')} per rank: {divisors(batch)}"
            )


def _of_degrees(
    goal: Goal, degrees: dict[str, Any], num_replicas: int, near: int
) -> Iterator[Configuration]:
    """Yield candidates on ``num_replicas`` data-parallel ranks, ``near`` of which share a node."""
    rank_batch = goal.global_batch // num_replicas
    all_chunks = _AUTO_CHUNKS if goal.chunks == "auto" else (goal.chunks,)
    has_blocks = goal.settings.units is not None
    for (strategy, shard_size), micro_batch, checkpointing, chunks in product(
        _shardings(goal.strategies or _STRATEGIES, num_replicas, near),
        _micro_batches(goal, rank_batch),
        goal.checkpointing or (_CHECKPOINTING if has_blocks else ("none",)),
        all_chunks if degrees["pipeline"] > 1 else (1,),
    ):
        if chunks > 1 and rank_batch // micro_batch % degrees["pipeline"]:
            continue
        yield replace(
            goal.settings,
            **degrees,
            chunks=chunks,
            strategy=strategy,
            shard_size=shard_size,
            replicas=num_replicas // shard_size,
            micro_batch=micro_batch,
            accumulation=rank_batch // micro_batch,
            checkpointing=checkpointing,
        )


def offloaded(goal: Goal, configuration: Configuration) -> Iterator[Configuration]:
    """Yield variants of ``configuration`` with increasing amounts of offload."""
    host = [kind for kind in goal.offload if kind != "none"]
    if configuration.checkpointing == "full" and goal.offload != ("none",):
        yield replace(configuration, activation_offload=True)
    # A step on the device is faster, and takes more of its memory.
    steps: tuple[OffloadStep, ...] = ("device", "host")
    if not configuration.states.steps_units or configuration.tensor > 1:
        steps = ("host",)
    for kind, step in product(host, steps):
        yield replace(configuration, offload=kind, offload_step=step)
    if host and configuration.checkpointing == "full":
        yield replace(configuration, offload=host[-1], activation_offload=True)


def _degrees(goal: Goal, ranks_per_node: int) -> Iterator[dict[str, Any]]:
    """Yield sizes of the model's axes; "auto" tries powers of two up to the size of a node."""
    powers = [1 << power for power in range(ranks_per_node.bit_length())]
    choices = [
        powers if getattr(goal, name) == "auto" else [getattr(goal, name)] for name in MODEL_AXES
    ]
    for sizes in product(*choices):
        yield dict(zip(MODEL_AXES, sizes, strict=True))


def _shardings(
    strategies: tuple[str, ...], num_replicas: int, near: int
) -> Iterator[tuple[str, int]]:
    """Yield strategies with the size of their shard axis: 1, 4, 16, ... nodes for hybrid ones."""
    rows = {name: resolve_strategy(name) for name in strategies}
    if num_replicas == 1:  # strategies with one axis do the same on one rank
        one_axis = [name for name, row in rows.items() if row.num_axes == 1][:1]
        yield from ((name, 1) for name in one_axis)
        return
    for name, row in rows.items():
        if not row.shards:
            yield name, 1
        elif row.num_axes > 1:
            size = near
            while size < num_replicas:
                if size > 1 and num_replicas % size == 0:
                    yield name, size
                size *= 4
        else:
            yield name, num_replicas


def _micro_batches(goal: Goal, rank_batch: int) -> list[int]:
    if goal.micro_batches:
        return [size for size in goal.micro_batches if rank_batch % size == 0]
    if leaves := goal.settings.reproducible:
        size = goal.global_batch // leaves
        if size * leaves != goal.global_batch or rank_batch % size:
            return []
        return [size]
    sizes = [size for size in range(1, _MAX_MICRO_BATCH + 1) if rank_batch % size == 0]
    if any(getattr(goal, name) == "auto" for name in MODEL_AXES):  # each size is traced per degree
        return [size for size in sizes if size.bit_count() == 1 or size == rank_batch]
    return sizes


def _indivisible(degrees: dict[str, int], num_ranks: int, by: int) -> str:
    shown = ", ".join(f"{name}={size}" for name, size in degrees.items() if size > 1)
    return f"{shown}: expected a number of ranks divisible by {by}, got {num_ranks}"


def _batch_problem(goal: Goal, num_replicas: int) -> str:
    below = goal.global_batch // num_replicas * num_replicas
    multiples = " or ".join(f"{n:,}" for n in (below, below + num_replicas) if n)
    problem = (
        f"global_batch={goal.global_batch:,} does not divide evenly over "
        f"{counted(num_replicas, 'data-parallel rank')}; use {multiples}"
    )
    for degree in (2, 4, 8) if goal.tensor == 1 else ():
        if num_replicas % degree == 0 and goal.global_batch % (num_replicas // degree) == 0:
            return f"{problem}, or tensor={degree}"
    return problem
