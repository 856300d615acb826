"""A small Llama with random weights, trained by transformers' `Trainer` on sharded parameters.

    torchrun --nproc-per-node=2 examples/hf/train_llama.py OUT

Three things differ from an ordinary script with a `Trainer`: the model is sharded before the
`Trainer` is created, an attribute keeps accelerate from wrapping it again, and all ranks together
save the final model, as a Hugging Face checkpoint in OUT/model.

With ``--engine ddp``, accelerate wraps the model in PyTorch's DDP instead, for comparison.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw

SENTENCES = 96
LENGTH = 33  # bytes per sentence
PARTS = 2  # micro-batches per step


class Text(Dataset):
    """Pieces of this file, with bytes as tokens."""

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
        starts = torch.arange(SENTENCES) * (len(text) - LENGTH) // SENTENCES
        self.pieces = [text[start : start + LENGTH] for start in starts.tolist()]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main(out: Path, engine: str) -> list[dict[str, Any]]:
    """Train and save; returns the log of the `Trainer`."""
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        use_cpu=not torch.cuda.is_available(),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=PARTS,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    if engine == "shardwise":
        sw.fully_shard(model, units=LlamaDecoderLayer)
    trainer = Trainer(model=model, args=arguments, train_dataset=Text(), eval_dataset=Text())
    trainer.train()
    trainer.evaluate()
    if engine == "shardwise":
        sw.save(out / "model", model=model)
        if trainer.is_world_process_zero():
            config.save_pretrained(out / "model")
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    options = parser.parse_args()
    history = main(options.out, options.engine)
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history, indent=1))
    dist.destroy_process_group()
