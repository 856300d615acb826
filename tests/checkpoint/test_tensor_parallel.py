"""Checkpoints do not depend on tensor parallelism: the same bytes for any mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, full

_STYLES = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    # Sizes that four ranks do not divide evenly
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager",
        )
    )  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        tokens = (torch.arange(12).view(2, 6) * 7 + number) % 37
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value)
    return found


def on_two_dims(seed: int, options: dict[str, Any]) -> LlamaForCausalLM:
    """A model with tensor parallelism over one mesh dim, sharded over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = llama(seed)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], _STYLES)
    return sw.fully_shard(model, mesh=mesh["dp"], **options)


@on_ranks(4)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"strategy": "ddp"}, marks=pytest.mark.thorough)]
)
def test_a_checkpoint_is_opened_on_other_meshes(tmp_path: Path, options: dict[str, Any]) -> None:
    model = on_two_dims(0, options)
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    expected = bits(model, optimizer)
    sw.save(tmp_path / "x", model=model, optimizer=optimizer, wait=False).wait()

    plain = llama(1)
    others = {
        "as it was": on_two_dims(2, options),
        "four shards": sw.fully_shard(llama(3)),
        "one process": plain,
    }
    for where, other in others.items():
        restored = adamw(other.parameters())
        sw.load(tmp_path / "x", model=other, optimizer=restored)
        found = bits(other, restored)
        different = [key for key, one in expected.items() if not torch.equal(one, found[key])]
        assert not different, where
        train(other, restored)  # fails if states and parameters are cut differently
    sw.save(tmp_path / "y", model=others["four shards"])
    model = on_two_dims(4, options)
    sw.load(tmp_path / "y", model=model)
    for one, other in zip(model.parameters(), others["four shards"].parameters(), strict=True):
        assert torch.equal(full(one.detach()), full(other.detach()))
    if torch.distributed.get_rank() == 0:
        for config in (plain.config, plain.generation_config):
            config.save_pretrained(tmp_path / "x")
        opened = LlamaForCausalLM.from_pretrained(tmp_path / "x")
        assert all(torch.equal(x, expected[name]) for name, x in opened.named_parameters())
