"""C2: every model trains as in one process on the global batch, to 1e-10 in float64."""

import contextlib
import copy
import itertools
import random
from fnmatch import fnmatch
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardwise as sw
from shardwise.plan.granularity import granule_elements
from shardwise.plan.strategy import PRESETS, Strategy
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.covering import covered_first, pairwise
from tests.lossless import lossless_wires
from tests.models import CASES, LIKE_OTHERS, WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    BATCH,
    adamw,
    assert_close,
    assert_equal_models,
    assert_equal_steps,
    assert_equal_training,
    options_of,
    own_part,
    sharded_pair,
    step_all,
)

COMBINED = ("stack", "gpt", "unused and reused", "tied", "lora")


@on_ranks()
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in CASES),
        *covered_first(product(CASES, (3, 1, 4)), leave=LIKE_OTHERS),
    ],
)
def test_training_equals_one_process(name: str) -> None:
    assert_equal_training(name, steps=3)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "prefetch", "reshard", "accumulate", "set_to_none", "clip"),
    pairwise(COMBINED, (1, 0, 2, 9), (None, True, False), (1, 2, 3), (True, False), (None, 0.01)),
)
def test_loops_change_no_number(
    name: str,
    prefetch: int,
    reshard: bool | None,
    accumulate: int,
    set_to_none: bool,
    clip: float | None,
) -> None:
    loop: dict[str, Any] = {"accumulate": accumulate, "set_to_none": set_to_none, "clip": clip}
    assert_equal_training(name, prefetch=prefetch, reshard_after_forward=reshard, **loop)


def row_of(outer: int, inner: int) -> Strategy:
    """A strategy of which each axis shards nothing (0) up to everything (3)."""
    parameters, gradients, optimizer = (
        tuple("shard" if level >= needed else "replicate" for level in (outer, inner))
        for needed in (3, 2, 1)
    )
    return Strategy(parameters, gradients, optimizer)


def matrices_by_row(_name: str, shape: tuple[int, ...]) -> Any:
    return "row" if len(shape) > 1 else None


MIXED = {"*.weight": "row", "*bias": "tensor", "*": sw.block(3)}
OFFLOADS = {
    "offload": sw.CPUOffloadPolicy(),
    "copies on the device": sw.CPUOffloadPolicy(parameters=False),
    "stepped on the device": sw.CPUOffloadPolicy(step="device"),
}
WIRE = sw.Wire(gather="int8", reduce="int4", block=64)  # in a format that rounds nothing
ROWS_OF_ONES_OWN = ((0, 1), (1, 2), (2, 3), (1, 1), (2, 2), (3, 3))
# Arguments of `fully_shard`, and the numbers of ranks on which they are compared with one process.
VARIANTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ddp": ((2, 3, 4), {"strategy": "ddp"}),
    "zero1": ((3, 2), {"strategy": "zero1"}),
    "zero2": ((3,), {"strategy": "zero2"}),
    **{name: ((4,), {"strategy": name}) for name in ("hsdp", "hfsdp", "_HYBRID_SHARD_ZERO2")},
    **{
        f"levels {outer}, {inner}": ((4,), {"strategy": row_of(outer, inner), "sharding_factor": 2})
        for outer, inner in ROWS_OF_ONES_OWN
    },
    **{
        f"{name}, factor {factor}": ((4,), {"strategy": name, "sharding_factor": factor})
        for name, factor in product(("hsdp", "hfsdp"), (1, 4))
    },
    **{
        f"subgroup of {size}": ((4,), {"reshard_after_forward": size, "prefetch": size % 4})
        for size in (1, 2, 4)
    },
    "row": ((2, 3, 4), {"granularity": "row"}),
    "tensor": ((4, 2, 3), {"granularity": "tensor"}),
    "block": ((3, 2, 4), {"granularity": sw.block(2)}),
    "mixed": ((2, 3, 4), {"granularity": MIXED}),
    "matrices by row": ((3,), {"granularity": matrices_by_row}),
    "row, zero2": ((2, 3), {"granularity": "row", "strategy": "zero2"}),
    "dim": ((3, 2, 4), {"granularity": "dim"}),
    **{
        f"dim, {name}": ((2 * row.num_axes,), {"granularity": "dim", "strategy": name})
        for name, row in PRESETS.items()
        if name != "fsdp" and not row.is_two_level
    },
    "dim, subgroup": ((4,), {"granularity": "dim", "reshard_after_forward": 2}),
    "dim, kept": ((2,), {"granularity": "dim", "reshard_after_forward": False}),
    "dim, offload": ((2,), {"granularity": "dim", "offload_policy": OFFLOADS["offload"]}),
    "last dim": (
        (2,),
        {"granularity": "dim", "shard_placement_fn": lambda p: Shard(-1) if p.ndim else None},
    ),
    "dim and element": ((2,), {"granularity": {"*weight": "dim", "*": "element"}}),
    **{key: ((2,), {"offload_policy": policy}) for key, policy in OFFLOADS.items()},
    **{
        f"{key}, {name}": ((4,), {"offload_policy": OFFLOADS[key], "strategy": name})
        for name, key in zip(PRESETS, itertools.cycle(OFFLOADS), strict=False)
    },
    "offload, kept": (
        (2,),
        {"offload_policy": OFFLOADS["offload"], "reshard_after_forward": False},
    ),
    **{f"wire, {name}": ((4,), {"wire": WIRE, "strategy": name}) for name in PRESETS},
    "wire, offload": ((4,), {"wire": WIRE, "offload_policy": OFFLOADS["offload"]}),
    "wire, copies": ((4,), {"wire": WIRE, "offload_policy": OFFLOADS["copies on the device"]}),
    "wire, dim": ((4,), {"wire": WIRE, "granularity": "dim"}),
    "wire, subgroup": ((4,), {"wire": WIRE, "reshard_after_forward": 2}),
    "wire, kept": ((4,), {"wire": WIRE, "reshard_after_forward": False}),
    "wire, hosts": ((4,), {"wire": sw.Wire(gather="fp8", reduce="int8", ranks_per_host=2)}),
    "wire, feedback": ((4,), {"wire": sw.Wire(reduce="int4", error_feedback=True)}),
}
LOOPS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulate": 2, "clip": 0.01},
    {"prefetch": 0, "set_to_none": False},
)


