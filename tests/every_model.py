"""``torchrun --nproc-per-node 2 -m tests.every_model``: models of transformers, sharded.

Every type of model that the installed transformers has for a causal, masked or sequence-to-sequence
language model, for texts with images, for images, and for speech is built with tiny sizes and
compared with one process by `sw.verify`: the loss, every gradient and every updated parameter of
two steps, in float64. Types that cannot be built tiny from these sizes, or whose own gradients are
not finite, are listed as skipped.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.plan.policies import choose_units

MAPPINGS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "mixed": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,  # trained on texts alone
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "ctc": auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
CALLS_FORWARD = {"squeezebert"}  # of its blocks, past what a unit does in a call
VOCABULARY, LENGTH, ROWS = 64, 12, 4
MOST_PARAMETERS = 3_000_000
# Sizes by the names that configurations have for them. A configuration gets those that it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "experts_implementation": "eager",  # the others have no float64
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "lru_width", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim",), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 32),
}
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers")
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
}
HEADS: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
}
STATES = {"state_size": 8, "mamba_d_state": 8, "conv_kernel": 4, "sliding_window": 8}
# Of images and of speech; a model of texts has none of them.
SENSES: dict[str, Any] = {
    **dict.fromkeys(("image_size", "embed_dim", "projection_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 24),
    **dict.fromkeys(("num_position_embeddings", "num_conv_pos_embeddings"), 16),
    **dict.fromkeys(("patch_size", "num_mel_bins", "num_codevectors_per_group"), 8),
    **dict.fromkeys(("num_channels", "in_channels"), 3),
    **dict.fromkeys(("depth", "num_conv_pos_embedding_groups", "num_feat_extract_layers"), 2),
    "hidden_sizes": [16, 24, 32, 48],
    "depths": [1, 1, 2, 1],
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_labels": 4,
    "mask_time_prob": 0.0,
}
# Tried one after the other, until a model computes finite gradients in one process.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {**COMMON, **EXPERTS, **HEADS, **STATES, **dict.fromkeys(LAYERS, 2), "num_key_value_heads": 2},
    {**COMMON, **EXPERTS, **HEADS, **STATES, **dict.fromkeys(LAYERS, 2), "num_key_value_heads": 4},
    {
        **COMMON,
        **EXPERTS,
        **HEADS,
        **STATES,
        **dict.fromkeys(LAYERS, 4),
        "num_key_value_heads": 4,
        "num_experts_per_tok": 1,
    },
    {**COMMON, **EXPERTS, **STATES, **dict.fromkeys(LAYERS, 4), "num_key_value_heads": 4},
    {**COMMON, **EXPERTS, **dict.fromkeys(LAYERS, 4), "num_experts_per_tok": 1},
    {**COMMON, "num_key_value_heads": 4},
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.every_model", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(MAPPINGS)}: all")
    parser.add_argument("--only", nargs="*", help="types of models, such as llama")
    parser.add_argument("--strategies", default="fsdp", help="for sw.verify (default: fsdp)")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counts = dict.fromkeys(("equal", "DIFFERS", "FAILS", "skipped"), 0)
    for kind in options.kinds or MAPPINGS:
        for name in options.only or sorted(MAPPINGS[kind]):
            names = MAPPINGS[kind][name]  # or several classes, of which the first is tried
            first = names if isinstance(names, str) else names[0]
            made = getattr(transformers, first, None)
            verdict, note = _verdict(made, name, kind, options.strategies.split(","))
            counts[verdict] += 1
            _show(f"{kind:<8}{name:<28}{verdict:<9}{note}")
    _show(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    dist.destroy_process_group()
    return int(bool(counts["DIFFERS"] or counts["FAILS"]))


def _show(line: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _verdict(made: Any, name: str, kind: str, strategies: list[str]) -> tuple[str, str]:
    """Return how a type of model compares with one process, and one line that says why."""
    note = "the class is missing"
    batch, more = BATCHES.get(kind, _tokens), SENSES if kind in ("mixed", *BATCHES) else {}
    for attempt in ATTEMPTS if made is not None else ():
        try:
            config = _configuration(CONFIG_MAPPING[name], attempt | more)
            _check(made, config, batch)
        except Exception as error:  # noqa: BLE001 (whatever a type of model refuses)
            note = _line(error)
            continue
        try:
            found = sw.verify(
                partial(made, config),
                batch,
                strategies,
                loss_fn=_loss,
                units=_units_of(made(config), name),
                quiet=True,
            )
        except Exception as error:  # noqa: BLE001 (it is shown, and the next type follows)
            return "FAILS", _line(error)
        return ("equal", "") if found.ok else ("DIFFERS", found.explanation)
    return "skipped", note


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:150]


def _configuration(kind: Any, sizes: dict[str, Any]) -> Any:
    known = kind()
    is_known = {key: key == "experts_implementation" or hasattr(known, key) for key in sizes}
    given = {key: value for key, value in sizes.items() if is_known[key]}
    for name in kind.sub_configs:
        part = getattr(known, name, None)
        if part is not None:
            tiny = _configuration(type(part), sizes).to_dict()
            given[name] = {**tiny, "model_type": part.model_type}
    return kind(**given)


def _check(made: Any, config: Any, batch: Callable[[int], dict[str, Tensor]]) -> None:
    """Raise if the model is large, or has gradients that are not finite in one process."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in made(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"too large: {size:,} parameters")
    torch.manual_seed(0)
    model: nn.Module = made(config).double()
    _loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            raise ValueError(f"the gradient of {name} is not finite")


def _units_of(model: nn.Module, name: str) -> Literal["auto"] | None:
    """The repeated blocks; the whole model if it has none, or calls their ``forward`` directly."""
    try:
        choose_units(model, "auto")
    except PlanError:
        return None
    return None if name in CALLS_FORWARD else "auto"


def _tokens(_step: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def _images(_step: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.rand(ROWS, 3, 32, 32, dtype=torch.float64),
        "labels": torch.randint(0, 4, (ROWS,)),
    }


def _waves(_step: int) -> dict[str, Tensor]:
    waves = torch.rand(ROWS, 400, dtype=torch.float64)
    return {"input_values": waves, "labels": torch.randint(3, VOCABULARY, (ROWS, 4))}


def _features(_step: int) -> dict[str, Tensor]:
    features = torch.rand(ROWS, 8, 48, dtype=torch.float64)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (ROWS, 6))}


BATCHES = {"image": _images, "ctc": _waves, "speech": _features}


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


if __name__ == "__main__":
    sys.exit(main())
