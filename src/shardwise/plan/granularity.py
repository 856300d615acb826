"""Where a parameter may be cut: anywhere, between rows, between blocks of rows, or nowhere.

With "dim", it is cut as in FSDP2: into equal chunks of a dim, one for each rank, where the last
ones may be shorter or empty. Otherwise each rank has one run of elements, which may be empty.

A *granule* is the smallest run of elements of a parameter that stays on one rank. A row is a slice
along dim 0: the weights of one output of a matrix [out, in], one expert of stacked experts
[E, m, n], one element of a vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import lcm, prod
from typing import Literal, get_args

from shardwise.errors import PlanError
from shardwise.plan.spelling import did_you_mean

__all__ = [
    "SUM_BLOCK",
    "Block",
    "Dim",
    "Granularities",
    "Granularity",
    "Granularizer",
    "WholeBlocks",
    "Word",
    "block",
    "granule_elements",
]

SUM_BLOCK = 1024  # elements of a parameter that a reproducible model sums on one rank


@dataclass(frozen=True, slots=True)
class Block:
    """Blocks of ``rows`` consecutive rows (slices along dim 0), counted from the first row."""

    rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1:
            raise PlanError(f"block({self.rows!r}): expected a number of rows, 1 or more")

    def __str__(self) -> str:
        return f"block({self.rows})"


@dataclass(frozen=True, slots=True)
class Dim:
    """Chunks of dim ``dim``, one for each rank, in the sizes of `torch.chunk`."""

    dim: int = 0

    def __str__(self) -> str:
        return "dim" if self.dim == 0 else f"dim {self.dim}"


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """Granules of ``of`` such that `SUM_BLOCK` divides the place of every cut.

    A block is a run of elements, counted from the first element of the parameter.
    """

    of: "Word | Block"

    def __str__(self) -> str:
        return f"{self.of} in blocks of {SUM_BLOCK:,} (reproducible)"


Word = Literal["element", "row", "tensor"]
Granularity = Word | Block | Dim | WholeBlocks
# What users pass for a parameter; "dim" stands for `Dim` of dim 0.
Choice = Granularity | Literal["dim"]
# For all parameters, by `fnmatch` patterns of names, or by a function (None means "element").
Granularities = Choice | Mapping[str, Choice] | Callable[[str, tuple[int, ...]], Choice | None]


def block(rows: int) -> Block:
    """The granularity that keeps ``rows`` consecutive rows together.

    A row is a slice along dim 0, one element of a 1-D parameter. The last block may be shorter.

    Raises:
        PlanError: ``rows`` is not 1 or more.
    """
    return Block(rows)


def granule_elements(granularity: Granularity, shape: Sequence[int]) -> int:
    """The number of elements in a granule of a parameter of ``shape``; at least 1."""
    match granularity:
        case "element" | Dim():
            return 1
        case "tensor":
            return max(1, prod(shape))
        case "row":
            return max(1, prod(shape[1:]))
        case Block(rows):
            return rows * max(1, prod(shape[1:]))
        case WholeBlocks(of):
            return lcm(granule_elements(of, shape), SUM_BLOCK)


class Granularizer:
    """Looks up the granularity that the user chose for each parameter."""

    def __init__(self, choice: Granularities) -> None:
        self._by_pattern: Mapping[str, Granularity] = {}
        self._by_function: Callable[[str, tuple[int, ...]], Choice | None] | None = None
        if isinstance(choice, Mapping):
            self._by_pattern = {p: _checked(g, f"[{p!r}]") for p, g in choice.items()}
        elif callable(choice):
            self._by_function = choice
        else:
            self._by_pattern = {"*": _checked(choice, "")}
        self._unmatched = dict(self._by_pattern) if isinstance(choice, Mapping) else {}

    def of(self, names: Sequence[str], shape: tuple[int, ...]) -> Granularity:
        """The granularity of a parameter; the first pattern that matches a name of it decides."""
        if self._by_function is not None:
            answer = self._by_function(names[0], shape)
            return "element" if answer is None else _checked(answer, f"({names[0]!r}, {shape})")
        fitting = [
            pattern
            for pattern in self._by_pattern
            if any(fnmatchcase(name, pattern) for name in names)
        ]
        for pattern in fitting:
            self._unmatched.pop(pattern, None)
        return self._by_pattern[fitting[0]] if fitting else "element"

    def check_all_matched(self, names: Sequence[str]) -> None:
        """Raise a PlanError if a pattern matched none of ``names``."""
        for pattern in self._unmatched:
            some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")  # noqa: PLR2004
            raise PlanError(
                f"granularity[{pattern!r}] matches no parameter; expected a name or an fnmatch "
                f"pattern, such as '*.weight'; the parameters are: {some or 'none'}"
            )


def _checked(granularity: object, where: str) -> Granularity:
    if granularity == "dim":
        return Dim()
    if isinstance(granularity, (Block, Dim)) or granularity in get_args(Word):
        return granularity  # type: ignore[return-value]
    raise PlanError(
        f"granularity{where}={granularity!r}: expected 'element', 'row', 'tensor', 'dim' or "
        f"sw.block(n){did_you_mean(granularity, [*get_args(Word), 'dim'])}"
    )
