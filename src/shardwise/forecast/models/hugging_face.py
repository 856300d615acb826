"""Reads Hugging Face models from their config.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError, install
from shardwise.forecast.models.transformer import Shape

__all__ = ["read_hugging_face", "settings_of"]

_ATTENTION = "shardwise_forecast"


def read_hugging_face(path: Path) -> tuple[str, Shape | None, Callable[[], nn.Module] | None]:
    """Read a model's name, its shape if it is like GPT-2 or Llama, and a function that builds it.

    Without transformers, the function is None.

    Args:
        path: a config.json, or its directory.

    Raises:
        ConfigError: the file cannot be read, or this type of model needs transformers.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {str(path)!r}: {error}") from error
    name = str(fields.get("_name_or_path") or path)
    try:
        import transformers  # noqa: PLC0415 (takes seconds to import)
    except ImportError:
        return name, _shape_of(fields, file), None
    # On fake tensors, the default attention makes a mask and repeats key heads. Ours does not.
    transformers.AttentionInterface.register(_ATTENTION, _attention)
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *_args, **_options: None)
    config = transformers.AutoConfig.for_model(**fields)
    options: dict[str, Any] = {"dtype": torch.float32}
    if config.is_encoder_decoder:
        automatic = transformers.AutoModelForSeq2SeqLM
    else:
        automatic = transformers.AutoModelForCausalLM
        options["attn_implementation"] = _ATTENTION
    shape = _shape_of(config.to_dict(), file) if config.model_type in _KNOWN else None
    return name, shape, lambda: automatic.from_config(config, **options)


def _attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    grouped = key.shape[1] != query.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None  # [batch, time, heads, head_dim]


_LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
_KNOWN = ("gpt2", *_LLAMAS)


def _shape_of(fields: Mapping[str, Any], file: Path) -> Shape:
    kind = fields.get("model_type")
    if kind == "gpt2":
        return Shape(
            arch="gpt",
            layers=fields["n_layer"],
            hidden=fields["n_embd"],
            heads=fields["n_head"],
            ffn=fields.get("n_inner") or 0,
            vocab=fields["vocab_size"],
            positions=fields["n_positions"],
            tied_embeddings=True,
            has_bias=True,
            dropout=fields.get("resid_pdrop", 0.1),
        )
    if kind not in _LLAMAS:
        raise ConfigError(
            f"{file}: model_type={kind!r} needs transformers; {install('hf')}, or use "
            f"one of {', '.join(_KNOWN)}"
        )
    return Shape(
        arch="llama",
        layers=fields["num_hidden_layers"],
        hidden=fields["hidden_size"],
        heads=fields["num_attention_heads"],
        kv_heads=fields.get("num_key_value_heads") or 0,
        head_dim=fields.get("head_dim") or 0,
        ffn=fields["intermediate_size"],
        vocab=fields["vocab_size"],
        tied_embeddings=fields.get("tie_word_embeddings", False),
        has_qkv_bias=kind == "qwen2",
        has_qk_norm=kind == "qwen3",
        experts=fields.get("num_local_experts", 0),
        active_experts=fields.get("num_experts_per_tok", 2),
    )


def settings_of(shape: Shape, sequence: int) -> dict[str, Any]:
    """Return the fields of a config.json from which transformers builds a model of this shape.

    Args:
        shape: a GPT with biases and learned positions, or a Llama or a relative of it.
        sequence: tokens of a sequence that the model must support.

    Raises:
        ConfigError: transformers has no causal language model of this shape.
    """
    if shape.arch == "gpt" and shape.has_bias and shape.positions and shape.tied_embeddings:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": shape.layers,
            "n_embd": shape.hidden,
            "n_head": shape.heads,
            "n_inner": shape.ffn,
            "vocab_size": shape.vocab,
            "n_positions": max(shape.positions, sequence),
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout),
        }
    kind = _llama_kind(shape)
    if kind is None:
        raise ConfigError(
            f"transformers has no causal language model of this shape (arch={shape.arch!r})"
        )
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.active_experts}
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": max(_POSITIONS, sequence),
        "tie_word_embeddings": shape.tied_embeddings,
        **(experts if shape.experts else {}),
    }


_POSITIONS = 8192  # rotary positions that cost nothing


def _llama_kind(shape: Shape) -> str | None:
    """Return the type of the relative of Llama that has this shape."""
    extras = (shape.has_qkv_bias, shape.has_qk_norm, bool(shape.experts))
    kinds = {
        (False, False, False): "llama",
        (True, False, False): "qwen2",
        (False, True, False): "qwen3",
        (False, False, True): "mixtral",
    }
    return kinds.get(extras) if shape.arch == "llama" and not shape.has_bias else None
