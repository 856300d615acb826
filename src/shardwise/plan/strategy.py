"""What is sharded over the ranks and what every rank keeps whole: strategies are rows."""

from dataclasses import dataclass
from enum import StrEnum

from shardwise.errors import PlanError

__all__ = [
    "DDP",
    "FSDP",
    "HSDP",
    "HSDP_ZERO2",
    "STRATEGIES",
    "ZERO2",
    "Placement",
    "Strategy",
    "resolve_strategy",
]


class Placement(StrEnum):
    """How one kind of state lies on the ranks of a mesh axis."""

    SHARD = "shard"
    REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Strategy:
    """The placement of parameters (from forward to backward), gradients and optimizer state.

    ``replicas`` says that the shards are over one dimension of a mesh of two, and repeated over
    the other.
    """

    name: str
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    replicas: bool = False

    @property
    def shards(self) -> bool:
        """Whether ranks keep less than the whole of anything."""
        return self.optimizer is Placement.SHARD


_WHOLE, _CUT = Placement.REPLICATE, Placement.SHARD

# ZeRO, Rajbhandari et al., 2019 (arXiv 1910.02054); FSDP, Zhao et al., 2023 (arXiv 2304.11277).
DDP = Strategy("ddp", parameters=_WHOLE, gradients=_WHOLE, optimizer=_WHOLE)
ZERO2 = Strategy("zero2", parameters=_WHOLE, gradients=_CUT, optimizer=_CUT)
FSDP = Strategy("fsdp", parameters=_CUT, gradients=_CUT, optimizer=_CUT)
HSDP = Strategy("hsdp", parameters=_CUT, gradients=_CUT, optimizer=_CUT, replicas=True)
HSDP_ZERO2 = Strategy("hsdp-zero2", _WHOLE, _CUT, _CUT, replicas=True)

STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP,
    "zero2": ZERO2,
    "fsdp": FSDP,
    "zero3": FSDP,
    "hsdp": HSDP,
    "hsdp-zero2": HSDP_ZERO2,
    # FSDP1's names
    "NO_SHARD": DDP,
    "SHARD_GRAD_OP": ZERO2,
    "FULL_SHARD": FSDP,
    "HYBRID_SHARD": HSDP,
    "_HYBRID_SHARD_ZERO2": HSDP_ZERO2,
}


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The row that a user's word stands for.

    Raises:
        PlanError: the word is none of ``STRATEGIES``, or the row is not one that can be run.
    """
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise PlanError(f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}")
        return STRATEGIES[strategy]
    if strategy not in STRATEGIES.values():
        raise PlanError(f"{strategy} cannot be run yet; use one of {', '.join(STRATEGIES)}")
    return strategy
