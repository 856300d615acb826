"""sentence-transformers' Trainer has the losses of DDP, and models of diffusers save their files.

Neither is a dependency of the tests: ``pip install sentence-transformers diffusers`` to run this.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.models.bert.modeling_bert import BertLayer

import shardwise as sw
from shardwise.integrations.transformers import ShardedTrainer
from tests.ranks import on_ranks
from tests.runtime.one_process import rank
from tests.torchrun import torchrun_environment

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


def needs(name: str) -> pytest.MarkDecorator:
    is_absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_absent, reason=f"{name} is not installed")


WORDS = {"<pad>": 0, "<unk>": 1, **{f"w{number}": 2 + number for number in range(30)}}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}


def save_bert(directory: Path) -> None:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(WORDS), num_attention_heads=2, **SIZES, **no_dropout)
    BertModel(config).save_pretrained(directory)


@needs("sentence_transformers")
@on_ranks(2, deadline=250.0)
@pytest.mark.parametrize("loss", ["MultipleNegativesRanking", "CachedMultipleNegativesRanking"])
def test_embeddings_and_their_files_are_those_of_ddp(loss: str, tmp_path: Path) -> None:
    library: Any = importlib.import_module("sentence_transformers")
    losses_of: Any = importlib.import_module("sentence_transformers.losses")
    from datasets import Dataset  # noqa: PLC0415 (the library needs it)

    class Sharded(ShardedTrainer, library.SentenceTransformerTrainer):  # type: ignore[misc]
        pass

    rows = [{"anchor": f"w{i} w{i + 1}", "positive": f"w{i} w{2 * i}"} for i in range(12)]
    text = ["w1 w2", "w7"]
    if rank() == 0:
        save_bert(tmp_path / "bert")
    dist.barrier()

    def train(engine: str, resume: str | None = None) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        parts: Any = importlib.import_module("sentence_transformers.models")
        bert = parts.Transformer(str(tmp_path / "bert"))
        modules = [bert, parts.Pooling(32), parts.Dense(32, 16)]
        model = library.SentenceTransformer(modules=modules, device="cpu")
        out = tmp_path / engine
        arguments = library.SentenceTransformerTrainingArguments(
            str(out), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=2, max_steps=4,
            logging_steps=1, learning_rate=1e-3, save_steps=2, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        options: Any = {"model": model, "args": arguments, "train_dataset": Dataset.from_list(rows)}
        options["loss"] = getattr(losses_of, f"{loss}Loss")(model)
        if engine == "ddp":
            trainer = library.SentenceTransformerTrainer(**options)
        else:
            trainer = Sharded(fully_shard={"units": BertLayer}, **options)
        trainer.train(resume_from_checkpoint=resume and str(out / resume))
        if trainer.args.should_save or engine != "ddp":
            trainer.save_model(str(out / "model"))
        dist.barrier()
        opened = library.SentenceTransformer(str(out / "model"), device="cpu")
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        embedded = trainer.model.encode(text, convert_to_tensor=True)
        torch.testing.assert_close(opened.encode(text, convert_to_tensor=True), embedded)
        of_ddp = tmp_path / "ddp" / "model"
        for name in ("modules.json", "config.json", "2_Dense/config.json"):
            assert (out / "model" / name).read_bytes() == (of_ddp / name).read_bytes()
        return losses, embedded

    with torchrun_environment():
        expected, expected_embedded = train("ddp")
        assert len(expected) == 4
        for resume in (None, "checkpoint-2"):
            losses, embedded = train("ours", resume)
            assert losses == pytest.approx(expected, rel=1e-4)
            torch.testing.assert_close(embedded, expected_embedded, rtol=1e-3, atol=1e-5)


@needs("diffusers")
@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_models_of_diffusers_save_their_files(granularity: Any, tmp_path: Path) -> None:
    library: Any = importlib.import_module("diffusers")
    for name in ("whole", "sharded"):
        torch.manual_seed(0)
        model: Any = library.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2,
            sample_size=8, norm_num_groups=4,
        )  # fmt: skip
        if name == "sharded":
            sw.fully_shard(model, units="auto", granularity=granularity)
        if name == "sharded" or rank() == 0:
            model.save_pretrained(tmp_path / name)
    if rank() == 0:
        files = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
        assert len(files) == 2
        assert files == {f.name: f.read_bytes() for f in (tmp_path / "sharded").iterdir()}
