"""`AutoModel` of transformers loads the checkpoint of a sharded model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from tests.models import llama
from tests.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_auto_model_of_a_checkpoint_gives_the_logits_of_the_sharded_model(
    tied: bool, tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=tied)
    sw.fully_shard(model, units=LlamaDecoderLayer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.randint(64, (2, 9))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    sw.save(tmp_path / "model", model=model, optimizer=optimizer, max_file_bytes=20_000)
    if torch.distributed.get_rank() == 0:
        model.config.save_pretrained(tmp_path / "model")
    torch.distributed.barrier()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)
