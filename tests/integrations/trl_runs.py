"""Runs of TRL's trainers under DDP and on sharded models.

    torchrun --nproc-per-node=2 tests/integrations/trl_runs.py OUT

Writes what each run has logged, and its weights, to OUT/runs.pt.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)  # fmt: skip

import shardwise as sw
from shardwise.integrations.transformers import ShardedTrainer

WORDS = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": 3 + number for number in range(60)}}
UNITS = {"units": LlamaDecoderLayer}
# Of each engine: the same tokens, although a sum may have another last bit.
GENERATION = {"num_generations": 2, "max_completion_length": 6, "temperature": 1e-4}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama(seed: int = 0, kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return kind(
        LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **sizes, **tokens, **options)
    )


def pairs() -> list[dict[str, Any]]:
    """Prompts, each with a better and a worse answer."""
    generator = torch.Generator().manual_seed(1)

    def words(least: int, most: int) -> str:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        numbers = torch.randint(60, (count,), generator=generator).tolist()
        return " ".join(f"w{number}" for number in numbers)

    return [
        {"prompt": words(4, 4), "chosen": words(3, 7), "rejected": words(3, 7)} for _ in range(16)
    ]


def judged() -> list[dict[str, Any]]:
    """Prompts, each with one answer and a judgment."""
    keys = ("rejected", "chosen")
    return [
        {"prompt": pair["prompt"], "completion": pair[keys[number % 2]], "label": number % 2 == 1}
        for number, pair in enumerate(pairs())
    ]


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": pair["prompt"]} for pair in pairs()]


def reward(completions: list[str], **_options: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)


def run(
    kind: Any,
    config: Any,
    rows: list[dict[str, Any]],
    out: Path,
    *,
    is_sharded: bool,
    model: Any = llama,
    reference: Any = None,
    options: dict[str, Any] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Train one epoch; return the logged numbers and the weights."""
    arguments = config(
        output_dir=str(out), num_train_epochs=1, per_device_train_batch_size=2, learning_rate=5e-3,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, seed=3,
        disable_tqdm=True, **(options or {}),
    )  # fmt: skip
    trainer_class = kind
    if is_sharded:
        trainer_class = type(kind.__name__, (ShardedTrainer, kind), {})
        parts["fully_shard"] = UNITS
    if reference is not None:
        parts["ref_model"] = reference()
        if is_sharded:
            sw.fully_shard(parts["ref_model"], **UNITS)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    trainer: Any = trainer_class(model(), args=arguments, **data, **parts)
    trainer.train()
    numbers = {
        f"{key} in step {line['step']}": value
        for line in trainer.state.log_history
        for key, value in line.items()
        if isinstance(value, float) and not {"time", "runtime", "second"} & {*key.split("_")}
    }
    trained = trainer.accelerator.unwrap_model(trainer.model)
    with sw.gathered(trained) if is_sharded else nullcontext():
        weights = {name: one.detach().clone() for name, one in trained.named_parameters()}
    return {"numbers": numbers, "weights": weights}


RUNS: dict[str, Any] = {
    "DPO, LoRA": partial(
        run, DPOTrainer, DPOConfig, pairs(), options={"gradient_checkpointing": True},
        peft_config=lora(modules_to_save=["lm_head"]),
    ),
    "DPO, a reference model": partial(
        run, DPOTrainer, DPOConfig, pairs(), reference=partial(llama, seed=5),
        options={"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    ),
    "KTO, LoRA": partial(run, KTOTrainer, KTOConfig, judged(), peft_config=lora()),
    "KTO, a reference model": partial(run, KTOTrainer, KTOConfig, judged(), reference=llama),
    "reward": partial(
        run, RewardTrainer, RewardConfig, pairs(),
        model=partial(llama, kind=LlamaForSequenceClassification, num_labels=1),
    ),
    "GRPO, LoRA": partial(
        run, GRPOTrainer, GRPOConfig, prompts(), options={"beta": 0.1, **GENERATION},
        reward_funcs=reward, peft_config=lora(),
    ),
    "RLOO": partial(
        run, RLOOTrainer, RLOOConfig, prompts(), options={"beta": 0.0, **GENERATION},
        reward_funcs=reward,
    ),
}  # fmt: skip


def main() -> None:
    out, found = Path(sys.argv[1]), {}
    for number, (name, one) in enumerate(RUNS.items()):
        found[name] = [
            one(out=out / f"{number}-{is_sharded}", is_sharded=is_sharded)
            for is_sharded in (False, True)
        ]
    if dist.get_rank() == 0:
        torch.save(found, out / "runs.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
