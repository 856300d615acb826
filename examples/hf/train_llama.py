"""transformers' `Trainer` on a sharded Llama: saves each epoch, evaluates, resumes and exports.

    torchrun --nproc-per-node=2 examples/hf/train_llama.py OUT [--resume OUT/trainer/checkpoint-6]

Compared with a program that uses DDP, the class of the trainer and its argument ``fully_shard``
change. With ``--engine ddp``, the same program trains with PyTorch's DDP.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardwise.integrations.transformers import Trainer

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def make_text(count: int, length: int = 33) -> list[dict[str, torch.Tensor]]:
    """Pieces of this file, with bytes as tokens."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.arange(count) * (len(text) - length) // count
    pieces = [text[start : start + length] for start in starts.tolist()]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(out: Path, engine: str, resume: Path | None = None) -> list[dict[str, float | str]]:
    """Train and save; return the log of the `Trainer`."""
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    kind = transformers.Trainer
    if engine == "shardwise":
        kind = partial(Trainer, fully_shard={"units": LlamaDecoderLayer})
    data = {"train_dataset": make_text(48), "eval_dataset": make_text(10, 20)}
    trainer = kind(model=model, args=arguments, **data)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.evaluate()  # evaluates the best model
    prompt = make_text(1, 8)[0]["input_ids"][None].to(model.device)
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    trainer.save_model(str(out / "model"))  # for from_pretrained
    generated = bytes(tokens[0].tolist()).decode("latin-1")
    return [*trainer.state.log_history, {"generated": generated}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    history = main(options.out, options.engine, options.resume)
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}.json").write_text(json.dumps(history, indent=1))
    dist.destroy_process_group()
