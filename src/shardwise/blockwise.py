"""Block-wise quantization: numbers in 4 or 8 bits, with one scale per block.

n numbers are encoded as bytes: first a scale in single precision for each block, then the codes.
Blocks begin at the first number; the last block may be shorter::

    600 numbers in blocks of 256, int8    | 3 scales | 256 codes | 256 codes | 88 codes |
                                          |  12 B    |            600 B                 |

====================  ============================================  ===================
format                code of x; m is the largest |x| of its block  largest error
------------------------------------------------------------------  -------------------
``int8``              round(127 x / m)                              m / 254
``int4``              round(7 x / m), two in a byte                 m / 14
``fp8``               448 x / m in float8_e4m3fn                    x / 16 or m / 458752
``dynamic``           the nearest of 256 numbers in [-1, 1] to x/m  m * 0.0071
``dynamic_unsigned``  the nearest of 256 numbers in [0, 1] to x/m   m * 0.0036
====================  ============================================  ===================

Zero stays zero. A block with an infinity or a NaN becomes all NaN, so neither is lost.

Sources: the integer formats follow ZeRO++ (Wang et al., 2023, arXiv 2306.10209); the dynamic ones
8-bit Optimizers via Block-wise Quantization (Dettmers et al., 2021, arXiv 2110.02861), section 2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

__all__ = ["FORMATS", "Blocks", "dynamic_codebook"]

_SCALE_BYTES = 4
_NUMBER_BYTES = 4  # in single precision
# Elements encoded at a time. On a CPU, they fit in the processor's cache. On an accelerator, their
# float32 copies are small compared to a unit.
_PIECE, _DEVICE_PIECE = 1 << 17, 1 << 24


@dataclass(frozen=True, slots=True)
class _Format:
    bits: int
    largest: float  # the largest number of a block is scaled to this value
    to_codes: Callable[[Tensor], Tensor]  # from scaled numbers to codes, each in a uint8
    to_numbers: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A way to quantize numbers: in one of ``FORMATS``, in blocks of ``size`` numbers."""

    format: str
    size: int  # even

    def num_blocks(self, num_elements: int) -> int:
        return -(-num_elements // self.size)

    def num_bytes(self, num_elements: int) -> int:
        """The size of ``num_elements`` encoded numbers, a multiple of 4."""
        code_words = -(-num_elements * FORMATS[self.format].bits // (8 * _SCALE_BYTES))
        return _SCALE_BYTES * (self.num_blocks(num_elements) + code_words)

    def encode(self, numbers: Tensor, encoded: Tensor) -> None:
        """Encode ``numbers`` [..., n], of any floating dtype, into ``encoded`` [..., B], uint8."""
        for piece, scales, codes in self._pieces(numbers, encoded):
            quantized, found = self.quantize(piece)
            scales.copy_(found)
            codes.copy_(_packed(quantized) if self._is_packed else quantized)

    def decode(self, encoded: Tensor, numbers: Tensor) -> None:
        """Decode ``encoded`` [..., B] into ``numbers`` [..., n]."""
        for piece, scales, codes in self._pieces(numbers, encoded):
            quantized = _unpacked(codes, piece.shape[-1]) if self._is_packed else codes
            piece.copy_(self.dequantize(quantized, scales))

    def scratch_bytes(
        self, num_rows: int, num_elements: int, *, to_numbers: bool, itemsize: int, on_cpu: bool
    ) -> int:
        """The peak memory that `encode` or `decode` allocates for [num_rows, num_elements].

        Args:
            num_rows: rows of numbers.
            num_elements: numbers in a row.
            to_numbers: count for `decode` instead of `encode`.
            itemsize: bytes of a number.
            on_cpu: use the piece size of a CPU.
        """
        step = self._step(num_rows, on_cpu=on_cpu)
        is_padded = num_elements <= step and num_elements % self.size > 0
        count = num_rows * min(-(-num_elements // self.size) * self.size, step)
        if to_numbers:  # unpacked codes, and float32 numbers before and after scaling
            return (2 * _NUMBER_BYTES + self._is_packed + is_padded) * count
        is_copied = is_padded or itemsize != _NUMBER_BYTES
        is_cut = num_elements > step  # the codes of a piece live until the next piece is encoded
        scaled = _NUMBER_BYTES * (1 + is_copied) + 1 + is_cut  # with their codes
        return (scaled + _NUMBER_BYTES * (self.format != "fp8")) * count

    def quantize(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of ``numbers``, [..., n], uint8, and the scales of their blocks."""
        kind = FORMATS[self.format]
        blocks = _in_blocks(numbers.float(), self.size)
        scales = blocks.abs().amax(-1) / kind.largest
        scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
        codes = kind.to_codes(scaled.clamp_(-kind.largest, kind.largest))
        return codes.flatten(-2)[..., : numbers.shape[-1]], scales

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers, [..., n], float32, from the codes and scales of `quantize`."""
        blocks = _in_blocks(codes, self.size)
        numbers = FORMATS[self.format].to_numbers(blocks) * scales.unsqueeze(-1)
        return numbers.flatten(-2)[..., : codes.shape[-1]]

    @property
    def _is_packed(self) -> bool:
        return FORMATS[self.format].bits == 4  # noqa: PLR2004 - two in a byte

    def _step(self, num_rows: int, *, on_cpu: bool) -> int:
        """The number of elements of each row that are encoded at a time."""
        at_once = _PIECE if on_cpu else _DEVICE_PIECE
        return max(1, at_once // num_rows // self.size) * self.size

    def _pieces(self, numbers: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield views of the numbers, scales and codes of a few whole blocks at a time."""
        n = numbers.shape[-1]
        num_rows = max(1, numbers.numel() // max(1, n))
        step = self._step(num_rows, on_cpu=numbers.device.type == "cpu")
        first_code = _SCALE_BYTES * self.num_blocks(n)
        scales = encoded[..., :first_code].view(torch.float32)
        bits = FORMATS[self.format].bits
        for start in range(0, n, step):
            stop = min(start + step, n)
            blocks = slice(start // self.size, self.num_blocks(stop))
            codes = slice(first_code + start * bits // 8, first_code + -(-stop * bits // 8))
            yield numbers[..., start:stop], scales[..., blocks], encoded[..., codes]


def _in_blocks(numbers: Tensor, size: int) -> Tensor:
    """Reshape [..., n] to [..., blocks, size], padded with zeros at the end."""
    missing = -numbers.shape[-1] % size
    if missing:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    return numbers.reshape(*numbers.shape[:-1], -1, size)


def _packed(codes: Tensor) -> Tensor:
    """Pack two codes below 16 into each byte, the first one in the low bits."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpacked(packed: Tensor, num_codes: int) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :num_codes]


# -- formats -------------------------------------------------------------------------------------


def _to_integers(scaled: Tensor, zero: int) -> Tensor:
    return (scaled.round_().nan_to_num_() + zero).to(torch.uint8)


def _from_integers(codes: Tensor, zero: int) -> Tensor:
    return codes.float() - zero


def _to_dynamic(scaled: Tensor, *, signed: bool) -> Tensor:
    numbers = _codebook(scaled.device, signed=signed)
    return torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)


def _from_dynamic(codes: Tensor, *, signed: bool) -> Tensor:
    return _codebook(codes.device, signed=signed)[codes.int()]


def _codebook(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 numbers of dynamic quantization; the host does not wait for ``device``."""
    numbers = torch.tensor(dynamic_codebook(signed=signed), device="cpu")
    if device.type in ("cpu", "meta"):
        return numbers.to(device)
    pinned = torch.empty_like(numbers, pin_memory=True).copy_(numbers)
    return pinned.to(device, non_blocking=True)


@cache
def dynamic_codebook(*, signed: bool) -> tuple[float, ...]:
    """The 256 numbers of dynamic quantization, in ascending order.

    The leading zero bits of a byte give the power of ten, and a one bit ends them. The remaining
    bits are a linear fraction from 0.1 to 1; a sign takes one of them. 0 and 1 are also in the
    codebook.
    """
    numbers = [0.0, 1.0]
    for zeros in range(7):
        count = 1 << (6 - zeros if signed else 7 - zeros)  # fractions in the remaining bits
        width = 0.9 / count
        middles = [10.0**-zeros * (0.1 + width * (i + 0.5)) for i in range(count)]
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return tuple(sorted(numbers))


FORMATS = {
    "int8": _Format(8, 127.0, partial(_to_integers, zero=127), partial(_from_integers, zero=127)),
    "int4": _Format(4, 7.0, partial(_to_integers, zero=7), partial(_from_integers, zero=7)),
    "fp8": _Format(
        8,
        448.0,
        lambda scaled: scaled.to(torch.float8_e4m3fn).view(torch.uint8),
        lambda codes: codes.view(torch.float8_e4m3fn).float(),
    ),
    "dynamic": _Format(
        8, 1.0, partial(_to_dynamic, signed=True), partial(_from_dynamic, signed=True)
    ),
    "dynamic_unsigned": _Format(
        8, 1.0, partial(_to_dynamic, signed=False), partial(_from_dynamic, signed=False)
    ),
}
