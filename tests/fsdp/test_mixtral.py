"""transformers' Mixtral with its own expert parallelism trains as one process does."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism

from shardwise.fsdp import fully_shard
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_close, full

VOCABULARY, LENGTH, LAYERS = 40, 6, 2


def build() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).double()
    model.set_experts_implementation("eager")  # the others do not compute in float64
    return model


def shard(model: Any, mesh: DeviceMesh, dense: DeviceMesh) -> None:
    """Shard ``model`` with the calls, and in the order, of transformers."""
    plan: dict[str, str] = {}
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        plan |= dict.fromkeys((f"{experts}.gate_up_proj", f"{experts}.down_proj"), "grouped_gemm")
        plan[experts] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "all_to_all")
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["efsdp"], reshard_after_forward=True)
        layer.mlp.experts.set_gradient_divide_factor(float(dense.size()))
        layer.mlp.experts.set_force_sum_reduction_for_comms(True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=dense, reshard_after_forward=True)
    fully_shard(model, mesh=dense)


@pytest.mark.thorough
@on_ranks(4)
def test_training_equals_one_process() -> None:
    reference = build()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("efsdp", "ep", "tp"))
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    shard(model, mesh, dense)
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (8, LENGTH))
        own = tokens.chunk(4)[dist.get_rank()]
        reference(input_ids=tokens, labels=tokens).loss.backward()
        model(input_ids=own, labels=own).loss.backward()
        for name, one in model.named_parameters():
            wanted = reference.get_parameter(name)
            assert one.grad is not None, name
            assert_close(full(one.grad), wanted.grad, f"gradient of {name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, one in model.named_parameters():
        assert_close(full(one.detach()), reference.get_parameter(name).detach(), name)
