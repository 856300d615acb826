"""TRL's SFTTrainer with LoRA by peft, on a frozen base that is sharded; a program for torchrun.

    torchrun --nproc-per-node=2 examples/hf/sft_lora.py OUT [--engine shardwise|ddp]

Writes the trainer's log to OUT/ENGINE.json, and the adapter alone to OUT/adapter. The model, the
tokenizer and the texts are tiny and made up.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import SFTConfig, SFTTrainer

import shardwise as sw

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_texts() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 60, (32, 10), generator=generator).tolist()
    return Dataset.from_list([{"text": " ".join(f"w{n}" for n in row)} for row in numbers])


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights="gaussian",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), lora)


def main(out: Path, engine: str) -> list[dict[str, Any]]:
    arguments = SFTConfig(
        output_dir=str(out),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=16,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
    )
    model = make_model()
    if engine == "shardwise":
        sw.fully_shard(model, units=LlamaDecoderLayer)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=make_texts(),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    if engine == "shardwise":
        with sw.gathered(model):
            adapter = {name: x.clone() for name, x in get_peft_model_state_dict(model).items()}
        if trainer.is_world_process_zero():
            (out / "adapter").mkdir(exist_ok=True)
            save_file(adapter, out / "adapter" / "adapter_model.safetensors")
            model.peft_config["default"].save_pretrained(str(out / "adapter"))
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    history = main(options.out, options.engine)
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history, indent=1))
    dist.destroy_process_group()
