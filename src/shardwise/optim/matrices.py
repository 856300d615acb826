"""The matrices that a parameter consists of, and their orthogonalization."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import PlanError

__all__ = ["Coefficients", "Matrices", "Product", "cost_of", "orthogonalize"]

Coefficients = tuple[float, float, float] | Sequence[tuple[float, float, float]]
_ADAMW_RMS = 0.2  # root mean square of AdamW's updates, measured by Liu et al. (Moonlight)


class Product(NamedTuple):
    """A batched product of matrices [m, k] and [k, n]."""

    shape: tuple[int, int, int, int]  # batch, m, n, k
    times: float  # how often a step computes it, on average

    @property
    def flops(self) -> int:
        return 2 * prod(self.shape)


@dataclass(frozen=True)
class Matrices:
    """The matrices [out, in] of a parameter; the options, those of `Muon`, must fit its shape.

    Its shape is [out, in]; [stack, out, in], such as experts; or [out, ...], where the other dims
    are flattened into one, as in convolutions.
    """

    name: str
    shape: tuple[int, ...]
    split: int | tuple[int, ...] = 1
    transposed: bool = False
    stacked: bool | None = None  # None: if there are three dims

    def __post_init__(self) -> None:
        if len(self.shape) < 2 + self.is_stacked:
            raise PlanError(
                f"{self.name}: expected a matrix, got shape {self.shape}; put it into a group "
                'with method="adamw", as sw.optim.parameter_groups does'
            )
        if sum(self.sizes) != self._dims[1]:
            raise PlanError(
                f"{self.name}: split={self.split} does not divide its {self._dims[1]} outputs; "
                f"expected a divisor of that number, or sizes with that sum (shape {self.shape}, "
                f"transposed={self.transposed})"
            )

    @property
    def is_stacked(self) -> bool:
        return len(self.shape) == 3 if self.stacked is None else self.stacked  # noqa: PLR2004

    @cached_property
    def _dims(self) -> tuple[int, int, int]:
        """The sizes of the stack, out and in."""
        stack = self.shape[0] if self.is_stacked else 1
        first, *rest = self.shape[self.is_stacked :]
        return (stack, prod(rest), first) if self.transposed else (stack, first, prod(rest))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of outputs of each matrix of the split."""
        if not isinstance(self.split, int):
            return tuple(self.split)
        return (self._dims[1] // max(1, self.split),) * self.split

    @cached_property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """[stack, out, in] for each matrix of the split."""
        stack, _, inputs = self._dims
        return tuple((stack, size, inputs) for size in self.sizes)

    @property
    def num_matrices(self) -> int:
        return sum(stack for stack, _, _ in self.shapes)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Split ``whole``, a tensor of `shape`, into views [stack, out, in]."""
        stack, outputs, inputs = self._dims
        if self.transposed:
            matrices = whole.reshape(stack, inputs, outputs).mT
        else:
            matrices = whole.reshape(stack, outputs, inputs)
        return list(torch.split(matrices, list(self.sizes), 1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join ``parts`` into a tensor of `shape`; the inverse of `parts`."""
        joined = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
        return (joined.mT if self.transposed else joined).reshape(self.shape)

    def scales(self, adjust: str | None) -> tuple[float, ...]:
        """The learning rate factor of each matrix of the split; see ``adjust_lr_fn`` of `Muon`."""
        if adjust == "match_rms_adamw":
            return tuple(_ADAMW_RMS * sqrt(max(m, n)) for _, m, n in self.shapes)
        return tuple(sqrt(max(1.0, m / n)) if n else 1.0 for _, m, n in self.shapes)

    def orthogonalization(self, steps: int) -> Iterator[Product]:
        for stack, m, n in self.shapes:
            small, large = min(m, n), max(m, n)
            yield Product((stack, small, small, large), steps)
            yield Product((stack, small, small, small), steps)
            yield Product((stack, small, large, small), steps)

    def preconditioning(self, frequency: int, largest: int) -> Iterator[Product]:
        """The products that a step of `SOAP` computes for sides up to ``largest``.

        For each side: a covariance and three rotations, and every ``frequency`` steps a power
        iteration and a QR decomposition, which takes as long as two products.
        """
        for stack, m, n in self.shapes:
            for side, other in ((m, n), (n, m)):
                if side <= largest:
                    yield Product((stack, side, other, side), 4)
                    yield Product((stack, side, side, side), 3 / frequency)


def cost_of(products: Iterable[Product]) -> int:
    return round(sum(product.times * product.flops for product in products))


def orthogonalize(matrices: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Replace the singular values of each of ``matrices`` [stack, m, n] by values near 1.

    Divides by the Frobenius norm, which bounds the largest singular value by 1, and runs ``steps``
    Newton-Schulz iterations X <- a X + (b A + c A A) X with A = X X^T over the smaller side.
    ``coefficients`` is (a, b, c), or one triple per step; steps beyond the last triple use it.

    Source: Jordan et al., Muon, 2024 (https://kellerjordan.github.io/posts/muon/); Bernstein and
    Newhouse, 2024 (arXiv 2409.20325).
    """
    if not matrices.numel():
        return matrices
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in _coefficients_by_step(coefficients, steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _coefficients_by_step(
    coefficients: Coefficients, steps: int
) -> list[tuple[float, float, float]]:
    if isinstance(coefficients[0], (int, float)):
        coefficients = [coefficients]  # type: ignore[list-item]
    return [tuple(coefficients[min(step, len(coefficients) - 1)]) for step in range(steps)]  # type: ignore[misc,arg-type]
