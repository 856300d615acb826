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
    except OSError as error:
        raise ConfigError(
            f"model {str(path)!r}: {file}: {error.strerror}; expected a directory with the "
            "config.json of a Hugging Face model, or that file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model {str(path)!r}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"model {str(path)!r}: expected the fields of a model, got {fields!r}")
    name = str(fields.get("_name_or_path") or path)
    try:
        import transformers  # noqa: PLC0415 (takes seconds to import)
    except ImportError:
        return name, _shape_of(fields, file), None
    # On fake tensors, the default attention makes a mask and repeats key heads. Ours does not.
    transformers.AttentionInterface.register(_ATTENTION, _attention)
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *_args, **_options: None)
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # transformers checks each field in its own way
        raise ConfigError(f"{file}: {type(error).__name__}: {error}") from error
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


# Fields of a config.json, and those of a shape that they are.
_GPT2 = {
    "n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "n_inner": "ffn",
    "vocab_size": "vocab", "n_positions": "positions", "resid_pdrop": "dropout",
}  # fmt: skip
_LLAMA = {
    "num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "intermediate_size": "ffn",
    "vocab_size": "vocab", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
_EXPERTS = {"num_local_experts": "experts", "num_experts_per_tok": "active_experts"}
_LLAMAS: dict[str, dict[str, Any]] = {  # Llama's relatives, and what they have besides
    "llama": {},
    "mistral": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True},
    "mixtral": {},
}
_KNOWN = ("gpt2", *_LLAMAS)
_REQUIRED = ("layers", "hidden", "heads", "vocab")


def _shape_of(fields: Mapping[str, Any], file: Path) -> Shape:
    kind = fields.get("model_type")
    if kind not in _KNOWN:
        raise ConfigError(
            f"{file}: model_type={kind!r} needs transformers; {install('hf')}, or use "
            f"one of {', '.join(_KNOWN)}"
        )
    names = _GPT2 if kind == "gpt2" else _LLAMA | _EXPERTS
    for theirs, ours in names.items():
        if ours in _REQUIRED and not fields.get(theirs):
            raise ConfigError(f"{file}: {theirs}: expected a number, got {fields.get(theirs)!r}")
    sizes = {ours: fields[theirs] for theirs, ours in names.items() if fields.get(theirs)}
    if kind == "gpt2":
        sizes.setdefault("dropout", fields.get("resid_pdrop", 0.1))
        return Shape(arch="gpt", tied_embeddings=True, has_bias=True, **sizes)
    return Shape(arch="llama", **sizes, **_LLAMAS[kind])


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
            **{theirs: getattr(shape, ours) for theirs, ours in _GPT2.items()},
            "n_positions": max(shape.positions, sequence),
            **dict.fromkeys(("embd_pdrop", "attn_pdrop"), shape.dropout),
        }
    kind = _llama_kind(shape)
    if kind is None:
        raise ConfigError(
            f"transformers has no causal language model of this shape (arch={shape.arch!r})"
        )
    names = _LLAMA | (_EXPERTS if shape.experts else {})
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        **{theirs: getattr(shape, ours) for theirs, ours in names.items()},
        "max_position_embeddings": max(_POSITIONS, sequence),
    }


_POSITIONS = 8192  # rotary positions that cost nothing


def _llama_kind(shape: Shape) -> str | None:
    """Return the type of the relative of Llama that has this shape."""
    if shape.arch != "llama" or shape.has_bias:
        return None
    extras = {name: True for name in ("has_qkv_bias", "has_qk_norm") if getattr(shape, name)}
    if shape.experts:
        return None if extras else "mixtral"
    return next((kind for kind, own in _LLAMAS.items() if own == extras), None)
