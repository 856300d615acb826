"""The likely cause of a wrong gradient, from how much each part of the batch contributes to it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["explain"]

_ROUNDING = 1e-6  # relative error of float64 gradients after a least-squares solve
_MAX_PIECES = 64  # pieces of a batch that a gradient is fitted with


def explain(
    found: Tensor,
    expected: Tensor,
    contributions: Callable[[int], Sequence[Tensor]],
    counts: Sequence[int],
    num_rows: int,
    dims: Mapping[str, int],
) -> str:
    """Describe the likely cause of the error in ``found``; "" if no known cause fits.

    Args:
        found: the gradient to explain.
        expected: the gradient of the reference.
        contributions: takes the number of pieces to split each part into, and returns what each
            piece adds to the expected gradient.
        counts: number of tokens of each part; 1 each where losses are means.
        num_rows: rows of each part.
        dims: sizes of the mesh's dims.
    """
    if found.is_complex():
        return ""
    weights = _fit(found, [expected])
    if weights is not None:
        return _cause_of_factor(weights[0], len(counts), dims)
    for num_pieces in range(1, min(num_rows, _MAX_PIECES // len(counts)) + 1):
        if num_rows % num_pieces:
            continue
        columns = contributions(num_pieces)
        if _fit(expected, [torch.stack([*columns]).sum(0)]) != [1.0]:
            return ""  # rows depend on each other or on random numbers
        weights = _fit(found, columns)
        if weights is not None:
            if num_pieces == 1:
                return _cause_in_parts(weights, counts)
            return _cause_in_pieces(weights, num_pieces, num_rows // num_pieces)
    return ""


def _fit(found: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Return the unique weights with which ``columns`` sum to ``found``; None if there are none."""
    matrix = torch.stack([column.detach().double().reshape(-1).cpu() for column in columns], 1)
    target = found.detach().double().reshape(-1, 1).cpu()
    solved = torch.linalg.lstsq(matrix, target, rcond=_ROUNDING, driver="gelsd")
    scale = max(float(target.norm()), float(matrix.norm()))
    if int(solved.rank) < len(columns):
        return None
    if float((matrix @ solved.solution - target).norm()) > _ROUNDING * scale:
        return None
    weights: list[float] = solved.solution.flatten().tolist()
    return [round(weight, 6) for weight in weights]


def _cause_of_factor(factor: float, num_parts: int, dims: Mapping[str, int]) -> str:
    if factor in (0.0, 1.0):
        return "" if factor else "is zero"
    found = f"is {factor:.4g} times what is expected"
    matching_dims = [name for name, size in dims.items() if _is_near(factor, size)]
    if _is_near(factor, num_parts):
        return f"{found}: a sum over the {num_parts} data-parallel ranks where a mean is expected"
    if _is_near(factor * num_parts, 1):
        return f"{found}: divided twice by the {num_parts} data-parallel ranks"
    if "ep" in matching_dims:
        return (
            f"{found}, the size of ep: divide experts' gradients by the number of all ranks whose "
            "tokens reach them, as with set_gradient_divide_factor"
        )
    if matching_dims:
        names = " and of ".join(matching_dims)
        return f"{found}, the size of {names}: a sum where a mean is expected"
    return f"{found}: a wrong divisor or a loss scale"


def _cause_in_parts(weights: Sequence[float], counts: Sequence[int]) -> str:
    """Describe the error in the reduction that gives parts these weights instead of 1 each."""
    number = len(weights)
    missing = [part for part, weight in enumerate(weights) if not weight]
    if missing:
        return (
            f"lacks part {missing[0]} of the batch: a dropped micro-batch, or a rank whose "
            "gradient was not reduced"
        )
    if all(
        _is_near(weight * count * number, sum(counts))
        for weight, count in zip(weights, counts, strict=True)
    ):
        tokens = ", ".join(map(str, counts))
        return (
            f"gives the parts of the batch equal weights, though they have {tokens} tokens: a mean "
            "over ranks where a mean over tokens is expected"
        )
    shown = ", ".join(f"{weight / number:.3g}" for weight in weights)
    return (
        f"gives the parts of the batch the weights {shown}, expected {1 / number:.3g} each: a mean "
        "over ranks where a mean over rows or tokens is expected, or the reverse"
    )


def _cause_in_pieces(weights: Sequence[float], num_pieces: int, num_rows: int) -> str:
    """Describe the error in micro-batches that gives pieces of ``num_rows`` rows these weights."""

    def place(index: int) -> str:
        part, piece = divmod(index, num_pieces)
        first, last = piece * num_rows, (piece + 1) * num_rows - 1
        return f"{f'row {first}' if first == last else f'rows {first} to {last}'} of part {part}"

    missing = [place(index) for index, weight in enumerate(weights) if not weight]
    if missing:
        return f"lacks {', '.join(missing)} of the batch: a dropped micro-batch"
    farthest = max(range(len(weights)), key=lambda index: abs(weights[index] - 1))
    return (
        f"counts {place(farthest)} of the batch {weights[farthest]:.4g} times, expected once: "
        "a micro-batch that is scaled or accumulated differently"
    )


def _is_near(number: float, expected: float) -> bool:
    return abs(number - expected) < 1e-4 * max(1.0, abs(expected))