@on_ranks()
@pytest.mark.parametrize(
    ("variant", "world_size", "name", "loop"),
    [
        ("hsdp", 4, "stack", 1),
        *((variant, 4, "tiny", 0) for variant in ("dim", "row")),  # some ranks have no elements
        ("offload", 2, "tiny", 0),
        *covered_first(
            (
                (variant, size, name, (i + j) % len(LOOPS))
                for i, (variant, (sizes, _)) in enumerate(VARIANTS.items())
                for size, (j, name) in product(sizes, enumerate(CASES))
                if size == sizes[0] or (i + j) % 4 == 0
            ),
            leave=LIKE_OTHERS,
        ),
    ],
)
def test_options_change_no_number(variant: str, name: str, loop: int) -> None:
    """And no granule of the chosen granularity is cut."""
    options = dict(VARIANTS[variant][1])
    if isinstance(options.get("strategy"), str) and "sharding_factor" not in options:
        options |= options_of(options["strategy"])
    if isinstance(options.get("granularity"), dict):  # patterns that match no parameter are refused
        names = dict(build(name).named_parameters())
        options["granularity"] = {
            pattern: granularity
            for pattern, granularity in options["granularity"].items()
            if any(fnmatch(own, pattern) for own in names)
        }
    with lossless_wires() if "wire" in options else contextlib.nullcontext():
        model = assert_equal_training(name, **{**LOOPS[loop], **options})
    for parameter_name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedTensor):
            spec = parameter.sharding.extent.parameter
            granule = granule_elements(spec.granularity, spec.shape)
            for run in filter(None, parameter.sharding.runs):
                assert run.start % granule == 0, parameter_name
                assert run.stop % granule == 0 or run.stop == parameter.numel(), parameter_name


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "adagrad", "loop"])
def test_any_optimizer_works_on_shards(kind: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        match kind:
            case "sgd":
                return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
            case "adagrad":
                # A large eps, as in `adamw`: some gradients are rounding alone, which differs by
                # processor, and Adagrad divides by their size.
                return torch.optim.Adagrad(parameters, lr=0.1, eps=1e-3)
            case _:
                foreach, fused = kind == "foreach", kind == "fused"
                return torch.optim.AdamW(
                    parameters, lr=1e-2, eps=1e-3, foreach=foreach, fused=fused
                )

    for name in ("stack", "tiny", "recurrent"):
        assert_equal_training(name, make_optimizer=make)


@on_ranks(2)
@pytest.mark.parametrize(
    "seeds", [range(1, 9), pytest.param(range(9, 26), marks=pytest.mark.thorough)], ids=str
)
def test_random_models_and_options(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        reference = RandomTree(seed).double()
        model = copy.deepcopy(reference)
        units: Any = draw.choice([Block, RandomTree, {Block, RandomTree}, 50, "auto", None])
        if units == "auto" and not any(len(list(m.inner)) > 1 for m in _trees(model)):
            units = None
        prefetch, reshard = draw.randint(0, 3), draw.choice([None, True, False])
        sw.fully_shard(model, units=units, prefetch=prefetch, reshard_after_forward=reshard)
        assert_equal_steps(model, reference, make_optimizer=adamw)


@on_ranks(2)
@pytest.mark.parametrize(
    ("units", "reshard", "order"),
    covered_first(
        (*row, order)
        for row, order in product(
            ((Block, None), (Block, True), (Block, False), (None, None)), ([0, 1], [1, 0])
        )
    ),
)
def test_two_forwards_before_two_backwards(
    units: Any, reshard: bool | None, order: list[int]
) -> None:
    reference, model = sharded_pair("stack", units=units, reshard_after_forward=reshard)
    for step in range(3):
        batches = [torch.randn(BATCH, WIDTH).double() for _ in order]
        losses = [model(own_part(batch)).square().mean() for batch in batches]
        for position in order:
            losses[position].backward()
        sum(reference(batch).square().mean() for batch in batches).backward()
        assert_equal_models(model, reference, step)
        both = sum(model(own_part(batch)).sin().mean() for batch in batches)
        both.backward()
        sum(reference(batch).sin().mean() for batch in batches).backward()
        assert_equal_models(model, reference, step)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(3)
def test_ranks_may_use_different_parameters() -> None:
    reference, model = sharded_pair(Branching(), units=Block)
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        choices = [step, None, 0]
        for part, expert in zip(batch.chunk(3), choices, strict=True):
            (reference(part, expert).square().mean() / 3).backward()
        expert = choices[torch.distributed.get_rank()]
        model(own_part(batch), expert).square().mean().backward()
        assert_equal_models(model, reference, step)
        assert model.experts[3].grad is None
        step_all(optimizers)


@on_ranks(2)
def test_ranks_may_go_around_what_a_unit_holds() -> None:
    reference = SkippingFirst().double()
    model = copy.deepcopy(reference)
    for unit in (model.first, model.last):
        sw.fully_shard(unit)
    sw.fully_shard(model)
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        choices = [step == 1, True]
        for part, skips in zip(batch.chunk(2), choices, strict=True):
            (reference(part, skips).square().mean() / 2).backward()
        model(own_part(batch), choices[torch.distributed.get_rank()]).square().mean().backward()
        assert_equal_models(model, reference, step)


@on_ranks(2)
def test_zeros_for_unused_parameters_when_asked() -> None:
    model = build("unused and reused")
    sw.fully_shard(model, units=Block, unused="zeros")
    model(torch.randn(4, WIDTH).double()).sum().backward()
    for name, parameter in model.named_parameters():
        called = name.startswith(("shared", "other"))
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()) == called, name


@on_ranks(2)
def test_forward_without_gradients_and_between() -> None:
    reference, model = sharded_pair("stack")
    for step in range(3):
        batch = torch.randn(BATCH, WIDTH).double()
        with torch.no_grad():
            assert_close(model(batch), reference(batch), "evaluation before")
        model(own_part(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        with torch.inference_mode():
            assert_close(model(batch), reference(batch), "evaluation with gradients about")
        assert_equal_models(model, reference, step)
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(0.9)
        kept_graph = model(batch)  # a graph without a backward
        assert_close(kept_graph.detach(), reference(batch).detach(), "after an update")


class RandomTree(nn.Module):
    """Random nesting, order, repetition and skipping of layers, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.inner = nn.ModuleList(
            RandomTree(seed * 7 + i) if draw.random() < 0.4 and seed < 400 else Block()
            for i in range(draw.randint(1, 3))
        )
        self.gain = nn.Parameter(torch.rand(draw.randint(1, WIDTH)).double() + 0.5)
        self.order = [draw.randrange(len(self.inner)) for _ in range(draw.randint(1, 4))]
        for parameter in self.parameters():
            parameter.requires_grad = draw.random() < 0.8
        self.gain.requires_grad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position in self.order:
            x = torch.tanh(self.inner[position](x))
        return x * self.gain.sum()


def _trees(model: nn.Module) -> list[RandomTree]:
    return [module for module in model.modules() if isinstance(module, RandomTree)]


class Branching(nn.Module):
    """The data of a rank determine which matrices of the unit it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH).double() for _ in range(4))
        self.last = Block().double()

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        if expert is not None:
            x = x @ self.experts[expert]
        y: torch.Tensor = self.last(x)
        return y


class Skipping(nn.Module):
    """Computes, or returns its input, as it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        y: torch.Tensor = x if skips else self.block(x)
        return y


class SkippingFirst(nn.Module):
    """The output of its first unit needs gradients only on ranks that do not skip it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Skipping()
        self.last = Block()

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x, skips))
        return y
