"""Compares traces with PyTorch: its FLOP counter, and the tensors that autograd saves."""

from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.forecast.configuration import Checkpointing, Configuration
from shardwise.forecast.models.parallel import ModelPart
from shardwise.forecast.models.transformer import Block, Shape, build
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.forecast.trace.tracing import trace
from shardwise.forecast.work import Kind, Workload
from shardwise.schedule.events import COMPUTE, EventKind
from shardwise.train import model as trained

BATCH, TIME, BLOCKS = 2, 16, 3
GPT = Shape(arch="gpt", layers=BLOCKS, hidden=32, heads=4, vocab=50, positions=TIME)
LLAMA = Shape(arch="llama", layers=BLOCKS, hidden=32, heads=4, kv_heads=2, vocab=50, ffn=48)
SHAPES = pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
CASES = pytest.mark.parametrize(
    ("shape", "mode"),
    [
        pytest.param(
            shape,
            mode,
            id=f"{shape.arch}-{mode}",
            # The half that is always tested has every shape and every mode.
            marks=pytest.mark.thorough if (shape is GPT) == (number % 2 == 0) else (),
        )
        for shape in (GPT, LLAMA)
        for number, mode in enumerate(get_args(Checkpointing))
    ],
)
UNITS = [f"layers.{number}" for number in range(BLOCKS)]


def attention_flops(query: Any, key: Any, _value: Any, *_args: Any, **_options: Any) -> int:
    shared = (*query[:2], *key[2:])  # one key per query: grouped queries do not save FLOPs
    return int(sdpa_flop_count(query, shared, shared))  # type: ignore[no-untyped-call]


def attention_backward_flops(
    gradient: Any, query: Any, key: Any, _value: Any, *_args: Any, **_options: Any
) -> int:
    shared = (*query[:2], *key[2:])
    return int(sdpa_backward_flop_count(gradient, query, shared, shared))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
