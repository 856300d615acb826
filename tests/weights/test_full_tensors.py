"""`sw.full_tensors`: the tensors that `sw.save` writes, in bounded memory."""

import contextlib
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CheckpointError, PlanError, RanksDiverged, StepError
from shardwise.plan.strategy import PRESETS
from tests.covering import covered_first
from tests.models import Stack, build
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, comm_of, full, options_of
from tests.weights.common import adapted, assert_same, experts, saved, tensor_parallel
from tests.weights.live_bytes import live_bytes
from tests.weights.memory_target import MemoryTarget

GRANULARITIES = ("element", "row", "tensor", "dim")
OFFLOADS: tuple[dict[str, Any], ...] = ({}, {"offload_policy": sw.CPUOffloadPolicy()})


def check(model: nn.Module, folder: Path, **options: Any) -> None:
    """The tensors equal those of a checkpoint, on all ranks and on one of them."""
    expected = saved(model, folder)
    assert_same(dict(sw.full_tensors(model, **options)), expected)
    last = dist.get_world_size() - 1
    received = dict(sw.full_tensors(model, to=last, **options))
    assert_same(received, expected if dist.get_rank() == last else {})


@on_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "granularity", "name", "offload"),
    covered_first(
        product(PRESETS, GRANULARITIES, ("gpt", "lora", "mixed dtypes", "conv", "tiny"), OFFLOADS)
    ),
)
def test_they_are_what_a_checkpoint_contains(
    strategy: str, granularity: str, name: str, offload: dict[str, Any], tmp_path: Path
) -> None:
    if granularity == "dim" and strategy == "hfsdp":
        granularity = "element"  # "dim" is refused
    model = build(name)
    options = options_of(strategy) | {"granularity": granularity} | offload
    sw.fully_shard(model, units="auto", **options)
    check(model, tmp_path, bucket_bytes=1000)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_any_bucket_on_any_number_of_ranks(bucket_bytes: int, tmp_path: Path) -> None:
    model = build("gpt")
    sw.fully_shard(model, units="auto")
    check(model, tmp_path, bucket_bytes=bucket_bytes)


