"""transformers' `Trainer` on a sharded model, and what `AutoModel` makes of a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from tests.ranks import run_on

SCRIPT = Path(__file__).parents[2] / "examples" / "hf" / "train_llama.py"
COMPARED = ("loss", "grad_norm", "eval_loss", "train_loss")


def launch(out: Path, engine: str) -> list[dict[str, Any]]:
    """What the `Trainer` of the script logs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--standalone", str(SCRIPT), str(out), "--engine", engine]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stderr
    history: list[dict[str, Any]] = json.loads((out / f"{engine}.json").read_text())
    return history


def test_the_trainer_learns_what_it_learns_with_ddp(tmp_path: Path) -> None:
    ours, ddp = (
        [{key: line[key] for key in COMPARED if key in line} for line in launch(tmp_path, engine)]
        for engine in ("shardwise", "ddp")
    )
    assert [set(line) for line in ours[:6]] == [{"loss", "grad_norm"}] * 6
    for line, expected in zip(ours, ddp, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    assert ours[0]["loss"] > 1.2 * ours[5]["loss"], "it learns"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(model, LlamaForCausalLM)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_gives_the_logits_of_the_sharded_model(tied: bool, tmp_path: Path) -> None:
    run_on(2, _compare_logits, tied, tmp_path, deadline=60.0)


def _compare_logits(tied: bool, path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    sw.fully_shard(model, units=LlamaDecoderLayer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.randint(50, (2, 9))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    sw.save(path / "model", model=model, optimizer=optimizer, max_file_bytes=20_000)
    if torch.distributed.get_rank() == 0:
        config.save_pretrained(path / "model")
    torch.distributed.barrier()
    opened = AutoModelForCausalLM.from_pretrained(path / "model")
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)
