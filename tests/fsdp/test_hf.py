"""transformers' `Trainer` trains a sharded model, and `AutoModel` loads its checkpoint."""

import contextlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from tests.ranks import on_ranks
from tests.runtime.one_process import rank, world_size

SCRIPT = Path(__file__).parents[2] / "examples" / "hf" / "train_llama.py"
COMPARED = ("loss", "grad_norm", "eval_loss", "train_loss")


@contextlib.contextmanager
def torchrun_environment() -> Iterator[None]:
    """The variables by which accelerate recognizes a distributed run, on a rank of a pool."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, str(rank()))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, str(world_size()))
        yield


@on_ranks(2, deadline=150.0)
def test_trainer_logs_the_losses_of_ddp(tmp_path: Path) -> None:
    with torchrun_environment():
        main = runpy.run_path(str(SCRIPT))["main"]
        ours, ddp = (
            [{key: line[key] for key in COMPARED if key in line} for line in main(tmp_path, engine)]
            for engine in ("shardwise", "ddp")
        )
    assert [set(line) for line in ours[:6]] == [{"loss", "grad_norm"}] * 6
    for line, expected in zip(ours, ddp, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    assert ours[0]["loss"] > 1.2 * ours[5]["loss"], "the loss does not fall"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(model, LlamaForCausalLM)


@pytest.mark.thorough
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--standalone", str(SCRIPT), str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stderr
    assert len(json.loads((tmp_path / "shardwise.json").read_text())) == 8


@on_ranks(2, deadline=60.0)
@pytest.mark.parametrize("tied", [False, True])
def test_auto_model_of_a_checkpoint_gives_the_logits_of_the_sharded_model(
    tied: bool, tmp_path: Path
) -> None:
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
    sw.save(tmp_path / "model", model=model, optimizer=optimizer, max_file_bytes=20_000)
    if torch.distributed.get_rank() == 0:
        config.save_pretrained(tmp_path / "model")
    torch.distributed.barrier()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)
