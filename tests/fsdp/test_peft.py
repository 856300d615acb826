"""Adapters of peft on a Llama whose base is frozen train as in one process, and peft opens them.

peft is not a dependency of the tests: ``pip install peft`` to run this.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import fsdp
from tests.models import llama
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_close, full, own_part, rank

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

VOCABULARY, LENGTH = 32, 8
LINEAR = ["q_proj", "v_proj", "down_proj"]
CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(
        r=4, target_modules=LINEAR, use_dora=True, task_type="CAUSAL_LM"
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def base() -> Any:
    return llama(vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2).double()


def adapted(kind: str) -> Any:
    model = base()
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIGS[kind](), autocast_adapter_dtype=False).double()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@on_ranks(2)
@pytest.mark.parametrize("shard", [fsdp.fully_shard, sw.fully_shard])
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_train_as_in_one_process(kind: str, shard: Any, tmp_path: Path) -> None:
    alone, model = adapted(kind), adapted(kind)
    for layer in model.get_base_model().model.layers:
        shard(layer)
    shard(model)
    optimizers = [adamw(p for p in each.parameters() if p.requires_grad) for each in (alone, model)]
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (4, LENGTH))
        loss_of(alone, tokens).backward()  # type: ignore[no-untyped-call]
        loss_of(model, own_part(tokens)).backward()  # type: ignore[no-untyped-call]
        pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
        for (name, one), expected in pairs:
            grad = None if one.grad is None else full(one.grad)
            assert_close(grad, expected.grad, f"gradient of {name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    torch.distributed.barrier()  # all ranks write the file
    if rank() == 0:
        files = {file.name for file in tmp_path.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert not any("pytorch_model" in name or name == "model.safetensors" for name in files)
        opened = peft.PeftModel.from_pretrained(base(), tmp_path, autocast_adapter_dtype=False)
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        with torch.no_grad():
            assert_close(loss_of(opened.double(), tokens), loss_of(alone, tokens), "saved adapters")
