"""``generate`` of models that call modules inside the model, and not only the model itself."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import shardwise as sw
from shardwise.errors import PeerAborted, StepError
from shardwise.fsdp import register_fsdp_forward_method
from shardwise.integrations.transformers import ShardedTrainer
from tests.models import llama, llama_config
from tests.ranks import on_ranks
from tests.torchrun import torchrun_environment

VOCABULARY = 32
SPEECH = torch.linspace(-1, 1, 8 * 20).view(1, 8, 20)
IMAGE = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
BLOCKS = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    )


def bart() -> Any:
    return BartForConditionalGeneration(BartConfig(max_position_embeddings=32, **BLOCKS))


def whisper() -> Any:
    lengths = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
    return WhisperForConditionalGeneration(
        WhisperConfig(suppress_tokens=None, begin_suppress_tokens=None, **lengths, **BLOCKS)
    )


def llava() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 16}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision | sizes | {"patch_size": 8},
            text_config=llama_config(vocab_size=VOCABULARY),
            image_token_index=5,
            image_seq_length=4,
            vision_feature_select_strategy="default",
        )
    )


def lora(base: Any) -> Any:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    modules = ["q", "v", "q_proj", "v_proj"]
    kind = "SEQ_2_SEQ_LM" if base.config.is_encoder_decoder else "CAUSAL_LM"
    config = peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False, task_type=kind)
    return peft.get_peft_model(base, config)


MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
    "llava": llava,
    "lora_llama": lambda: lora(llama(vocab_size=VOCABULARY)),
    "lora_t5": lambda: lora(t5()),
}


def prompt(name: str) -> dict[str, torch.Tensor]:
    """What this rank gives to ``generate``: texts of different lengths."""
    if name == "whisper":
        return {"input_features": SPEECH}
    tokens = torch.arange(4 + dist.get_rank())[None] + 6
    if name == "llava":
        return {"input_ids": torch.cat([torch.full((1, 4), 5), tokens], 1), "pixel_values": IMAGE}
    return {"input_ids": tokens}


def model_and_reference(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = MODELS[name]().eval()
    return sw.fully_shard(copy.deepcopy(reference), units="auto", **options), reference


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.thorough if one != "t5" else ()) for one in MODELS]
)
def test_models_generate_what_they_do_in_one_process(name: str) -> None:
    model, reference = model_and_reference(name)
    options = {"max_new_tokens": 3 + 2 * dist.get_rank()}
    expected = reference.generate(**prompt(name), **options, num_beams=2)
    assert torch.equal(model.generate(**prompt(name), **options, num_beams=2), expected)
    if name in ("t5", "lora_llama"):  # generate runs between a forward and its backward, too
        tokens = torch.arange(4)[None] + 6
        losses = [one(input_ids=tokens, labels=tokens).loss for one in (model, reference)]
        model.generate(**prompt(name), **options)
        torch.autograd.backward(losses)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    with sw.gathered(model):  # every rank has the whole model, so one may call it alone
        if dist.get_rank() == 0:
            assert torch.equal(model.generate(**prompt(name), **options, num_beams=2), expected)
    assert torch.equal(model.generate(**prompt(name), **options, num_beams=2), expected)


@on_ranks(2)
@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_joined_ranks_are_told_that_an_encoder_cannot_be_followed(alone: bool) -> None:
    model, reference = model_and_reference("t5")
    register_fsdp_forward_method(model, "generate")  # is wrapped already, and stays so
    generates = dist.get_rank() == 0 or not alone
    expected = "generate of T5ForConditionalGeneration inside sw.join" if generates else "rank 0"
    with (
        pytest.raises(StepError if generates else PeerAborted, match=expected),
        sw.join(model, training=False),
    ):
        _ = generates and model.generate(**prompt("t5"))
    assert torch.equal(model.generate(**prompt("t5")), reference.generate(**prompt("t5")))


@pytest.mark.thorough
@on_ranks(2)
def test_a_rank_generates_alone_if_nothing_is_gathered() -> None:
    model, reference = model_and_reference("t5", strategy="ddp")
    if dist.get_rank() == 0:
        assert torch.equal(model.generate(**prompt("t5")), reference.generate(**prompt("t5")))


class Trainer(ShardedTrainer, Seq2SeqTrainer):  # type: ignore[misc]
    pass


TRAINERS: dict[Any, dict[str, Any]] = {
    Seq2SeqTrainer: {},
    Trainer: {"fully_shard": {"units": "auto"}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "lora_t5"])
@on_ranks(2, deadline=150.0)
def test_an_evaluation_of_the_trainer_generates(name: str, tmp_path: Any) -> None:
    tokens = (torch.arange(6 * 5).view(6, 5) % (VOCABULARY - 3)) + 3
    data = [{"input_ids": row, "labels": row} for row in tokens]
    predicted = []
    with torchrun_environment():
        for kind, options in TRAINERS.items():
            torch.manual_seed(0)
            arguments = Seq2SeqTrainingArguments(
                str(tmp_path),
                predict_with_generate=True,
                generation_max_length=8,
                per_device_train_batch_size=1,
                num_train_epochs=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = kind(model=MODELS[name](), args=arguments, train_dataset=data, **options)
            trainer.train()
            predicted.append(torch.as_tensor(trainer.predict(data).predictions))
    assert torch.equal(*predicted)
