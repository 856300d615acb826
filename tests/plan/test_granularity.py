"""Where parameters may be cut: the size of granules, and the user's choices."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.plan.granularity import Block, Granularity, block, granule_elements
from shardwise.plan.layout import ParameterSpec
from shardwise.plan.plan import make_plan


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 6)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def chosen(granularity: Any, **options: Any) -> dict[str, Granularity]:
    plan = make_plan(Model(), world_size=2, granularity=granularity, **options)
    return {spec.name: spec.granularity for unit in plan.units for spec in unit.parameters}


@pytest.mark.parametrize(
    ("granularity", "shape", "elements"),
    [
        ("element", (5, 3), 1),
        ("row", (5, 3), 3),
        ("row", (32, 6, 4), 24),
        ("row", (9,), 1),
        ("row", (), 1),
        ("row", (4, 0), 1),
        (block(4), (5, 3), 12),
        (block(4), (9,), 4),
        (block(4), (), 4),
        ("tensor", (5, 3), 15),
        ("tensor", (), 1),
        ("tensor", (0, 3), 1),
    ],
    ids=str,
)
def test_elements_of_a_granule(
    granularity: Granularity, shape: tuple[int, ...], elements: int
) -> None:
    assert granule_elements(granularity, shape) == elements


def test_one_for_all() -> None:
    assert set(chosen("row").values()) == {"row"}
    assert set(chosen(block(2)).values()) == {Block(2)}
    assert set(chosen("element").values()) == {"element"}
    assert sw.block is block


def test_the_first_pattern_that_fits_decides() -> None:
    assert chosen({"first.*": "tensor", "*.weight": "row"}) == {
        "embedding.weight": "row",
        "first.weight": "tensor",
        "first.bias": "tensor",
    }
    assert chosen({"*.weight": "row"})["first.bias"] == "element"


def test_a_pattern_may_fit_any_name_of_a_tied_parameter() -> None:
    assert chosen({"head.*": "tensor"})["embedding.weight"] == "tensor"


def test_a_function_of_name_and_shape() -> None:
    def choose(name: str, shape: tuple[int, ...]) -> Granularity | None:
        asked.append((name, shape))
        return "row" if len(shape) > 1 else None

    asked: list[tuple[str, tuple[int, ...]]] = []
    assert chosen(choose) == {
        "embedding.weight": "row",
        "first.weight": "row",
        "first.bias": "element",
    }
    assert asked == [("embedding.weight", (7, 4)), ("first.weight", (6, 4)), ("first.bias", (6,))]


def test_a_settled_granularity_is_kept() -> None:
    before = ParameterSpec(("first.bias",), (6,), "float32", 4, True, "tensor")
    found = chosen({"*": "row"}, settled={"first.bias": before})
    assert (found["first.bias"], found["first.weight"]) == ("tensor", "row")


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        (
            "rows",
            r"granularity='rows': expected 'element', 'row', 'tensor', 'dim' or sw.block\(n\)",
        ),
        (None, "granularity=None: expected"),
        (4, "granularity=4: expected"),
        ({"*": "rows"}, r"granularity\['\*'\]='rows': expected"),
        (lambda name, shape: "col", r"granularity\('embedding.weight', \(7, 4\)\)='col'"),  # noqa: ARG005
        ({"*.wait": "row"}, r"granularity\['\*.wait'\] matches no parameter.*embedding.weight"),
        ({"*": "row", "Head.weight": "row"}, r"granularity\['Head.weight'\] matches no parameter"),
    ],
)
def test_a_mistake_is_named(granularity: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        chosen(granularity)


@pytest.mark.parametrize("rows", [0, -1, 2.0, "2", True])
def test_a_block_has_a_number_of_rows(rows: Any) -> None:
    with pytest.raises(PlanError, match=rf"block\({rows!r}\): expected a number of rows"):
        block(rows)


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 5))
def test_coarser_granules_are_made_of_finer_ones(shape: list[int], rows: int) -> None:
    row, several = granule_elements("row", shape), granule_elements(block(rows), shape)
    whole = granule_elements("tensor", shape)
    assert several == rows * row
    assert whole % row == 0
    assert granule_elements("element", shape) == 1