@on_ranks(4)
def test_parts_of_other_parallelism_are_joined(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(tensor_parallel("ddp"), tmp_path / "ddp", bucket_bytes=700)
    torch.manual_seed(0)
    whole = torch.randn(4, 3, 5)
    torch.manual_seed(0)
    model = experts()
    check(model, tmp_path / "experts")
    assert torch.equal(dict(sw.full_tensors(model))["experts.weight"], whole)


@on_ranks(2)
def test_buffers_are_those_of_the_first_rank(tmp_path: Path) -> None:
    model = build("conv")
    sw.fully_shard(model, units="auto")
    model.get_buffer("mean").fill_(dist.get_rank() + 1)
    check(model, tmp_path)
    assert dict(sw.full_tensors(model))["mean"] == 1


@on_ranks(2)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_they_are_cast_before_they_are_sent(granularity: Any) -> None:
    model, plain = build("gpt"), build("gpt")
    model.register_buffer("count", torch.tensor(3))
    sw.fully_shard(model, units="auto", granularity=granularity)
    found = dict(sw.full_tensors(model, dtype=torch.bfloat16, bucket_bytes=500))
    assert found.pop("count").dtype is torch.int64
    for name, tensor in found.items():
        assert torch.equal(tensor, plain.get_parameter(name).detach().bfloat16()), name


@on_ranks(2)
def test_names_select(tmp_path: Path) -> None:
    model = build("gpt")
    sw.fully_shard(model, units="auto")
    every = saved(model, tmp_path)
    patterns = ["embedding.*", "layers.1.*weight"]
    found = dict(sw.full_tensors(model, names=patterns))
    wanted = {
        "embedding.weight",
        *(n for n in every if n.startswith("layers.1.") and n.endswith("weight")),
    }
    assert_same(found, {name: every[name] for name in wanted})
    for names in (["missing"], ["embedding.*", "missing"]):
        with pytest.raises(PlanError, match="no tensor has the name 'missing'"):
            sw.full_tensors(model, names=names)
    with pytest.raises(PlanError, match="expected a list of patterns"):
        sw.full_tensors(model, names="embedding.*")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lora_bias": True}, "only plain LoRA of linear layers"),
        ({"modules_to_save": ["layers.1.down"]}, "only plain LoRA of linear layers"),
        ({}, "has been added to it already"),
    ],
)
def test_what_cannot_be_merged_is_refused(options: dict[str, Any], error: str) -> None:
    model = adapted(**options)
    if not options:
        model.merge_adapter()
    with pytest.raises(PlanError, match=error):
        sw.full_tensors(model, adapters="merged")


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"modules_to_save": ["layers.1.down"]}])
def test_adapters_alone_are_those_of_peft(options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(**options)
    model.add_adapter("other", model.peft_config["default"])
    expected = peft.get_peft_model_state_dict(model)
    found = dict(sw.full_tensors(model, adapters="alone"))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_trained_tensors_are_not_left_out() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(PlanError, match=r"first\.bias: .*leave out this trained tensor"):
        sw.full_tensors(adapted(bias="all"), adapters="alone")
    config = peft.IA3Config(target_modules=["up"], feedforward_modules=[])
    model = peft.get_peft_model(build("stack").float(), config)
    for adapters in ("alone", "merged"):
        with pytest.raises(PlanError, match=r"only .*LoRA"):
            sw.full_tensors(model, adapters=adapters)


class Packed(nn.Parameter):
    """Like bitsandbytes' 4-bit weights: two codes per byte, with what dequantizes them."""

    quant_state: Any


def pack(layer: Any, scale: float) -> Tensor:
    """Replace the weight of ``layer`` by codes, and return the values that they stand for."""
    shape = layer.weight.shape
    codes = torch.randint(16, shape, dtype=torch.uint8)
    layer.weight = Packed(codes.view(-1, 2) @ torch.tensor([[16], [1]], dtype=torch.uint8), False)
    layer.weight.quant_state = SimpleNamespace(shape=shape, dtype=torch.bfloat16, scale=scale)
    # bitsandbytes has scales in the state dict, too.
    layer.register_state_dict_post_hook(
        lambda _, found, prefix, __: found.update({f"{prefix}weight.absmax": torch.tensor(scale)})
    )
    return (codes.float() * scale).bfloat16()


def unpack(packed: Tensor, state: Any) -> Tensor:
    codes = torch.cat([packed // 16, packed % 16], 1).view(state.shape)
    values: Tensor = codes.float() * state.scale
    return values.bfloat16()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_packed_weights_are_dequantized_with_merged_adapters(dtype: torch.dtype | None) -> None:
    model = adapted(lora_alpha=6)
    layer = model.get_base_model().layers[0]
    values = {
        "layers.0.up.weight": pack(layer.up.base_layer, 0.37),
        "layers.0.down.weight": pack(layer.down, 0.21),
    }
    low, high = (getattr(layer.up, f"lora_{x}")["default"].weight.detach().clone() for x in "AB")
    values["layers.0.up.weight"] = values["layers.0.up.weight"] + (high @ low) * 3.0  # in float32
    sw.fully_shard(model, units="auto")
    functional = SimpleNamespace(dequantize_4bit=unpack)
    target = MemoryTarget()
    with mock.patch.dict(sys.modules, {"bitsandbytes.functional": functional}):
        found = dict(sw.full_tensors(model, adapters="merged", dtype=dtype, bucket_bytes=500))
        for _ in range(2):
            sw.publish(model, target, adapters="merged", dtype=dtype)
    assert found.keys() == dict(Stack().named_parameters()).keys()
    assert_same({n: found[n] for n in values}, {n: x.bfloat16() for n, x in values.items()})
    if dist.get_rank() == 0:
        assert_same(target.tensors, found)
        assert target.num_bytes == 0
        infos = {name: (info.dtype, info.shape) for name, info in target.manifest.tensors.items()}
        assert infos == {name: (x.dtype, tuple(x.shape)) for name, x in found.items()}


@on_ranks(2)
def test_codes_are_not_cast() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = Packed(torch.randn(2, 1), requires_grad=False)
    model.weight.quant_state = SimpleNamespace(shape=torch.Size([4, 4]), dtype=torch.bfloat16)
    expected = {"weight": model.weight.detach().clone(), "weight.absmax": torch.tensor([0.1])}
    # As bitsandbytes adds the scales to a state dict.
    model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
        lambda _, found, prefix, __: found.update({f"{prefix}weight.absmax": torch.tensor([0.1])})
    )
    sw.fully_shard(model)
    assert_same(dict(sw.full_tensors(model, dtype=torch.bfloat16)), expected)


@on_ranks(2)
def test_tied_names_where_adapters_are_merged() -> None:
    model: Any = nn.Module()  # as peft has it
    model.active_adapters = ["default"]
    model.base_model = nn.Module()
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model.base_model.model = nn.Sequential(first, second)
    expected = {"0.weight": first.weight.detach().clone()}
    sw.fully_shard(model)
    assert_same(dict(sw.full_tensors(model, names=["1.weight"], adapters="merged")), expected)


@on_ranks(2)
def test_tied_numbers_and_empty_tensors() -> None:
    model: Any = nn.Module()
    model.first, model.second = nn.Linear(3, 3), nn.Linear(3, 3)
    model.second.weight = model.first.weight
    model.scale, model.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
    model.register_buffer("flags", torch.tensor([True, False]))
    expected = {name: x.detach().clone() for name, x in model.state_dict().items()}
    expected.pop("second.weight")
    sw.fully_shard(model, units=nn.Linear)
    assert_same(dict(sw.full_tensors(model)), expected)
    for names, wanted in (
        (["second.*"], {"first.weight", "second.bias"}),
        (["second.weight"], {"first.weight"}),
        (["scale", "none"], {"scale", "none"}),
        ([], set()),
    ):
        found = dict(sw.full_tensors(model, names=names, bucket_bytes=1))
        assert_same(found, {name: expected[name] for name in wanted})
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(PlanError, match="expected a floating-point dtype"):
            sw.full_tensors(model, dtype=dtype)  # type: ignore[arg-type]


@on_ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks() -> None:
    model = build("gpt")
    sw.fully_shard(model, units="auto")
    with pytest.raises(PlanError, match="to=5: expected 'all' or one of the model's ranks"):
        sw.full_tensors(model, to=5)
    with pytest.raises(PlanError, match="one active adapter"):
        sw.full_tensors(model, adapters="merged")
    with pytest.raises(CheckpointError, match=r"but rank [01] is not"):
        sw.full_tensors(model, bucket_bytes=1000 + dist.get_rank())
    with sw.gathered(model), pytest.raises(CheckpointError, match="is gathered"):
        sw.full_tensors(model)
    assert dict(sw.full_tensors(model))


@on_ranks(2)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_they_may_be_gathered_in_inference_mode(granularity: Any) -> None:
    model = build("gpt")
    sw.fully_shard(model, units="auto", granularity=granularity)
    expected = dict(sw.full_tensors(model))
    with torch.inference_mode():
        assert_same(dict(sw.full_tensors(model, bucket_bytes=500)), expected)


def test_a_model_that_is_not_sharded() -> None:
    model = build("gpt")
    found = dict(sw.full_tensors(model))
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(found, expected)
    name, tensor = next(iter(found.items()))
    tensor.zero_()  # it is the caller's
    assert model.get_parameter(name).any()


# -- memory --------------------------------------------------------------------------------------


@on_ranks()
@pytest.mark.parametrize(
    ("granularity", "to", "world_size"),
    covered_first(product(GRANULARITIES, ("all", 1), (2, 4))),
)
def test_at_most_two_buckets_are_in_memory(granularity: Any, to: Any) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))).double()
    num_bytes = sum(p.nbytes for p in model.parameters())
    sw.fully_shard(model, units=nn.Linear, granularity=granularity)
    bucket_bytes = num_bytes // 10
    receives = to in ("all", dist.get_rank())
    with live_bytes() as live:
        for _name, tensor in sw.full_tensors(model, bucket_bytes=bucket_bytes, to=to):
            last = tensor  # noqa: F841 - as in any loop, it is alive when the next one comes
    assert live.peak <= 2 * bucket_bytes
    if not receives:
        assert live.peak <= bucket_bytes  # its part of one bucket, and a byte per rank
    else:
        assert live.peak > bucket_bytes, "the next bucket is gathered while this one is used"


