"""Quantization of the parameters and gradients that travel between ranks."""

from dataclasses import dataclass

from shardwise.blockwise import Blocks
from shardwise.errors import PlanError
from shardwise.plan.spelling import did_you_mean

__all__ = ["UNQUANTIZED", "Wire"]

_FORMATS = ("int8", "int4", "fp8")
_QUANTIZED = ("float32", "bfloat16", "float16", "float64")  # other dtypes are sent unchanged


@dataclass(frozen=True)
class Wire:
    """The formats in which parameters and gradients travel between ranks.

    Numbers are quantized in blocks, each with a float32 scale: with blocks of 256, a number takes
    1.016 bytes in int8 and 0.516 in int4, instead of 4 in float32. All ranks decode the same
    bytes, so replicas stay bitwise equal. Shards are never rounded.

    Args:
        gather: format of gathered parameters: ``"int8"``, ``"int4"`` or ``"fp8"`` (e4m3); None
            keeps their dtype. Gathers within a subgroup do not quantize a second time.
        reduce: format of reduced gradients, from the same list. Sums are computed in float32.
        block: number of elements in a block; even.
        ranks_per_host: add the gradients of this many neighboring ranks first, and send the sums,
            quantized again, to the other hosts. None adds those of all ranks at once. A strategy
            over two axes always adds over the inner one first.
        error_feedback: keep the rounding errors of a rank's gradients, and add them to the
            gradients of the next step. The errors take the memory of whole gradients on each rank,
            are not saved in checkpoints, and are dropped after a step that raised.

    Raises:
        PlanError: a format is unknown, or a number is out of range.

    Source: ZeRO++, Wang et al., 2023 (arXiv 2306.10209).
    """

    gather: str | None = None
    reduce: str | None = None
    block: int = 256
    ranks_per_host: int | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for what in ("gather", "reduce"):
            given = getattr(self, what)
            if given is not None and given not in _FORMATS:
                raise PlanError(
                    f"Wire({what}={given!r}): expected one of {', '.join(_FORMATS)}, or None"
                    f"{did_you_mean(given, _FORMATS)}"
                )
        if not _is_count(self.block) or self.block % 2:
            raise PlanError(f"Wire(block={self.block!r}): expected an even number of elements")
        if self.ranks_per_host is not None and not _is_count(self.ranks_per_host):
            raise PlanError(
                f"Wire(ranks_per_host={self.ranks_per_host!r}): expected a number of ranks, or None"
            )
        for option in ("ranks_per_host", "error_feedback"):
            if getattr(self, option) and self.reduce is None:
                raise PlanError(
                    f"Wire({option}={getattr(self, option)!r}): expected a format to reduce in, "
                    'as in Wire(reduce="int4")'
                )

    def check_hosts(self, unit: str, num_ranks: int) -> None:
        """Raise a PlanError if hosts would have different numbers of the ``num_ranks`` ranks."""
        near = self.ranks_per_host
        if near is not None and near < num_ranks and num_ranks % near:
            raise PlanError(
                f"{unit}: Wire(ranks_per_host={near}): expected a number that divides the "
                f"{num_ranks} ranks that add up gradients"
            )

    def blocks(self, name: str | None, dtype: str) -> Blocks | None:
        """The quantization of ``dtype`` in a format; None if numbers are sent unchanged."""
        return Blocks(name, self.block) if name is not None and dtype in _QUANTIZED else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


UNQUANTIZED = Wire()
