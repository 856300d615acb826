"""Tiny models of seven Hugging Face transformers families, for `shardwise verify`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.verification.models import ROWS, VOCABULARY, Subject

__all__ = ["FAMILIES"]

LENGTH = 6
IMAGE = 8  # pixels

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 16,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 1}

# Family name -> the model's class and the arguments of its configuration.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _TEXT),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mixtral": (
        "MixtralForCausalLM",
        {**_GROUPED, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "qwen2": ("Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE,
            "patch_size": 4,
            "num_labels": 5,
        },
    ),
}


def _build(family: str) -> nn.Module:
    # transformers is an optional dependency and takes seconds to import.
    import transformers  # noqa: PLC0415

    name, shape = _SHAPES[family]
    config = transformers.AutoConfig.for_model(family, **shape)
    model: nn.Module = getattr(transformers, name)(config)
    return model


def _sentences(_step: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def _images(_step: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE), "labels": torch.randint(5, (ROWS,))}


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


FAMILIES = {
    family: Subject(partial(_build, family), _images if family == "vit" else _sentences, _loss)
    for family in _SHAPES
}
