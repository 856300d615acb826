"""A parameter as the matrices that it consists of, and their orthogonalization."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import PlanError

__all__ = ["Coefficients", "Matrices", "Product", "cost_of", "orthogonalize"]

Coefficients = tuple[float, float, float] | Sequence[tuple[float, float, float]]
_RMS_OF_ADAMW = 0.2  # of its updates, as measured by Liu et al. (Moonlight)
_ORIENTATIONS = 2


class Product(NamedTuple):
    """A product of matrices [m, k] and [k, n] in a batch."""

    shape: tuple[int, int, int, int]  # batch, m, n, k
    times: float  # in a step

    @property
    def flops(self) -> int:
        """Floating-point operations of one."""
        return 2 * prod(self.shape)


@dataclass(frozen=True)
class Matrices:
    """The matrices [out, in] that a parameter of ``shape`` is made of.

    Args:
        shape: [out, in]; [stack, out, in], such as experts; or [out, ...], of which the other dims
            are one, as in convolutions.
        split: into how many equal matrices, or matrices of which sizes, ``out`` is divided: 3 for
            fused queries, keys and values.
        transposed: the parameter is [in, out], as that of GPT-2's ``Conv1D``.
        stacked: whether the first dim is a stack; by default, in three dims.

    Raises:
        PlanError: they do not fit together.
    """

    name: str
    shape: tuple[int, ...]
    split: int | tuple[int, ...] = 1
    transposed: bool = False
    stacked: bool | None = None

    def __post_init__(self) -> None:
        if len(self.shape) < _ORIENTATIONS + self.is_stacked:
            raise PlanError(
                f"{self.name}: expected a matrix, got the shape {self.shape}; put it into a group "
                'with method="adamw", as sw.optim.parameter_groups does'
            )
        if sum(self.sizes) != self._dims[1]:
            raise PlanError(
                f"{self.name}: split={self.split} does not divide its {self._dims[1]} outputs; "
                f"expected a divisor, or sizes with that sum (shape {self.shape}, "
                f"transposed={self.transposed})"
            )

    @property
    def is_stacked(self) -> bool:
        return len(self.shape) == 3 if self.stacked is None else self.stacked  # noqa: PLR2004

    @cached_property
    def _dims(self) -> tuple[int, int, int]:
        """Stack, out and in."""
        stack = self.shape[0] if self.is_stacked else 1
        first, *rest = self.shape[self.is_stacked :]
        return (stack, prod(rest), first) if self.transposed else (stack, first, prod(rest))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The outputs of each matrix of a split."""
        if not isinstance(self.split, int):
            return tuple(self.split)
        return (self._dims[1] // max(1, self.split),) * self.split

    @cached_property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Stack, out and in of each matrix of a split."""
        stack, _, inputs = self._dims
        return tuple((stack, size, inputs) for size in self.sizes)

    @property
    def num_matrices(self) -> int:
        return sum(stack for stack, _, _ in self.shapes)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Views [stack, out, in] of a tensor of `shape`, one for each matrix of a split."""
        stack, outputs, inputs = self._dims
        if self.transposed:
            matrices = whole.reshape(stack, inputs, outputs).mT
        else:
            matrices = whole.reshape(stack, outputs, inputs)
        return list(torch.split(matrices, list(self.sizes), 1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor of `shape` of which these are the `parts`."""
        joined = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
        return (joined.mT if self.transposed else joined).reshape(self.shape)

    def map(self, function: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
        """Apply ``function`` to each of the `parts`."""
        return self.join([function(part) for part in self.parts(whole)])

    def scales(self, adjust: str | None) -> tuple[float, ...]:
        """The factor of the learning rate of each matrix of a split; see `Muon`."""
        if adjust == "match_rms_adamw":
            return tuple(_RMS_OF_ADAMW * sqrt(max(m, n)) for _, m, n in self.shapes)
        return tuple(sqrt(max(1.0, m / n)) if n else 1.0 for _, m, n in self.shapes)

    def orthogonalization(self, steps: int) -> Iterator[Product]:
        """The products of `orthogonalize`."""
        for stack, m, n in self.shapes:
            small, large = min(m, n), max(m, n)
            yield Product((stack, small, small, large), steps)
            yield Product((stack, small, small, small), steps)
            yield Product((stack, small, large, small), steps)

    def preconditioning(self, frequency: int, largest: int) -> Iterator[Product]:
        """The products of a step of `SOAP`, with sides up to ``largest``.

        A covariance and three rotations by a basis for each side; every ``frequency`` steps a power
        iteration and a QR decomposition, which takes as long as two products.
        """
        for stack, m, n in self.shapes:
            for side, other in ((m, n), (n, m)):
                if side <= largest:
                    yield Product((stack, side, other, side), 4)
                    yield Product((stack, side, side, side), 3 / frequency)


def cost_of(products: Iterable[Product]) -> int:
    """Floating-point operations."""
    return round(sum(one.times * one.flops for one in products))


def orthogonalize(matrices: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Replace the singular values of each of ``matrices`` [stack, m, n] by values near 1.

    ``steps`` iterations of Newton and Schulz, X <- a X + (b A + c A A) X with A = X X^T, of the
    smaller side, after a division by the Frobenius norm, which bounds the largest singular value by
    1. With ``coefficients`` for each step, the last ones serve all further steps.

    Source: Jordan et al., Muon, 2024 (https://kellerjordan.github.io/posts/muon/); Bernstein and
    Newhouse, 2024 (arXiv 2409.20325).
    """
    if not matrices.numel():
        return matrices
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in _of_each_step(coefficients, steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _of_each_step(coefficients: Coefficients, steps: int) -> list[tuple[float, float, float]]:
    if isinstance(coefficients[0], (int, float)):
        coefficients = [coefficients]  # type: ignore[list-item]
    return [tuple(coefficients[min(step, len(coefficients) - 1)]) for step in range(steps)]  # type: ignore[misc,arg-type]
