"""Quantized numbers from their definitions, in NumPy, without a line of shardwise.

- Integers: ZeRO++ (arXiv 2306.10209), symmetric, with a scale for each block.
- Float8 e4m3: OCP 8-bit Floating Point Specification, revision 1.0, section 5.
- Dynamic numbers: Dettmers et al. (arXiv 2110.02861), section 2.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["codes_and_scales", "rounded"]

_Floats = NDArray[np.float32]
_LARGEST_INTEGER = {"int8": 127, "int4": 7}


def rounded(name: str, size: int, rows: Tensor) -> Tensor:
    """What ranks read of ``rows`` [..., n], in blocks of ``size`` that begin anew in each row."""
    flat = rows.reshape(-1, rows.shape[-1]).float().numpy()
    found = [np.concatenate(list(_read_blocks(name, size, row))) for row in flat]
    return torch.from_numpy(np.stack(found)).view(rows.shape)


def codes_and_scales(name: str, size: int, row: _Floats) -> tuple[list[int], list[np.float32]]:
    """Of each number of a row, and of each block of it."""
    found = [_quantized(name, block) for block in _blocks(size, row)]
    return [int(code) for codes, _ in found for code in codes], [scale for _, scale in found]


def _read_blocks(name: str, size: int, row: _Floats) -> Iterator[_Floats]:
    for block in _blocks(size, row):
        codes, scale = _quantized(name, block)
        # A block with an infinity or a NaN says so as a whole.
        yield _points(name)[codes] * (scale if np.isfinite(scale) else np.float32(np.nan))


def _blocks(size: int, row: _Floats) -> list[_Floats]:
    return [row[start : start + size] for start in range(0, len(row), size)]


def _quantized(name: str, block: _Floats) -> tuple[NDArray[Any], np.float32]:
    """Codes from the smallest number of a format to the largest, and the scale."""
    points = _points(name)
    scale = np.abs(block).max() / points[-1]
    with np.errstate(invalid="ignore"):
        scaled = block / (scale if scale != 0 else np.float32(1))
    above = np.searchsorted(points, scaled).clip(1, len(points) - 1)
    below = above - 1
    to_below, to_above = scaled - points[below], points[above] - scaled
    # Halfway between two, to the one whose last bit is 0.
    is_below = (to_below < to_above) | ((to_below == to_above) & _is_even(name)[below])
    return np.where(is_below, below, above), scale


@cache
def _points(name: str) -> _Floats:
    """The numbers that a format has, in order."""
    if name in _LARGEST_INTEGER:
        largest = _LARGEST_INTEGER[name]
        numbers = [float(one) for one in range(-largest, largest + 1)]
    elif name == "fp8":
        positive = [_e4m3(code) for code in range(0x7F)]  # 0x7f is NaN
        numbers = [-one for one in positive[:0:-1]] + positive
    else:
        numbers = sorted(_dynamic(is_signed=name == "dynamic"))
    return np.array(numbers, dtype=np.float32)


@cache
def _is_even(name: str) -> NDArray[np.bool_]:
    """Whether the last bit is 0: that of an integer, or of a mantissa, which alternates from 0."""
    points = _points(name)
    zero = int(np.searchsorted(points, 0.0))
    return np.array([(position - zero) % 2 == 0 for position in range(len(points))])


def _e4m3(code: int) -> float:
    """Four bits of an exponent with the bias 7, and three of a mantissa."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _dynamic(*, is_signed: bool) -> Iterator[float]:
    """A byte is [a sign,] zeros that say a power of ten, a one, and a linear fraction of 0.1 to 1.

    A fraction is the middle of its part. The codes that would end in no one are 0 and 1.
    """
    yield from (0.0, 1.0)
    num_bits = 7 if is_signed else 8
    for code in range(2 if not is_signed else 1, 1 << num_bits):
        zeros = num_bits - code.bit_length()
        num_fractions = 1 << (code.bit_length() - 1)
        fraction = (code - num_fractions + 0.5) / num_fractions
        magnitude = 10.0**-zeros * (0.1 + 0.9 * fraction)
        yield from (magnitude, -magnitude) if is_signed else (magnitude,)
