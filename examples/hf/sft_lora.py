"""TRL's SFTTrainer with LoRA on a sharded frozen base, with saving and resuming.

    torchrun --nproc-per-node=2 examples/hf/sft_lora.py OUT [--resume OUT/trainer/checkpoint-4]

Compared with DDP, the class of the trainer and its argument ``fully_shard`` change. Only the
adapter is written, to OUT/adapter. The model, the tokenizer and the texts are tiny and artificial.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import SFTConfig, SFTTrainer

from shardwise.integrations.transformers import ShardedTrainer

WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": 3 + number for number in range(60)}}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class ShardedSFTTrainer(ShardedTrainer, SFTTrainer): ...


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def make_base(_arguments: SFTConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **SIZES))


def main(make_base: Callable[[SFTConfig], LlamaForCausalLM]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--resume")
    options = parser.parse_args()
    arguments = SFTConfig(
        str(options.out / "trainer"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=16,
        logging_steps=1,
        save_strategy="epoch",
        report_to=[],
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    numbers = torch.randint(60, (32, 10), generator=torch.Generator().manual_seed(1)).tolist()
    texts = Dataset.from_list([{"text": " ".join(f"w{n}" for n in row)} for row in numbers])
    parts = {"train_dataset": texts, "processing_class": make_tokenizer()}
    parts["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    sharded = partial(ShardedSFTTrainer, fully_shard={"units": LlamaDecoderLayer})
    kind = sharded if options.engine == "shardwise" else SFTTrainer
    trainer = kind(make_base(arguments), arguments, **parts)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "adapter"))
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(trainer.state.log_history))
    dist.barrier()  # DDP's end deadlocks while Gloo's threads still free what they have gathered
    dist.destroy_process_group()


if __name__ == "__main__":
    main(make_base)
