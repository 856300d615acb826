"""Checksums of blocks do not depend on who wrote which part."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zlib_ng.zlib_ng import crc32_combine

from shardwise.checkpoint.crc import (
    BLOCK_BYTES,
    Part,
    block_sums,
    blocks,
    decode,
    encode,
    join,
)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_combined_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    middle, end = len(first), len(first) + len(second)
    parts = [Part(0, 0, middle, zlib.crc32(first)), Part(0, middle, end, zlib.crc32(second))]
    assert join(parts, 0, end) == zlib.crc32(first + second)


@pytest.mark.parametrize("size", [1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 17])
def test_any_cuts_give_the_same_sums(size: int) -> None:
    content = random.Random(size).randbytes(size)
    expected = [zlib.crc32(content[start:stop]) for start, stop in blocks(0, size)]
    for seed in range(4):
        cuts = sorted(random.Random(seed).choices(range(size + 1), k=5))
        parts = [
            Part(3, start, stop, zlib.crc32(content[start:stop]))
            for begin, end in zip([0, *cuts], [*cuts, size], strict=True)
            for start, stop in blocks(begin, end)
        ]
        random.Random(seed).shuffle(parts)
        assert block_sums(decode(encode(parts + parts[:2])), size) == expected


def test_what_is_missing_or_disputed_has_no_sum() -> None:
    parts = [Part(0, 0, 4, 1), Part(0, 4, 8, 2)]
    assert join(parts, 0, 8) == crc32_combine(1, 2, 4)
    assert join(parts[:1], 0, 8) is None
    assert join(parts[1:], 0, 8) is None
    assert join([*parts, Part(0, 4, 8, 3)], 0, 8) is None
    assert join([], 0, 0) == 0


def test_no_parts_travel_too() -> None:
    assert decode(encode([])) == []
