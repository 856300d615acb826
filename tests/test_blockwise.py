"""Block-wise quantization against its definition, and the largest error of each format."""

import pytest
import torch
from hypothesis import given, strategies as st

from shardwise.blockwise import FORMATS, Blocks, dynamic_codebook
from tests import wire_reference

SIZES = (2, 8, 64, 256)
FEW_ULPS = 1 + 1e-5
UNDERFLOW = 1e-37  # the error if the scale is subnormal


def encoded(blocks: Blocks, numbers: torch.Tensor) -> torch.Tensor:
    num_bytes = blocks.num_bytes(numbers.shape[-1])
    result = torch.full((*numbers.shape[:-1], num_bytes), 0xAB, dtype=torch.uint8)
    blocks.encode(numbers, result)
    return result


def through(blocks: Blocks, numbers: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(numbers, torch.nan)
    blocks.decode(encoded(blocks, numbers), result)
    return result


def largest_of_blocks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """For each number the largest magnitude of its block."""
    parts = [part.abs().amax().expand(len(part)) for part in torch.split(numbers, size)]
    return torch.cat(parts)


def bound(name: str, numbers: torch.Tensor, size: int) -> torch.Tensor:
    largest = largest_of_blocks(numbers, size)
    match name:
        case "int8":
            error = largest / 254
        case "int4":
            error = largest / 14
        case "fp8":
            error = torch.maximum(numbers.abs() / 16, largest / 448 / 1024)
        case "dynamic":
            error = largest * 0.9 / 128
        case _:
            error = largest * 0.9 / 256
    return error * FEW_ULPS + UNDERFLOW


@given(
    name=st.sampled_from(sorted(FORMATS)),
    size=st.sampled_from(SIZES),
    n=st.integers(1, 1100),
    exponents=st.tuples(st.integers(-45, 38), st.integers(-8, 0)),
    seed=st.integers(0, 1 << 30),
)
def test_no_error_is_larger_than_the_formats(
    name: str, size: int, n: int, exponents: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(n, generator=generator) * exponents[1]
    numbers = (torch.rand(n, generator=generator) * 2 - 1) * 10**spread * 10.0 ** exponents[0]
    if name == "dynamic_unsigned":
        numbers = numbers.abs()
    result = through(Blocks(name, size), numbers)
    assert (result - numbers).abs().le(bound(name, numbers, size)).all()
    # The result does not depend on which blocks are encoded together.
    alone = [through(Blocks(name, size), part) for part in torch.split(numbers, size)]
    assert torch.equal(result, torch.cat(alone))


ON_WIRES = ("int8", "int4", "fp8")


@given(
    name=st.sampled_from(ON_WIRES),
    size=st.sampled_from(SIZES),
    n=st.integers(1, 600),
    exponent=st.integers(-45, 38),
    zeros=st.sampled_from((0.0, 0.1, 0.99)),
    outlier=st.sampled_from((None, 1e-45, -1e-40, -3e38, torch.inf, -torch.inf, torch.nan)),
    seed=st.integers(0, 1 << 30),
)
def test_numbers_are_those_of_the_definition(
    name: str, size: int, n: int, exponent: int, zeros: float, outlier: float | None, seed: int
) -> None:
    """Also for zeros, denormals and large numbers. A non-finite number makes its block NaN."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.rand(n, generator=generator) * 2 - 1) * 10.0**exponent
    numbers[torch.rand(n, generator=generator) < zeros] = 0
    place = seed % n
    if outlier is not None:
        numbers[place] = outlier
    result = through(Blocks(name, size), numbers)
    expected = wire_reference.rounded(name, size, numbers)
    kept = largest_of_blocks(numbers, size).isfinite()
    assert torch.equal(result[kept], expected[kept])
    assert (result - numbers).abs()[kept].le(bound(name, numbers, size)[kept]).all()
    assert result[~kept].isnan().all()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_codes_are_those_of_the_definition(name: str) -> None:
    numbers = torch.randn(999, generator=torch.Generator().manual_seed(0))
    numbers = numbers.abs() if name == "dynamic_unsigned" else numbers
    codes, scales = wire_reference.codes_and_scales(name, 64, numbers.numpy())
    own, own_scales = Blocks(name, 64).quantize(numbers)
    assert own_scales.tolist() == scales
    if name == "fp8":  # codes consist of a sign, an exponent and a mantissa
        own = torch.where(own >= 0x80, 0x7E - (own.int() - 0x80), own.int() + 0x7E)
    assert own.tolist() == codes


def test_two_codes_of_four_bits_are_in_a_byte() -> None:
    numbers = torch.tensor([1.1, -2.0, 0.26, 0.0])
    packed = encoded(Blocks("int4", 4), numbers)
    assert torch.equal(packed[:4].view(torch.float32), torch.tensor([2 / 7]))
    assert packed[4:6].tolist() == [(4 + 7) | (-7 + 7) << 4, (1 + 7) | (0 + 7) << 4]


def test_the_definition_of_dynamic_numbers() -> None:
    """A code has a sign, zeros that are a power of ten, a one, and a linear fraction."""
    signed, unsigned = dynamic_codebook(signed=True), dynamic_codebook(signed=False)
    for book in (signed, unsigned):
        assert len(book) == len(set(book)) == 256
        assert {0.0, 1.0} <= set(book)
    assert signed[0] == pytest.approx(-(1 - 0.9 / 128))
    assert min(one for one in signed if one > 0) == pytest.approx(0.55e-6)
    assert min(one for one in unsigned if one > 0) == pytest.approx(1e-6 * (0.1 + 0.9 / 4))
    in_decade = [sum(10.0**-k < one <= 10.0 ** (1 - k) for one in signed) for k in range(1, 8)]
    assert in_decade == [64 + 1, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_bytes_and_rows(name: str) -> None:
    blocks = Blocks(name, 256)
    bits = FORMATS[name].bits
    assert blocks.num_bytes(256) == 4 + 32 * bits
    assert blocks.num_bytes(1001) == 4 * 4 + (1004 if bits == 8 else 504)
    rows = torch.rand(3, 1001, dtype=torch.float64)
    together = encoded(blocks, rows)
    assert all(
        torch.equal(encoded(blocks, row), one) for row, one in zip(rows, together, strict=True)
    )
    into = torch.empty(3, 1001, dtype=torch.bfloat16)
    blocks.decode(together, into)
    assert torch.equal(into, through(blocks, rows).bfloat16())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_zero_stays_and_non_finite_numbers_fill_their_block(name: str) -> None:
    blocks = Blocks(name, 8)
    numbers = torch.ones(40)
    numbers[0:8] = 0
    numbers[9], numbers[17], numbers[24] = 0, torch.nan, torch.inf
    result = through(blocks, numbers)
    assert not result[:8].any()
    assert result[9] == 0
    assert result[10] == 1
    assert not result[16:32].isfinite().any()
    assert result[32:].isfinite().all()
    assert blocks.num_bytes(0) == 0
    assert through(blocks, torch.empty(0)).shape == (0,)


def test_large_tensors_are_encoded_in_pieces() -> None:
    numbers = torch.randn(2, (1 << 17) + 1234)
    for name in ("int8", "int4"):
        result = through(Blocks(name, 256), numbers)
        alone = [
            through(Blocks(name, 256), row[i : i + 256]) for row in numbers for i in (0, 131072)
        ]
        assert torch.equal(result[:, :256], torch.stack(alone[0::2]))
        assert torch.equal(result[:, 131072:131328], torch.stack(alone[1::2]))
