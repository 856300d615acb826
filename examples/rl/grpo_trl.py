"""TRL's GRPOTrainer on a sharded model, with generation by transformers in the same processes.

    torchrun --nproc-per-node=2 examples/rl/grpo_trl.py OUT [--steps 20] [--engine ddp]

The model, the tokenizer and the reward are tiny and artificial: the more often a completion
contains an even word, the better. OUT/ENGINE.json gets losses, rewards and gradient norms.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import GRPOConfig, GRPOTrainer

import shardwise as sw
from shardwise.integrations.transformers import ShardedTrainer

WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": 3 + number for number in range(60)}}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class ShardedGRPOTrainer(ShardedTrainer, GRPOTrainer):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # Whole parameters, so that ranks may generate completions of different lengths.
        with sw.gathered(self.model):
            return super()._generate_single_turn(*args, **kwargs)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def count_even_words(completions: list[str], **_columns: Any) -> list[float]:
    words = ([word for word in text.split() if word[1:].isdigit()] for text in completions)
    return [sum(int(word[1:]) % 2 == 0 for word in found) / 8 for found in words]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    arguments = GRPOConfig(
        str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    numbers = torch.randint(60, (64, 4), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = Dataset.from_list([{"prompt": " ".join(f"w{n}" for n in row)} for row in numbers])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **SIZES))
    sharded = partial(ShardedGRPOTrainer, fully_shard={"units": LlamaDecoderLayer})
    trainer = (sharded if options.engine == "shardwise" else GRPOTrainer)(
        model=model,
        reward_funcs=count_even_words,
        args=arguments,
        train_dataset=prompts,
        processing_class=make_tokenizer(),
    )
    trainer.train()
    if dist.get_rank() == 0:
        options.out.mkdir(exist_ok=True)
        (options.out / f"{options.engine}.json").write_text(json.dumps(trainer.state.log_history))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
