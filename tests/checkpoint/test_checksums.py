"""Checksums of blocks do not depend on which rank wrote which part."""

import random
import zlib

import pytest
from hypothesis import given, strategies as st
from zlib_ng.zlib_ng import crc32_combine

from shardwise.checkpoint.checksums import (
    BLOCK_BYTES,
    BlockPart,
    block_sums,
    combine,
    decode_parts,
    encode_parts,
    split_at_blocks,
)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_combined_checksums_equal_that_of_all_bytes(first: bytes, second: bytes) -> None:
    middle, end = len(first), len(first) + len(second)
    parts = [
        BlockPart(0, 0, middle, zlib.crc32(first)),
        BlockPart(0, middle, end, zlib.crc32(second)),
    ]
    assert combine(parts, 0, end) == zlib.crc32(first + second)


@pytest.mark.parametrize("size", [1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 17])
def test_block_sums_do_not_depend_on_the_cuts(size: int) -> None:
    content = random.Random(size).randbytes(size)
    expected = [zlib.crc32(content[start:stop]) for start, stop in split_at_blocks(0, size)]
    for seed in range(4):
        cuts = sorted(random.Random(seed).choices(range(size + 1), k=5))
        parts = [
            BlockPart(3, start, stop, zlib.crc32(content[start:stop]))
            for begin, end in zip([0, *cuts], [*cuts, size], strict=True)
            for start, stop in split_at_blocks(begin, end)
        ]
        random.Random(seed).shuffle(parts)
        assert block_sums(decode_parts(encode_parts(parts + parts[:2])), size) == expected


def test_missing_or_contradictory_parts_have_no_sum() -> None:
    parts = [BlockPart(0, 0, 4, 1), BlockPart(0, 4, 8, 2)]
    assert combine(parts, 0, 8) == crc32_combine(1, 2, 4)
    assert combine(parts[:1], 0, 8) is None
    assert combine(parts[1:], 0, 8) is None
    assert combine([*parts, BlockPart(0, 4, 8, 3)], 0, 8) is None
    assert combine([], 0, 0) == 0


def test_an_empty_list_of_parts_is_encoded() -> None:
    assert decode_parts(encode_parts([])) == []