COUNTED = {  # FlopCounterMode supports flash attention only on GPUs
    _aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def tokens() -> list[Tensor]:
    return [torch.zeros(BATCH, TIME, dtype=torch.long)] * 2


def real(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


@cache
def trace_of(shape: Shape, mode: str = "none", **options: Any) -> Workload:
    checkpointing = dict.fromkeys(UNITS[: shape.layers], mode)
    units = [f"layers.{number}" for number in range(shape.layers)]
    return trace(build(shape), tokens(), units=units, checkpointing=checkpointing, **options)


# -- operations ----------------------------------------------------------------------------------


@CASES
def test_flops_are_those_that_pytorch_counts(shape: Shape, mode: str) -> None:
    model = real(build(shape))
    checkpoint_blocks(model, dict.fromkeys(UNITS, mode))
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        model(*tokens()).backward()
    assert sum(one.flops for one in trace_of(shape, mode).operations) == counter.get_total_flops()


@SHAPES
def test_recomputed_operations_are_marked(shape: Shape) -> None:
    plain, recomputed = (trace_of(shape, mode) for mode in ("none", "full"))
    kinds = (Kind.MATMUL, Kind.ATTENTION)
    blocks = sum(
        one.flops for segment in plain.segments[1:BLOCKS] for one in segment.operations
    )  # forward of all blocks but the last, whose segment has the head
    again = [one for one in recomputed.operations if one.is_recomputed and one.kind in kinds]
    assert {one.name for one in again} == {"mm", "scaled_dot_product_attention"}
    last_product = 2 * BATCH * TIME * shape.ffn * shape.hidden  # nothing needs its result
    assert (
        sum(one.flops for one in again) == blocks * BLOCKS // (BLOCKS - 1) - BLOCKS * last_product
    )


def test_attention_is_one_causal_operation() -> None:
    found = [one for one in trace_of(LLAMA).operations if one.kind is Kind.ATTENTION]
    assert len(found) == 2 * BLOCKS
    assert {one.shape for one in found} == {(BATCH, 4, TIME, TIME, 8)}
    assert all(one.is_causal for one in found)


def test_the_bytes_of_an_operation_are_those_of_its_tensors() -> None:
    first = trace_of(LLAMA).segments[1].operations[0]  # pow, of a norm
    assert first.name == "pow"
    assert first.num_bytes == 2 * 4 * BATCH * TIME * LLAMA.hidden


# -- memory --------------------------------------------------------------------------------------


class _Saved:
    """Counts the bytes that autograd saves, except parameters and the batch."""

    def __init__(self, ignored: list[Tensor]) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._sizes: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._ignored:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


@SHAPES
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_forward_keeps_the_bytes_that_autograd_saves(shape: Shape, attention: Any) -> None:
    part = ModelPart(Configuration(attention=attention))
    model, batch = real(build(shape, part)), tokens()
    saved = _Saved([*model.parameters(), *batch])
    with saved.hooks:
        loss = model(*batch)
    traced = trace(build(shape, part), batch, units=UNITS)
    kept = traced.segments[traced.forward_segments - 1].end_bytes
    assert kept == saved.num_bytes + 2 * loss.nbytes  # the loss and its gradient


@CASES
def test_a_pass_frees_all_that_it_allocates(shape: Shape, mode: str) -> None:
    traced = trace_of(shape, mode)
    assert traced.segments[0].start_bytes == traced.segments[-1].end_bytes == 0
    for before, after in zip(traced.segments, traced.segments[1:], strict=False):
        assert before.end_bytes == after.start_bytes
        assert before.peak_bytes >= max(before.start_bytes, before.end_bytes)


class _Twice(nn.Module):
    """Uses its weight twice, so autograd adds two gradients of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(400, 100))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight) * (x @ self.weight)).sum()


def test_autograd_adds_gradients_in_place() -> None:
    model = _Twice()
    backward = trace(model, [torch.zeros(1, 400)], units=[]).segments[-1]
    assert 2.0 <= backward.peak_bytes / model.weight.nbytes < 2.1


class _Branches(nn.Module):
    """Uses the output of a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x).tanh()
        total: Tensor = (self.layers[1](y) + self.layers[2](y)).sum()
        return total


def test_autograd_adds_gradients_that_are_views_out_of_place() -> None:
    """Linear layers view their inputs as matrices, unless these are matrices."""
    sizes = (1024, 64), (32, 32, 64)
    matrix, views = (
        trace(_Branches(), [torch.zeros(size)], units=[]).segments[-1].peak_bytes for size in sizes
    )
    assert views - matrix == 4 * 1024 * 64


def test_a_tied_embedding_adds_rows_to_the_gradient_of_its_head() -> None:
    shape = trained.gpt_shape(vocabulary=4096, context=8, width=16, layers=1, heads=1)
    with torch.device("meta"):
        model = trained.GPT(shape)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    last = trace(model, [tokens], units=["blocks.0"], loss=lambda out: out.sum()).segments[-1]
    of_weight = model.head.weight.nbytes
    assert last.peak_bytes > 2 * of_weight
    assert of_weight < last.peak_bytes - last.added_rows_bytes < 1.2 * of_weight


class _Twisted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(0)


def test_plain_linear_layers_of_a_unit_compute_weight_gradients_in_slots() -> None:
    """Not in a layer that is a unit, overrides forward, is small, or shares its weight."""
    plain, twisted, small = nn.Linear(256, 256), _Twisted(256, 256), nn.Linear(256, 128)
    first, second = nn.Linear(256, 256), nn.Linear(256, 256)
    first.weight = second.weight
    tied: list[nn.Module] = [first, second]
    cases: list[tuple[list[nn.Module], str]]
    cases = [([plain], "0"), ([plain], "0.0"), ([twisted], "0"), ([small], "0"), (tied, "0")]
    found = []
    for layers, unit in cases:
        module = nn.Sequential(nn.Sequential(*layers))
        traced = trace(module, [torch.zeros(4, 256)], units=[unit], loss=lambda out: out.sum())
        found.append(max(segment.in_slot_bytes for segment in traced.segments))
    in_slot, *others = found
    assert 0.9 * plain.weight.nbytes < in_slot <= plain.weight.nbytes
    assert others == [0] * 4


@SHAPES
def test_checkpointing_keeps_the_inputs_of_blocks(shape: Shape) -> None:
    plain, recomputed = (trace_of(shape, mode) for mode in ("none", "full"))
    kept = [segment.end_bytes for segment in recomputed.segments[1:BLOCKS]]
    assert kept[1] - kept[0] == 4 * BATCH * TIME * shape.hidden
    assert kept[1] - kept[0] < plain.segments[2].end_bytes - plain.segments[1].end_bytes


def test_autocast_computes_norms_and_the_loss_in_float32_as_on_a_gpu() -> None:
    operations = trace_of(GPT, autocast=torch.bfloat16).operations
    sizes = {one.name: one.itemsize for one in operations if not one.is_recomputed}
    assert sizes["native_layer_norm"] == sizes["_log_softmax"] == 4
    assert sizes["mm"] == sizes["gelu"] == sizes["scaled_dot_product_attention"] == 2


def test_dropout_keeps_a_byte_for_each_element() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    traced = trace(module, [torch.zeros(4, 8)], units=[], loss=lambda output: output.sum())
    kept = traced.segments[0].end_bytes
    assert kept == 4 * 8 + 4 * 4 * 8 + 2 * 4  # the mask, its result, the loss and its gradient


# -- events --------------------------------------------------------------------------------------


def compute_events(workload: Workload) -> list[tuple[EventKind, int]]:
    return [(segment.kind, segment.unit) for segment in workload.segments]


@CASES
def test_segments_are_the_events_of_the_engine(shape: Shape, mode: str) -> None:
    model = real(build(shape))
    sw.fully_shard(model, units=Block)
    checkpoint_blocks(model, dict.fromkeys(UNITS, mode))
    for _ in range(2):
        model(*tokens()).backward()
        model.zero_grad()
    recorded = [one for one in sw.ledger(model).events() if one.kind in COMPUTE]
    traced = trace_of(shape, mode)
    assert compute_events(traced) == [(event.kind, event.unit) for event in recorded]


# -- errors --------------------------------------------------------------------------------------


def test_errors_name_the_problem() -> None:
    with pytest.raises(PlanError, match=r"'layers\.9': there is no such module"):
        trace(build(GPT), tokens(), units=["layers.9"])
    with pytest.raises(PlanError, match=r"layers\.0: 'some'"):
        trace(build(GPT), tokens(), units=[], checkpointing={"layers.0": "some"})
    with pytest.raises(PlanError, match="not a scalar loss; pass loss="):
        trace(nn.Linear(2, 2), [torch.zeros(3, 2)], units=[])


class Grouped(nn.Module):
    """Two experts, each for a part of the rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16, 32, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:  # [rows, 16]
        ends = torch.tensor([3, 8], dtype=torch.int32)
        return F.grouped_mm(x, self.weight, offs=ends).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_grouped_products_are_traced_in_every_dtype(dtype: torch.dtype) -> None:
    """Fake tensors refuse them in dtypes that real ones take."""
    batch = torch.ones(8, 16, dtype=dtype, requires_grad=True)
    Grouped(dtype)(batch).backward()
    found = trace(Grouped(dtype), [batch], units=[])
    products = [one for one in found.operations if one.kind is Kind.MATMUL]
    assert [one.flops for one in products] == 3 * [2 * 8 * 16 * 32]
    assert {one.itemsize for one in products} == {dtype.itemsize}
    assert found.segments[0].end_bytes >= 8 * 32 * dtype.itemsize