@on_ranks(2)
def test_at_most_two_of_the_largest_tensor_are_in_memory() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).double()
    sw.fully_shard(model, units=nn.Linear)
    with live_bytes() as live:
        for _name, tensor in sw.full_tensors(model, bucket_bytes=64 * 64 * 8):
            last = tensor  # noqa: F841
    assert live.peak <= 2 * 64 * 64 * 8 + 1024


@on_ranks(2)
def test_the_next_bucket_is_gathered_while_one_is_used() -> None:
    model = build("stack")
    sw.fully_shard(model, units="auto")
    stream = sw.full_tensors(model, bucket_bytes=600)
    next(stream)
    queue = comm_of(model).gather
    before = queue._issued
    next(stream)
    assert queue._issued - before in (0, 2)  # flags and one exchange, launched ahead of their use
    stream.close()


# -- loops that end early ------------------------------------------------------------------------


def train(model: Stack) -> None:
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Stopped(Exception):  # noqa: N818
    """Raised in a loop."""


@on_ranks()
@pytest.mark.parametrize(
    ("stopping", "to", "raises", "world_size"),
    covered_first(
        product(("all", "first", "last", "each elsewhere"), ("all", 0), (True, False), (2, 3)),
        strength=2,
    ),
)
def test_a_loop_may_end_early_on_any_rank(stopping: str, to: Any, *, raises: bool) -> None:
    model, rank = build("stack"), dist.get_rank()
    sw.fully_shard(model, units="auto")
    train(model)
    stops = {"all": True, "first": rank == 0, "last": rank > 0, "each elsewhere": True}[stopping]
    after = 2 + 3 * rank if stopping == "each elsewhere" else 2
    seen = {}
    try:
        for number, (name, tensor) in enumerate(sw.full_tensors(model, bucket_bytes=300, to=to)):
            seen[name] = tensor
            if stops and number == after:
                if raises:
                    raise Stopped  # noqa: TRY301 - where programs raise
                break
    except Stopped:
        assert raises
    whole = {name: full(p) for name, p in model.named_parameters()}
    for name, tensor in seen.items():
        assert torch.equal(tensor, whole[name]), name
    if not stops and to == "all":
        assert len(seen) == len(whole)
    train(model)
    assert len(dict(sw.full_tensors(model))) == len(whole)


