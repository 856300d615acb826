"""Possible causes of a wrong gradient, from how much each part of the batch contributes to it."""

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
    """Describe the error in the gradient ``found`` and its possible causes; "" if none fits.

    ``contributions`` takes the number of pieces to split each part into, and returns what each
    piece adds to the ``expected`` gradient. ``counts`` are the tokens of each part, 1 each where
    losses are means; each has ``num_rows``.
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


def _causes(found: str, *causes: str) -> str:
    """Append the possible causes to what was found, most likely first."""
    *most, last = causes
    listed = f"{', '.join(most)}, or {last}" if most else last
    return f"{found}; possible cause{'s' * bool(most)}: {listed}"


def _cause_of_factor(factor: float, num_parts: int, dims: Mapping[str, int]) -> str:
    if factor in (0.0, 1.0):
        return "" if factor else "is zero"
    causes = []
    if _is_near(factor, num_parts):
        causes.append(f"a sum over the {num_parts} data-parallel ranks where a mean is expected")
    if _is_near(factor * num_parts, 1):
        causes += [
            f"a gradient that is divided twice by the {num_parts} data-parallel ranks",
            "one that is divided but not summed",
        ]
    matching_dims = [name for name, size in dims.items() if _is_near(factor, size)]
    if "ep" in matching_dims:
        causes.append(
            "gradients of experts that are not divided by the number of all ranks whose tokens "
            "reach them, as set_gradient_divide_factor does"
        )
    causes += [
        f"a sum over {name} where a mean is expected"
        for name in matching_dims
        if name not in ("dp", "ep") or not causes
    ]
    if factor > 1 and _is_near(factor, round(factor)):
        causes.append(
            f"losses of {round(factor)} micro-batches that are not divided by their number"
        )
    return _causes(
        f"is {factor:.4g} times what is expected", *causes, "a wrong divisor", "a loss scale"
    )


def _cause_in_parts(weights: Sequence[float], counts: Sequence[int]) -> str:
    """Describe the error in the reduction that gives parts these weights instead of 1 each."""
    number = len(weights)
    missing = [part for part, weight in enumerate(weights) if not weight]
    if missing:
        return _causes(
            f"lacks part {missing[0]} of the batch",
            "a rank whose gradient was not reduced",
            "a dropped micro-batch",
        )
    if all(
        _is_near(weight * count * number, sum(counts))
        for weight, count in zip(weights, counts, strict=True)
    ):
        tokens = ", ".join(map(str, counts))
        return _causes(
            f"gives the parts of the batch equal weights, though they have {tokens} tokens",
            "a mean over ranks where a mean over tokens is expected",
            "a loss that counts padding",
        )
    shown = ", ".join(f"{weight / number:.3g}" for weight in weights)
    return _causes(
        f"gives the parts of the batch the weights {shown}, expected {1 / number:.3g} each",
        "a mean over ranks where a mean over rows or tokens is expected",
        "the reverse",
        "a loss that is scaled differently on some ranks",
    )


def _cause_in_pieces(weights: Sequence[float], num_pieces: int, num_rows: int) -> str:
    """Describe the error in micro-batches that gives pieces of ``num_rows`` rows these weights."""

    def place(index: int) -> str:
        part, piece = divmod(index, num_pieces)
        first, last = piece * num_rows, (piece + 1) * num_rows - 1
        return f"{f'row {first}' if first == last else f'rows {first} to {last}'} of part {part}"

    missing = [place(index) for index, weight in enumerate(weights) if not weight]
    if missing:
        return _causes(
            f"lacks {', '.join(missing)} of the batch",
            "a dropped micro-batch",
            "gradients that were reset or overwritten between micro-batches",
            "rows that the loss leaves out",
        )
    farthest = max(range(len(weights)), key=lambda index: abs(weights[index] - 1))
    return _causes(
        f"counts {place(farthest)} of the batch {weights[farthest]:.4g} times, expected once",
        "a micro-batch that is scaled differently",
        "one that is accumulated more than once",
        "weights in the loss",
    )


def _is_near(number: float, expected: float) -> bool:
    return abs(number - expected) < 1e-4 * max(1.0, abs(expected))
