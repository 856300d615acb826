"""Padding is explained in numbers, and suggestions save what they state."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from benchmarks.padding import BLOCKS, GRANULARITIES, RANKS, as_specs, measure
from torch import nn

from shardwise.features.padding import explain_padding, padding_report
from shardwise.plan.granularity import Granularity, WholeBlocks
from shardwise.plan.layout import Layout, ParameterSpec, lay_out, lay_out_in_buffers
from shardwise.plan.plan import make_plan
from tests.covering import covered_first

HIDDEN, INNER = 3584, 18944


def specs(granularity: Granularity, *shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [
        ParameterSpec((f"p{i}",), shape, "float32", 4, True, granularity)
        for i, shape in enumerate(shapes)
    ]


def share(layouts: tuple[Layout, ...]) -> float:
    elements = sum(layout.parameter_elements for layout in layouts)
    return sum(layout.num_elements for layout in layouts) / elements - 1


def test_rows_that_divide_no_common_shard() -> None:
    """The least common multiple of both rows is 132,608; a shard has three times that."""
    parameters = specs("row", (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    padding = explain_padding([lay_out(parameters, 512)])
    assert padding.elements == 512 * 3 * 132608 - HIDDEN * (HIDDEN + 2 * INNER)
    assert padding.share == pytest.approx(0.3704, abs=1e-4)
    assert padding.bytes == 4 * padding.elements
    down, gate, shards = padding.reasons
    assert down.startswith("p2 [3584, 18944] by row spans 171 ranks, so the shard length is a")
    assert down.endswith("multiple of its granule, 18,944 elements")
    assert gate.startswith("p0 [3584, 3584] by row (and 1 more) spans 33 ranks")
    assert shards == "shards have 397,824 elements; 290,304 would hold the parameters"


def test_suggestions_save_what_they_state() -> None:
    parameters = specs("tensor", (256, 512), (64, 512), (512, 512), (512,))
    padding = explain_padding(lay_out_in_buffers(parameters, 16))
    shares = {one.change: one.share for one in padding.suggestions}
    assert padding.share > 1
    assert sorted(shares.values()) == list(shares.values())
    by_row = [replace(p, granularity="row") for p in parameters]
    largest = [replace(p, granularity="row") if p.name == "p2" else p for p in parameters]
    sixteen = [replace(p, names=(f"{i}.{p.name}",)) for i in range(16) for p in parameters]
    assert shares == pytest.approx(
        {
            "granularity 'row' for p2": share(lay_out_in_buffers(largest, 16)),
            "granularity 'row' for p0 and 3 more": share(lay_out_in_buffers(by_row, 16)),
            "units of 16 such modules": share(lay_out_in_buffers(sixteen, 16)),
            "strategy 'hsdp' on a mesh of (8, 2), groups of 2 ranks": share(
                lay_out_in_buffers(parameters, 2)
            ),
        }
    )


def test_reproducible_models_keep_blocks_of_norms_together() -> None:
    """What pads is named, and suggestions are those that such a model can follow."""
    parameters = specs(WholeBlocks("row"), (HIDDEN, 1000), (HIDDEN, 1001))
    padding = explain_padding(lay_out_in_buffers(parameters, 64))
    assert "p0 [3584, 1000] by row in blocks of 1,024 (reproducible) spans" in padding.reasons[0]
    finer = [replace(p, granularity=WholeBlocks("element")) for p in parameters]
    shares = {one.change: one.share for one in padding.suggestions}
    assert shares["granularity 'element' for p0 and 1 more"] == pytest.approx(
        share(lay_out_in_buffers(finer, 64))
    )


def test_suggestions_at_least_halve_the_padding() -> None:
    for shapes in [((64, 3000, 100), (500, 7)), ((7, 11), (1001,), (3,)), ((1,),)]:
        for granularity in ("row", "tensor"):
            for world_size in (2, 3, 8, 60):
                layouts = lay_out_in_buffers(specs(granularity, *shapes), world_size)
                padding = explain_padding(layouts)
                assert padding.share == pytest.approx(share(layouts))
                assert all(one.share <= padding.share / 2 for one in padding.suggestions)


def test_no_padding_has_no_reasons() -> None:
    padding = explain_padding([lay_out(specs("row", (8, 8)), 4)])
    assert (padding.elements, padding.reasons, padding.suggestions) == (0, (), ())


def test_a_parameter_without_elements() -> None:
    padding = explain_padding([lay_out(specs("row", (0, 8)), 4)])
    assert (padding.share, padding.suggestions) == (0.0, ())


@pytest.mark.parametrize(("name", "ranks"), covered_first(product(BLOCKS, RANKS)))
def test_blocks_of_real_models_are_planned_quickly(name: str, ranks: int) -> None:
    for granularity in GRANULARITIES:
        parameters = as_specs(BLOCKS[name], granularity)
        found = measure(parameters, ranks)
        assert found["seconds"] < 30.0, "usually at most 0.2"
        assert found["planned"] <= found["in_one"] <= found["common_multiple"] + 1e-6
        if granularity == "element":
            assert found["planned"] < 1e-4


def test_the_figures_of_the_documentation() -> None:
    def planned(name: str, ranks: int) -> tuple[float, float]:
        found = measure(as_specs(BLOCKS[name], "row"), ranks)
        return round(100 * found["planned"], 1), round(100 * found["in_one"], 1)

    assert planned("Llama-3-8B", 1024) == (1.9, 7.7)
    assert planned("Qwen2-7B", 512) == (0.8, 16.5)
    assert planned("Qwen2-7B", 1024) == (4.2, 16.5)
    assert planned("GPT-OSS-20B", 8) == (4.8, 12.9)
    assert planned("GPT-OSS-20B", 512) == (931.8, 931.8)


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000) for _ in range(depth))
        self.head = nn.Linear(1000, 10)


def test_equal_units_are_reported_once() -> None:
    with torch.device("meta"):
        model = Net()
    plan = make_plan(model, world_size=8, units=nn.Linear, granularity="tensor")
    report = padding_report(plan.units)
    assert report.startswith("layers.0 and 2 equal units: padding 699.2% of the parameters")
    assert report.count("padding ") == 1
    assert "layers.0.weight [1000, 1000] by tensor has granules of 1,000,000 elements" in report
    assert "reduce it by granularity 'row' for layers.0.weight: 0." in report


@pytest.mark.parametrize("granularity", ["element", "row", {"*.bias": "tensor"}])
def test_small_padding_is_not_reported(granularity: Granularity) -> None:
    with torch.device("meta"):
        model = Net()
    plan = make_plan(model, world_size=8, units=nn.Linear, granularity=granularity)
    assert not padding_report(plan.units)


def test_a_small_share_is_not_reported_regardless_of_its_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 38912, bias=False), nn.Linear(14336, 4096))
    plan = make_plan(model, world_size=512, granularity="row")
    (layout,) = plan.units[0].layouts
    assert layout.padding_elements * layout.itemsize > 1 << 20
    assert not padding_report(plan.units)