@on_ranks(2)
def test_all_ranks_that_stop_gather_little_more() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30))).double()
    sw.fully_shard(model, units=nn.Linear)
    queue = comm_of(model).gather
    before = queue._issued
    for _ in sw.full_tensors(model, bucket_bytes=900):
        break
    assert 0 < queue._issued - before <= 9  # three buckets of flags and up to two exchanges


@on_ranks(2)
def test_an_iterator_that_is_dropped_leaves_no_trace() -> None:
    model = build("stack")
    sw.fully_shard(model, units="auto")
    sw.full_tensors(model)  # never iterated, on any rank
    train(model)


@on_ranks(2)
def test_an_iterator_that_one_rank_keeps_open_is_an_error_in_the_next_step() -> None:
    model, rank = build("stack"), dist.get_rank()
    sw.fully_shard(model, units="auto")
    stream = sw.full_tensors(model, bucket_bytes=300)
    next(stream)

    def go_on() -> None:
        if rank:
            list(stream)
        train(model)

    with pytest.raises(RanksDiverged, match="gather bucket 1 of full_tensors"):
        go_on()
    with contextlib.suppress(StepError):
        stream.close()  # it cannot take part in gathers that failed
    train(model)


# -- adapters ------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_adapters_are_merged_or_alone(granularity: Any) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(lora_alpha=6)
    expected = {
        name.removeprefix("base_model.model."): p.detach().clone()
        for name, p in model.named_parameters()
    }
    alone = {n: p.clone() for n, p in peft.get_peft_model_state_dict(model).items()}
    sw.fully_shard(model, units="auto", granularity=granularity)
    assert set(dict(sw.full_tensors(model))) == {n for n, _ in model.named_parameters()}
    assert_same(dict(sw.full_tensors(model, adapters="alone", bucket_bytes=500)), alone)
    merged = dict(sw.full_tensors(model, adapters="merged", bucket_bytes=500))
    plain = Stack().float()
    assert set(merged) == set(dict(plain.named_parameters()))
    for name, tensor in merged.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.base_layer.weight" not in expected:
            own = name if name in expected else name.replace(".up.", ".up.base_layer.")
            assert torch.equal(tensor, expected[own]), name
            continue
        low, high = (expected[f"{layer}.lora_{x}.default.weight"] for x in "AB")
        weight = expected[f"{layer}.base_layer.weight"] + (high @ low) * 3.0
        assert torch.equal(tensor, weight), name
    half = dict(sw.full_tensors(model, adapters="merged", dtype=torch.bfloat16, to=0))
    if dist.get_rank() == 0:
        assert_same(half, {name: tensor.bfloat16() for name, tensor in merged.items()})
