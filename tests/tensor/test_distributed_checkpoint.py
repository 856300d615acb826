"""Runs of a row-major tensor as boxes."""

import math

import torch
from hypothesis import given, strategies as st

from shardwise.plan.layout import Run
from shardwise.tensor.distributed_checkpoint import boxes, chunks_of


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_run_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = list(boxes(shape, start, stop))
    parts = []
    for box in found:
        part = whole
        for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, length)
        parts.append(part.reshape(-1))
    assert torch.equal(torch.cat([*parts, whole.new_empty(0)]), torch.arange(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    local = torch.arange(start, stop)
    views = [view.reshape(-1) for _, view in chunks_of(shape, Run(start, stop), local)]
    assert torch.equal(torch.cat([*views, local.new_empty(0)]), local)


def test_an_empty_tensor_has_no_boxes() -> None:
    assert list(boxes((3, 0), 0, 0)) == []
