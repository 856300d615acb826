"""What is sharded over the ranks and what every rank keeps whole: strategies are rows."""

from dataclasses import dataclass
from enum import StrEnum

from shardwise.errors import PlanError

__all__ = ["FSDP", "STRATEGIES", "Placement", "Strategy", "resolve_strategy"]


class Placement(StrEnum):
    """How one kind of state lies on the ranks of a mesh axis."""

    SHARD = "shard"
    REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The placement of parameters (between uses), gradients and optimizer state."""

    name: str
    parameters: Placement
    gradients: Placement
    optimizer: Placement


# Zhao et al., "PyTorch FSDP", 2023 (arXiv 2304.11277); ZeRO stage 3 (arXiv 1910.02054).
FSDP = Strategy("fsdp", Placement.SHARD, Placement.SHARD, Placement.SHARD)

STRATEGIES: dict[str, Strategy] = {"fsdp": FSDP, "zero3": FSDP, "FULL_SHARD": FSDP}


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The row that a user's word stands for.

    Raises:
        PlanError: the word is none of ``STRATEGIES``, or the row is not one that can be run.
    """
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise PlanError(f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}")
        return STRATEGIES[strategy]
    if strategy != FSDP:
        raise PlanError(f"{strategy} cannot be run yet; use one of {', '.join(STRATEGIES)}")
    return strategy
