"""When replicas on the outer axis synchronize, and which units they synchronize together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.spelling import expected_one_of

__all__ = ["OUTER_DTYPES", "Outer", "partition"]

OUTER_DTYPES = ("int4", "int8", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How replicas of a model that train independently for many steps are synchronized.

    The parameters are divided into fragments. Each fragment is synchronized once in ``every``
    steps, one fragment at a time. A replica sends the difference between its parameters and their
    values after the last synchronization. An outer optimizer uses the mean of these differences as
    the gradient of the parameters that all replicas share.

    Attributes:
        every: steps between two synchronizations of a fragment.
        fragments: number of fragments, which are sets of units of about equal total sizes.
        dtype: the format in which differences are sent: ``"int4"`` or ``"int8"`` with a scale for
            each ``block`` of elements, ``"bfloat16"``, ``"float32"`` or ``"float64"``. What a
            replica loses by rounding to integers is added to its next difference of the fragment
            (error feedback).
        optimizer: creates the outer optimizer of a list of parameters; None is DiLoCo's,
            ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
        delay: steps for which the replica continues to train while differences are sent.
        mixing: the weight of a replica's own parameters when it adopts the shared ones.
        block: number of elements with one scale, for the integer formats.

    Raises:
        PlanError: an option is out of range.

    Source: Douillard et al., DiLoCo, 2023 (arXiv 2311.08105), and Streaming DiLoCo, 2025
    (arXiv 2501.18512).
    """

    every: int = 32
    fragments: int = 1
    dtype: str = "int4"
    optimizer: Callable[[list[Any]], Any] | None = None
    delay: int = 0
    mixing: float = 0.0
    block: int = 128

    def __post_init__(self) -> None:
        if self.dtype not in OUTER_DTYPES:
            raise PlanError(
                f"Outer(dtype={self.dtype!r}): {expected_one_of(OUTER_DTYPES, self.dtype)}"
            )
        ranges = {
            "every": (1, None),
            "fragments": (1, self.every),
            "delay": (0, self.every - 1),
            "block": (2, None),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least or (most is not None and value > most):
                expected = f"{least} or more" if most is None else f"{least} to {most}"
                raise PlanError(f"Outer({name}={value!r}): expected an integer, {expected}")
        if not 0 <= self.mixing < 1:
            raise PlanError(f"Outer(mixing={self.mixing}): expected a number from 0 to less than 1")

    @property
    def is_quantized(self) -> bool:
        """Whether differences are rounded to integers, with error feedback."""
        return self.dtype in ("int4", "int8")

    def sent_after(self, step: int) -> list[int]:
        """The fragments whose differences are sent after local step ``step``, counted from 1."""
        return [
            fragment
            for fragment in range(self.fragments)
            if step > 0 and (step - self._phase(fragment)) % self.every == 0
        ]

    def applied_after(self, step: int) -> list[int]:
        """The fragments that are synchronized after local step ``step``."""
        return self.sent_after(step - self.delay)

    def _phase(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


def partition(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide the indices of ``sizes`` into parts of about equal sums, none of them empty.

    Raises:
        PlanError: there are fewer sizes than parts.
    """
    used = [index for index, size in enumerate(sizes) if size]
    if len(used) < num_parts:
        raise PlanError(
            f"Outer(fragments={num_parts}): the model has {len(used)} units with trainable "
            "parameters, and a fragment is a set of units; pass units= to fully_shard, or fewer "
            "fragments"
        )
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    for index in sorted(used, key=lambda index: -sizes[index]):  # the largest first
        least = sums.index(min(sums))
        parts[least].append(index)
        sums[least] += sizes[index]
    return [sorted(part) for part in parts]
