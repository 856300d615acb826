"""peft on sharded models: adapters that are merged, and QLoRA with the weights of bitsandbytes.

Neither is a dependency of the tests: ``pip install peft bitsandbytes`` to run this.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from tests.models import llama
from tests.ranks import on_ranks
from tests.runtime.one_process import rank

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

VOCABULARY = 64


def base() -> Any:
    return llama(hidden_size=64, intermediate_size=128)


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def adapted_in_four_bits(folder: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The model of `base` with 4-bit weights and adapters, twice; every rank calls this."""
    if rank() == 0:
        base().save_pretrained(folder)
    dist.barrier()
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    first, second = (
        LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantization, device_map={"": "cpu"}, dtype=dtype
        )
        for _ in range(2)
    )
    return adapted(first), adapted(second)


@on_ranks(2)
def test_adapters_are_merged_and_unmerged_in_shards() -> None:
    alone, model = adapted(base()), adapted(base())
    sw.fully_shard(model, units=LlamaDecoderLayer)
    tokens = torch.randint(VOCABULARY, (2, 12))
    weight = alone.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    sharded = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    before = weight.detach().clone()
    with torch.no_grad():
        expected = alone(input_ids=tokens).logits
        torch.testing.assert_close(model(input_ids=tokens).logits, expected)
    alone.merge_adapter()
    with sw.gathered(model, write_back=True):
        model.merge_adapter()
    torch.testing.assert_close(sharded.weight.full_tensor(), weight)
    assert not torch.allclose(sharded.weight.full_tensor(), before)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    with sw.gathered(model, write_back=True):
        model.unmerge_adapter()
    torch.testing.assert_close(sharded.weight.full_tensor(), before)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@on_ranks(2, deadline=200.0)
def test_adapters_of_four_bit_weights_train_as_in_one_process(tmp_path: Path) -> None:
    alone, model = adapted_in_four_bits(
        tmp_path / "base",
        torch.float32,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    sw.fully_shard(model, units=LlamaDecoderLayer)
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (alone, model)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in trained]
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (4, 12))
        part = tokens.chunk(2)[rank()]
        expected = alone(input_ids=tokens, labels=tokens).loss
        loss = model(input_ids=part, labels=part).loss
        for each, optimizer in zip((expected, loss), optimizers, strict=True):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=0)
    for one, other in zip(trained[1], trained[0], strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
@on_ranks(2, deadline=200.0)
def test_four_bit_weights_are_merged_as_by_peft(storage: torch.dtype, tmp_path: Path) -> None:
    alone, model = adapted_in_four_bits(
        tmp_path / "base",
        torch.bfloat16,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=storage,
    )
    dequantize = peft.utils.integrations.dequantize_bnb_weight
    expected = {}
    for name, layer in alone.get_base_model().named_modules():
        if hasattr(layer, "get_delta_weight"):
            weight = dequantize(layer.base_layer.weight)
            expected[name] = (weight + layer.get_delta_weight("default")).bfloat16()
        elif type(layer).__name__ == "Linear4bit" and not name.endswith("base_layer"):
            expected[name] = dequantize(layer.weight)
    sw.fully_shard(model, units=LlamaDecoderLayer)
    found = dict(sw.full_tensors(model, adapters="merged", bucket_bytes=9000))
    assert found.keys() == {name for name, _ in base().named_parameters()}
    assert len(expected) == 14
    for name, value in expected.items():
        assert torch.equal(found[f"{name}.weight"], value), name
