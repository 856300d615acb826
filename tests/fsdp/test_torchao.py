"""torchao: float8 weights, NF4 weights with LoRA, and quantization-aware training."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise import fsdp
from tests.covering import covered_first
from tests.models import llama
from tests.ranks import on_ranks

pytest.importorskip("torchao")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    NF4Tensor,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import QATConfig

WIDTH = 64
STEPS = 3
ROUNDING = 2**-4  # relative rounding error of float8_e4m3fn, with 3 bits of mantissa


class LoRA(nn.Module):
    """A frozen linear layer with NF4 weights, and a trainable update of rank 4."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        weight = NF4Tensor.from_tensor(base.weight.detach(), 16, 4)
        base.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def qlora() -> Any:
    """A tiny Llama with LoRA on the linear layers of its blocks; all else is frozen."""
    model = llama(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=2
    ).requires_grad_(False)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, LoRA(child))
    return model


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, batch: Tensor) -> Any:
    logits = model(batch).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@on_ranks(2)
@pytest.mark.parametrize(
    ("shard", "reshard"), covered_first(product((fsdp.fully_shard, sw.fully_shard), (True, False)))
)
def test_qlora_on_a_llama_equals_one_process(shard: Any, reshard: bool, tmp_path: Path) -> None:
    model, alone = qlora(), qlora()
    for block in model.model.layers:
        shard(block, reshard_after_forward=reshard)
    shard(model, reshard_after_forward=reshard)
    stored = model.model.layers[0].mlp.up_proj.base.weight.to_local()
    assert isinstance(stored, NF4Tensor)
    assert stored.quantized_data.numel() == 2 * WIDTH * WIDTH // 2 // dist.get_world_size()
    optimizers = optimizer_of(model), optimizer_of(alone)
    for step in range(STEPS):
        loss = loss_of(model, tokens(step, dist.get_rank()))
        loss.backward()
        whole = loss_of(alone, torch.cat([tokens(step, rank) for rank in range(2)]))
        whole.backward()
        dist.all_reduce(loss.detach())
        torch.testing.assert_close(loss.detach() / 2, whole.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for sharded, expected in zip(model.parameters(), alone.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(sharded.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(sw.CheckpointError, match="weight: a NF4Tensor cannot be saved"):
        sw.save(tmp_path / "model", model=model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dcp.save(trained, checkpoint_id=tmp_path / "adapter")  # type: ignore[attr-defined]


def float8(model: nn.Module) -> nn.Module:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    converted: nn.Module = convert_to_float8_training(model, config=config)
    return converted


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]).to(dtype)


def sent_bytes(model: nn.Module) -> int:
    """The bytes that one rank sends to gather the units of ``model``."""
    records = [record for record in sw.ledger(model).records() if record.event.kind == "gather"]
    works = [work.collective for record in records for work in record.works]
    return sum(0 if work is None else work.slot_bytes for work in works)


@on_ranks(2)
@pytest.mark.parametrize(
    ("param_dtype", "precomputed"), covered_first(product((None, torch.bfloat16), (False, True)))
)
def test_float8_weights_are_gathered_in_a_byte_each(
    param_dtype: torch.dtype | None, precomputed: bool
) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model: Any = float8(layers())
    plain: Any = layers()
    alone = copy.deepcopy(plain)
    for each in (model, plain):
        for layer in each:
            fsdp.fully_shard(layer, mp_policy=policy)
        fsdp.fully_shard(each, mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain, alone)]
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(2, 4, WIDTH)
        losses = []
        for each, optimizer in zip((model, plain, alone), optimizers, strict=True):
            inputs = x if each is alone else x[dist.get_rank()]
            loss = each(inputs).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if precomputed:
            precompute_float8_dynamic_scale_for_fsdp(model)
        dist.all_reduce(losses[0])
        assert abs(losses[0] / 2 - losses[2]) < ROUNDING * losses[2]
    itemsize = 4 if param_dtype is None else 2
    assert sent_bytes(plain) == itemsize * sent_bytes(model) > 0
    for sharded, expected in zip(model.parameters(), alone.parameters(), strict=True):
        full = sharded.full_tensor()
        assert (full - expected).abs().max() < ROUNDING * expected.abs().max()


@on_ranks(2)
@pytest.mark.parametrize(
    "shard", [sw.fully_shard, pytest.param(fsdp.fully_shard, marks=pytest.mark.thorough)]
)
def test_quantization_aware_training_has_the_bits_of_one_process(shard: Any) -> None:
    """All ranks have the same batch: rounding turns other orders of sums into other results."""
    quantized = Int8DynamicActivationIntxWeightConfig(torch.int8, PerGroup(WIDTH // 2))
    models: list[Any] = [layers() for _ in range(2)]
    for model in models:
        quantize_(model, QATConfig(quantized, step="prepare"))
    for layer in models[0]:
        shard(layer)
    shard(models[0])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(STEPS):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            loss = model(torch.randn(4, WIDTH)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    trained, alone = layers(), models[1]
    trained.load_state_dict(dict(sw.full_tensors(models[0])))
    for model in (trained, alone):
        quantize_(model, QATConfig(quantized, step="convert") if model is alone else quantized)
    x = torch.randn(4, WIDTH)
    assert torch.equal(trained(x), alone(x))
    assert not torch.equal(alone(x), layers()(x)), "it is quantized"
