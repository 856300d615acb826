"""transformers keeps the calls of ranks synchronous where it knows that a model is sharded."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import shardwise as sw
from tests.models import llama_config
from tests.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_ranks_generate_texts_of_different_lengths(strategy: str) -> None:
    torch.manual_seed(0)
    reference: Any = LlamaForCausalLM(llama_config(vocab_size=32))
    model: Any = sw.fully_shard(copy.deepcopy(reference), units="auto", strategy=strategy)
    rank = dist.get_rank()
    prompt = torch.arange(3 + rank)[None] + 5
    options = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    expected = reference.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    model.train()
    model(input_ids=prompt, labels=prompt).loss.backward()
    with sw.gathered(model):  # every rank has the whole model, so one may call it alone
        if rank == 0:
            assert torch.equal(model.generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, **options), expected)


@on_ranks(2)
def test_joined_ranks_generate_different_numbers_of_texts() -> None:
    torch.manual_seed(0)
    reference: Any = LlamaForCausalLM(llama_config(vocab_size=32))
    model: Any = sw.fully_shard(copy.deepcopy(reference), units="auto")
    rank = dist.get_rank()
    prompt = torch.arange(3 + rank)[None] + 5
    options = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    expected = reference.generate(prompt, **options)
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    with sw.join(model, training=False):
        for _ in range(2 - rank):
            assert torch.equal(model.generate(prompt, **options), expected)
    assert len(forwards) == (2 - rank) * (expected.shape[1] - prompt.shape[1])  # none idle
    assert torch.equal(model.generate(prompt, **options), expected)


@on_ranks(2)
def test_ranks_draw_layer_dropout_independently() -> None:
    torch.manual_seed(0)
    model: Any = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=16,
            conv_dim=(16,),
            conv_kernel=(4,),
            conv_stride=(4,),
            num_feat_extract_layers=1,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=16,
            mask_time_prob=0.0,
            layerdrop=0.5,
        )
    )
    sw.fully_shard(model, units="auto")
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        model(input_values=torch.randn(2, 64), labels=torch.tensor([0, 1])).loss.backward()
    assert model.wav2vec2.encoder.layers[3].attention.q_proj.weight.grad is not None
