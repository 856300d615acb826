"""Units: which modules a choice selects, and which unit owns which parameter."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.layout import Cast, ParameterExtent
from shardwise.plan.options import UnitOptions
from shardwise.plan.policies import Units, choose_units
from shardwise.plan.units import UnitPlan, plan_units
from tests.counting import num_calls
from tests.fsdp.models import Chunk


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 10)


def planned(root: nn.Module, *names: str, world_size: int = 2) -> dict[str, UnitPlan]:
    options = {name: UnitOptions(world_size=world_size) for name in ("", *names)}
    return {unit.name: unit for unit in plan_units(root, options)}


def owned(unit: UnitPlan) -> list[str]:
    return [spec.name for spec in unit.parameters]


# -- the choice --------------------------------------------------------------------------------


def test_none_is_one_unit() -> None:
    assert choose_units(Model(), None) == [""]


def test_a_class() -> None:
    assert choose_units(Model(), Block) == ["", "blocks.0", "blocks.1"]


@pytest.mark.parametrize("units", ["Block", ["Block"], {"Block", Attention}])
def test_a_class_by_its_name(units: Units) -> None:
    classes = Block if isinstance(units, (str, list)) else {Block, Attention}
    assert choose_units(Model(), units) == choose_units(Model(), classes)


def test_a_set_of_classes_in_module_order() -> None:
    attentions = ["blocks.0", "blocks.0.attention", "blocks.1", "blocks.1.attention"]
    assert choose_units(Model(), {Attention, Block}) == ["", *attentions]
    assert choose_units(Model(), [nn.Embedding, Block, nn.Linear])[:2] == ["", "embedding"]


def test_auto_is_the_repeated_blocks() -> None:
    assert choose_units(Model(), "auto") == ["", "blocks.0", "blocks.1"]


def test_auto_looks_through_nested_containers() -> None:
    root = nn.ModuleDict({"towers": nn.ModuleList([nn.ModuleList([Block(), Block()]), Block()])})
    assert choose_units(root, "auto") == ["", "towers.0.0", "towers.0.1"]


def test_auto_ignores_modules_without_parameters() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    assert choose_units(root, "auto") == ["", "0", "2"]


def test_a_size_counts_elements_outside_inner_units() -> None:
    block = sum(p.numel() for p in Block().parameters())
    assert choose_units(Model(), block) == ["", "blocks.0", "blocks.1"]
    assert choose_units(Model(), 10**6) == [""]
    # qkv has 60 elements; the 28 that are left of a block are too few for another unit
    assert choose_units(Model(), 60) == ["", "blocks.0.attention.qkv", "blocks.1.attention.qkv"]


def test_a_size_skips_containers_that_are_never_called() -> None:
    """The list holds enough, but only its children or its parent are ever called."""
    root = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 2))
    assert choose_units(root, 10) == [""]


@pytest.mark.parametrize("units", [Chunk, 10])
def test_a_list_that_is_called_is_a_unit(units: Units) -> None:
    root = nn.Sequential(Chunk(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 2))
    assert choose_units(root, units) == ["", "0"]


def test_a_size_leaves_attention_whole() -> None:
    """nn.MultiheadAttention reads ``out_proj.weight`` without calling ``out_proj``."""
    root = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert choose_units(root, 50) == ["", "1"]


def test_a_policy_is_called_as_fsdp1_does() -> None:
    calls: list[tuple[str, bool, int]] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        calls.append((type(module).__name__, recurse, nonwrapped_numel))
        return not isinstance(module, nn.LayerNorm) if recurse else isinstance(module, nn.Linear)

    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(3)), nn.LayerNorm(2))
    assert choose_units(root, policy) == ["", "0.0"]
    assert calls == [
        ("Sequential", True, 16),  # the root, which is always a unit
        ("Sequential", True, 12),
        ("Linear", True, 6),
        ("Linear", False, 6),
        ("LayerNorm", True, 6),  # not recursed into, so not a unit either
        ("Sequential", False, 6),  # without the elements of the unit inside it
        ("LayerNorm", True, 4),
    ]


def test_a_policy_may_choose_nothing() -> None:
    assert choose_units(Model(), lambda *_: False) == [""]


def test_a_module_under_two_names_is_one_unit() -> None:
    model = Model()
    model.again = model.blocks[0]
    assert choose_units(model, Block) == ["", "blocks.0", "blocks.1"]
    assert choose_units(model, 88) == ["", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([nn.Linear(2, 2)]),
        nn.ModuleDict({"a": nn.Linear(2, 2)}),
        nn.ParameterList([torch.zeros(3)]),
        nn.ParameterDict({"a": torch.zeros(3)}),
    ],
)
def test_containers_that_are_never_called_are_refused(container: nn.Module) -> None:
    root = nn.Sequential(nn.Linear(2, 2), container)
    with pytest.raises(PlanError, match=rf"forward: 1 is a {type(container).__name__};"):
        choose_units(root, type(container))


def test_nothing_matched_names_the_classes_that_hold_parameters() -> None:
    with pytest.raises(PlanError) as raised:
        choose_units(Model(), {nn.Conv2d, nn.LSTM})
    assert str(raised.value) == (
        "units={Conv2d, LSTM} matches no module of Model; choose a class by its name (shard.units "
        "in a configuration): Attention, Block, Embedding, LayerNorm, Linear, Model, ModuleList"
    )
    with pytest.raises(PlanError, match="units='auto' matches no module of Linear"):
        choose_units(nn.Linear(2, 2), "auto")
    with pytest.raises(PlanError, match="units=Conv2d matches no module of Model"):
        choose_units(Model(), nn.Conv2d)


def test_the_root_alone_may_match() -> None:
    assert choose_units(Block(), Block) == [""]
    assert choose_units(nn.Linear(2, 2), {nn.Linear}) == [""]


@pytest.mark.parametrize("units", ["blocks", True, 0, -3, set(), [3], {int}, int, 2.5])
def test_unknown_kinds_of_choices_are_refused(units: object) -> None:
    with pytest.raises(PlanError, match="units="):
        choose_units(Model(), units)  # type: ignore[arg-type]


def test_a_module_is_no_choice() -> None:
    model = Model()
    for units in (model.blocks, model.blocks[0]):
        with pytest.raises(PlanError, match=r"units: a (ModuleList|Block) is a module.*the class"):
            choose_units(model, units)


# -- the parameters of units -------------------------------------------------------------------


def test_a_unit_owns_parameters_outside_inner_units() -> None:
    units = planned(Model(1), "blocks.0", "blocks.0.attention")
    assert owned(units[""]) == ["embedding.weight", "head.weight", "head.bias"]
    assert owned(units["blocks.0"]) == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert len(units["blocks.0.attention"].parameters) == 4


def test_parents_and_enclosing() -> None:
    names = ("blocks.0", "blocks.0.attention.qkv", "blocks.1", "head")
    units = list(planned(Model(), *names).values())
    assert [unit.parent for unit in units] == [None, 0, 1, 0, 0]
    assert [unit.has_child_units for unit in units] == [True, True, False, False, False]


def test_names_with_a_common_prefix_are_not_inside_each_other() -> None:
    root = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)})
    assert [unit.parent for unit in planned(root, "a", "ab").values()] == [None, 0, 0]


def test_each_unit_has_its_own_reshard() -> None:
    wanted = {"": False, "blocks.0": True, "blocks.1": False}
    options = {name: UnitOptions(frees, world_size=2) for name, frees in wanted.items()}
    units = plan_units(Model(), options)
    assert [unit.reshard for unit in units] == [False, True, False]


def test_tied_weights_move_to_the_innermost_unit_around_both() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    units = planned(model, "embedding", "head")
    assert owned(units[""])[0] == "embedding.weight"
    assert units[""].parameters[0].names == ("embedding.weight", "head.weight")
    assert owned(units["embedding"]) == []
    assert units["embedding"].layouts == ()
    assert owned(units["head"]) == ["head.bias"]


def test_tied_inside_one_unit_stays_there() -> None:
    model = Model()
    block = model.blocks[0]
    assert isinstance(block, Block)
    block.attention.out.bias = block.norm.bias
    units = planned(model, "blocks.0", "blocks.0.attention")
    assert "blocks.0.attention.out.bias" in owned(units["blocks.0"])


def test_a_shared_module_that_is_a_unit_keeps_its_parameters() -> None:
    """At whatever depth it is used, it is the innermost unit around all its uses."""
    shared = nn.Linear(2, 2)
    root = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    units = planned(root, "a", "a.0")
    assert owned(units["a.0"]) == ["a.0.weight", "a.0.bias"]
    assert units["a.0"].parameters[0].names == ("a.0.weight", "b.weight")
    assert owned(units["a"]) == owned(units[""]) == []


def test_frozen_parameters_have_a_separate_layout() -> None:
    model = Model(1)
    model.head.weight.requires_grad_(False)
    unit = planned(model, world_size=4)[""]
    assert len(unit.layouts) == 2
    frozen = next(layout for layout in unit.layouts if layout not in unit.trainable_layouts)
    assert [extent.parameter.name for extent in frozen.extents] == ["head.weight"]
    assert unit.gathered_bytes == unit.gradient_bytes + frozen.gathered_bytes
    assert unit.shard_bytes == unit.gradient_shard_bytes + frozen.shard_bytes
    assert unit.shard_bytes * 4 == unit.gathered_bytes


def test_each_dtype_has_a_layout() -> None:
    model = Model(1)
    model.blocks.to(torch.bfloat16)
    unit = planned(model)[""]
    assert [layout.cast.compute_dtype for layout in unit.layouts] == ["float32", "bfloat16"]
    assert [layout.dtype for layout in unit.layouts] == ["float32", "float32"], "a master"
    assert [layout.gathered_bytes // layout.num_elements for layout in unit.layouts] == [4, 2]


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    assert planned(model, "blocks.0") == planned(Model(), "blocks.0")


def test_scalars_and_empty_parameters() -> None:
    root = nn.ParameterDict({"scale": torch.ones(()), "none": torch.ones(0, 3)})
    specs = {spec.name: spec for spec in planned(root)[""].parameters}
    assert specs["scale"].num_elements == 1
    assert specs["none"].num_elements == 0


def test_a_module_without_parameters() -> None:
    unit = planned(nn.ReLU())[""]
    assert (unit.layouts, unit.gathered_bytes, unit.gradient_bytes) == ((), 0, 0)


def test_labels_are_unique() -> None:
    root = nn.ModuleDict({"ModuleDict": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert [u.label for u in planned(root, "b").values()] == ["ModuleDict", "b"]
    units = planned(root, "ModuleDict", "b")
    assert [u.label for u in units.values()] == ["ModuleDict (root)", "ModuleDict", "b"]


# -- random trees ------------------------------------------------------------------------------


class Node(nn.Module):
    """Gets its parameters and children in `trees`."""


@st.composite
def trees(draw: st.DrawFn) -> tuple[nn.Module, dict[str, UnitOptions]]:
    """A module tree with parameters and modules shared at random, and units among its modules."""
    nodes = [Node() for _ in range(draw(st.integers(1, 8)))]
    for i, node in enumerate(nodes[1:], start=1):
        nodes[draw(st.integers(0, i - 1))].add_module(f"n{i}", node)
        if draw(st.integers(0, 4)) == 0:
            nodes[draw(st.integers(0, i - 1))].add_module(f"again{i}", node)
    for i in range(draw(st.integers(0, 8))):
        parameter = nn.Parameter(
            torch.empty(
                draw(st.integers(0, 5)),
                device="meta",
                dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
            ),
            requires_grad=draw(st.booleans()),
        )
        for user in draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True)):
            user.register_parameter(f"p{i}", parameter)
    names = [name for name, _ in nodes[0].named_modules()]
    return nodes[0], {
        name: UnitOptions(draw(st.booleans())) for name in names if not name or draw(st.booleans())
    }


def over(options: dict[str, UnitOptions], world_size: int) -> dict[str, UnitOptions]:
    """Return ``options`` with ``world_size`` ranks for all units."""
    return {name: replace(one, world_size=world_size) for name, one in options.items()}


def modules_on_paths_to(root: nn.Module, parameter: nn.Parameter) -> Iterator[list[nn.Module]]:
    """For every use of the parameter: the modules around it, outermost first."""

    def visit(module: nn.Module, around: list[nn.Module]) -> Iterator[list[nn.Module]]:
        path = [*around, module]
        for own in module._parameters.values():
            if own is parameter:
                yield path
        for child in module._modules.values():
            if child is not None:
                yield from visit(child, path)

    return visit(root, [])


@given(trees(), st.integers(1, 5))
def test_every_parameter_is_owned_once_by_the_innermost_unit_around_all_its_uses(
    tree: tuple[nn.Module, dict[str, UnitOptions]], world_size: int
) -> None:
    root, reshard = tree
    units = plan_units(root, over(reshard, world_size))
    owner = {spec.name: unit.name for unit in units for spec in unit.parameters}
    parameters = dict(root.named_parameters())
    assert sorted(spec.name for unit in units for spec in unit.parameters) == sorted(parameters)
    for name, parameter in parameters.items():
        paths = list(modules_on_paths_to(root, parameter))
        unit_of = {root.get_submodule(name): name for name in reshard}
        around_all = [
            unit_of[module]
            for module in paths[0]
            if module in unit_of and all(module in path for path in paths)
        ]
        assert owner[name] == around_all[-1]


@given(trees(), st.integers(1, 5))
def test_units_of_random_trees_are_well_formed(
    tree: tuple[nn.Module, dict[str, UnitOptions]], world_size: int
) -> None:
    root, reshard = tree
    units = plan_units(root, over(reshard, world_size))
    assert [unit.name for unit in units] == list(reshard)
    assert len({unit.label for unit in units}) == len(units)
    for i, unit in enumerate(units):
        assert unit.reshard == reshard[unit.name].reshard_after_forward
        assert (unit.parent is None) == (i == 0)
        assert unit.parent is None or unit.parent < i
        kinds = [_kind(layout.extents[0]) for layout in unit.layouts]
        assert len(set(kinds)) == len(kinds)
        for layout, kind in zip(unit.layouts, kinds, strict=True):
            assert {_kind(extent) for extent in layout.extents} == {kind}
            assert layout.world_size == world_size


def _kind(extent: ParameterExtent) -> tuple[str, Cast | None, bool]:
    return extent.parameter.dtype, extent.parameter.cast, extent.parameter.trainable


@given(trees(), st.sampled_from(["class", "set", "size", "auto"]), st.integers(1, 12))
def test_chosen_units_come_in_module_order(
    tree: tuple[nn.Module, dict[str, UnitOptions]], kind: str, size: int
) -> None:
    root, _ = tree
    root.add_module("list", nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)]))
    choices: dict[str, Units] = {"class": nn.LayerNorm, "set": {Node}, "size": size, "auto": "auto"}
    names = choose_units(root, choices[kind])
    order = [name for name, _ in root.named_modules()]
    assert names == [name for name in order if name in names]
    assert names[0] == ""


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("atuo", r"units='atuo'.*; did you mean 'auto'\?"),
        ("Blok", r"units='Blok'.*; did you mean 'Block'\?"),
        ({"Block", "Atention"}, r"units='Atention'.*; did you mean 'Attention'\?"),
        ("block", r"units='block'.*did you mean 'Block'"),
        ("Auto", r"units='Auto'.*did you mean 'auto'"),
        ("xyz", r"units='xyz'.*or a policy$"),
    ],
)
def test_misspelled_units_get_a_hint(units: Units, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        choose_units(Model(), units)


def test_planning_takes_linear_time() -> None:
    """Counts function calls, because time depends on the machine."""
    calls = [_calls_to_plan(num_blocks) for num_blocks in (50, 400)]
    assert calls[1] < 8.8 * calls[0], calls


def _calls_to_plan(num_blocks: int) -> int:
    root = Model(num_blocks)
    names = choose_units(root, Block)
    return num_calls(lambda: planned(root, *names[1:]))
