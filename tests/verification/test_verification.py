"""The text and table of a verification."""

import math

import pytest

import shardwise as sw
from shardwise.verification.result import Comparison, Verification, Worst

EQUAL = Comparison("fsdp", 2, 1e-10, Worst(), Worst(1e-16, "a.weight"), Worst(3e-16, "b.weight", 1))
LATE = Comparison("zero2", 2, 1e-10, Worst(), Worst(1e-16, "a.weight"), Worst(1e-3, "b.weight", 1))
MISSING = Comparison(
    "ddp", 1, 1e-10, Worst(1e-9), Worst(math.inf, "a.bias", 0, "is None"), Worst(math.inf, "b")
)


def test_equal() -> None:
    found = Verification("Stack", 2, (EQUAL,))
    assert found.ok
    assert found.explanation == ""
    found.raise_for_difference()


def test_differences_are_named() -> None:
    found = Verification("Stack", 1, (EQUAL, LATE, MISSING))
    assert not found.ok
    with pytest.raises(sw.VerificationError) as raised:
        found.raise_for_difference()
    assert isinstance(raised.value, sw.ShardwiseError)
    first, second = str(raised.value).splitlines()
    assert first == (
        "Stack with zero2 on 1 rank differs from one process: "
        "b.weight after the optimizer's step in step 1 is off by 1.0e-03 (tolerance 1e-10)"
    )
    assert second == (
        "Stack with ddp on 1 rank differs from one process: "
        "the loss in step 0 is off by 1.0e-09; the gradient of a.bias in step 0 is None; "
        "b after the optimizer's step in step 0 is off by inf (tolerance 1e-10)"
    )


def test_the_table() -> None:
    lines = Verification("Stack", 2, (EQUAL, LATE, MISSING)).table.splitlines()
    assert lines[0] == "Stack, 2 ranks against one process: relative errors"
    assert [line.split() for line in lines[1:]] == [
        ["strategy", "loss", "gradient", "update", "verdict", "worst", "parameter"],
        ["fsdp", "0", "1.0e-16", "3.0e-16", "equal", "b.weight"],
        ["zero2", "0", "1.0e-16", "1.0e-03", "DIFFERS", "b.weight"],
        ["ddp", "1.0e-09", "inf", "inf", "DIFFERS", "a.bias"],
    ]
