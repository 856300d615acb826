"""Models of transformers: built on the meta device, or loaded; trained, adapted and exported."""

import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoTokenizer, BertConfig, OPTConfig, ViTConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from shardwise.errors import ConfigError
from shardwise.forecast.planned import plan_of
from shardwise.train import run as run_module
from shardwise.train.build import build_model, check
from shardwise.train.config import Config, changed_config
from shardwise.train.data import open_corpus
from shardwise.train.display import Display
from shardwise.train.huggingface import HuggingFace
from shardwise.train.loop import Result, train
from shardwise.train.planned import configuration_of
from shardwise.train.run_directory import identity, open_run
from shardwise.train.source import source_of
from tests.models import llama_config
from tests.ranks import run_on
from tests.train.running import Document, Recorder, config_with, cpu_world

TEXTS = [f"def f{n}(x):\n    return x + {n}\n" + f"# {n}\n" * (n % 3) for n in range(80)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and the config of a small Llama."""
    path = tmp_path_factory.mktemp("hf")
    lines = (json.dumps({"text": text}) for text in TEXTS)
    (path / "texts.jsonl").write_text("\n".join(lines))
    config = llama_config(vocab_size=300, intermediate_size=64, tie_word_embeddings=True)
    config.save_pretrained(str(path / "llama"))
    return path


def config_of(root: Path, directory: str = "", **sections: dict[str, Any]) -> Config:
    document: Document = {
        "run": {"directory": str(root / directory)},
        "model": {"path": str(root / "llama"), "context": 32},
        "tokenizer": {"vocabulary": 300},
        "data": {"path": str(root / "texts.jsonl"), "cache": str(root / "cache")},
        "train": {
            "steps": 6, "warmup_share": 0, "global_batch": 4, "validation_batches": 2, "lr": 1e-2
        },
        "sample": {"bytes": 4},
        "checkpoint": {"every": 6},
        "record": {"enabled": False},
    }  # fmt: skip
    return config_with(document, sections)


def _train(config: Config) -> tuple[list[float], Result, Path]:
    world, sink = cpu_world(), Recorder()
    run = world.on_first(lambda: open_run(config))
    result = train(config, world, run, [sink])
    return sink.losses, result, run.path


def run(config: Config, num_ranks: int = 2) -> tuple[list[float], Result, Path]:
    config = config.with_ranks(num_ranks)
    check(config)
    return run_on(num_ranks, _train, config)[0]


@pytest.fixture(scope="module")
def trained(root: Path) -> tuple[list[float], Path]:
    """The losses of a run on two ranks, and the directory of its exported model."""
    config = config_of(root, "run")
    (root / "llama" / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    losses, _, path = run(config)
    checkpoint = path / "checkpoints" / "step-00000006"
    HuggingFace(config).export(checkpoint, path / "model", open_corpus(config).tokenizer)
    return losses, path / "model"


def test_losses_do_not_depend_on_ranks(root: Path, trained: tuple[list[float], Path]) -> None:
    losses, _ = trained
    assert losses[-1] < losses[0] - 0.3
    other, _, _ = run(config_of(root, "alone", train={"micro_batch": 2}), num_ranks=1)
    assert other == pytest.approx(losses, rel=1e-5)


def test_transformers_generates_from_what_is_exported(trained: tuple[list[float], Path]) -> None:
    _, exported = trained
    model: Any = LlamaForCausalLM.from_pretrained(exported)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer("def ", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("def ")


def test_what_ends_an_answer_is_exported_with_its_tokenizer(
    root: Path, trained: tuple[list[float], Path], tmp_path: Path
) -> None:
    assert not (trained[1] / "generation_config.json").exists(), "it has a tokenizer of its own"
    start = shutil.copytree(trained[1], tmp_path / "start")
    (start / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    config = config_of(root, model={"path": str(start)}, tokenizer={"vocabulary": 0})
    checkpoint = root / "run" / "checkpoints" / "step-00000006"
    HuggingFace(config).export(checkpoint, tmp_path / "model", open_corpus(config).tokenizer)
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.generation_config.eos_token_id == [0, 7]


def test_training_continues_from_weights(root: Path, trained: tuple[list[float], Path]) -> None:
    losses, exported = trained
    config = config_of(root, "more", model={"path": str(exported)}, tokenizer={"vocabulary": 0})
    more, _, _ = run(config)
    assert more[0] < losses[-1] + 0.3
    scratch = config_of(
        root, "scratch", model={"path": str(exported), "from_scratch": True},
        tokenizer={"vocabulary": 0},
    )  # fmt: skip
    again, _, _ = run(scratch)
    assert again == pytest.approx(losses, rel=1e-5)


def test_weights_are_not_trained_with_another_tokenizer(
    root: Path, trained: tuple[list[float], Path]
) -> None:
    check(config_of(root, "errors", model={"path": str(trained[1])}))  # the same one
    smaller = {"vocabulary": 290}
    config = config_of(root, "errors", model={"path": str(trained[1])}, tokenizer=smaller)
    with pytest.raises(ConfigError, match=r"tokenizer\.vocabulary=290 trains .* to use tokenizer"):
        check(config)


@pytest.mark.thorough
def test_adapters_are_merged_and_exported(root: Path, trained: tuple[list[float], Path]) -> None:
    start: Document = {
        "model": {"path": str(trained[1])},
        "tokenizer": {"vocabulary": 0},
    }
    config = config_of(root, "lora", **start)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora_rank": 4})})
    losses, result, path = run(config)
    untrained, before, _ = run(config_of(root, "untrained", train={"lr": 1e-12}, **start))
    assert losses[0] == pytest.approx(untrained[0], rel=1e-5)  # adapters add nothing at first
    assert before.summary is not None
    assert result.summary is not None
    assert result.summary.validation_loss < before.summary.validation_loss - 0.02
    checkpoint = path / "checkpoints" / "step-00000006"
    HuggingFace(config).export(checkpoint, path / "model", open_corpus(config).tokenizer)
    merged: Any = LlamaForCausalLM.from_pretrained(path / "model")
    base: Any = LlamaForCausalLM.from_pretrained(trained[1])
    tokens = torch.randint(300, (1, 20), generator=torch.Generator().manual_seed(0))
    without_adapter_names = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, str(path / "model" / "adapter"))(tokens).logits
    assert torch.allclose(merged(tokens).logits, adapted, atol=1e-5)
    assert not torch.allclose(adapted, without_adapter_names, atol=1e-2)


@pytest.mark.thorough
def test_the_frozen_base_of_adapters_is_in_the_dtype_of_compute(
    root: Path, trained: tuple[list[float], Path]
) -> None:
    start: Document = {
        "model": {"path": str(trained[1]), "lora_rank": 4},
        "tokenizer": {"vocabulary": 0},
    }
    config = config_of(root, "half", precision={"compute": "bfloat16"}, **start)
    plan = plan_of(build_model(config), configuration_of(config))
    dtypes = {one.dtype for unit in plan.units for one in unit.parameters if not one.trainable}
    assert dtypes == {"bfloat16"}
    assert {p.dtype for u in plan.units for p in u.parameters if p.trainable} == {"float32"}
    losses, _, path = run(config)
    whole, _, _ = run(config_of(root, "whole", **start))
    assert losses == pytest.approx(whole, rel=0.02)
    checkpoint = path / "checkpoints" / "step-00000006"
    HuggingFace(config).export(checkpoint, path / "model", open_corpus(config).tokenizer)
    merged: Any = LlamaForCausalLM.from_pretrained(path / "model")
    assert torch.isfinite(merged(torch.arange(20)[None]).logits).all()


def test_adapters_are_of_linear_layers(root: Path) -> None:
    changed = {"lora_rank": 2, "lora_targets": ["embed_tokens"]}
    with pytest.raises(ConfigError, match="expected only linear layers"):
        check(config_of(root, "errors", model=changed))
    changed["lora_targets"] = ["q_prj"]
    with pytest.raises(ConfigError, match=r"model\.lora_targets=\('q_prj',\): .*not found"):
        check(config_of(root, "errors", model=changed))


def test_packed_documents_are_as_if_alone(trained: tuple[list[float], Path]) -> None:
    model: Any = LlamaForCausalLM.from_pretrained(trained[1])
    tokens = torch.randint(300, (1, 20), generator=torch.Generator().manual_seed(0))
    parts = torch.split(tokens, [6, 1, 13], dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    alone = torch.cat([HuggingFace.logits(model, part) for part in parts], dim=1)
    packed = HuggingFace.logits(model, tokens, positions)
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"path": "/no/such"}, "expected a directory with a config.json"),
        ({"context": 128}, "max_position_embeddings=64, but .* needs 128"),
    ],
)
def test_errors_name_the_key(root: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config_of(root, "errors", model=model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (BertConfig(), "model_type='bert' attends to later tokens.* \"is_decoder\": true"),
        (ViTConfig(), "model_type='vit': expected a causal language model"),
    ],
)
def test_a_model_that_is_not_causal_is_refused(
    tmp_path: Path, root: Path, settings: Any, message: str
) -> None:
    settings.save_pretrained(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=message):
        check(config_of(root, "errors", model={"path": str(tmp_path / "model")}))


def test_a_run_does_not_resume_with_adapters_of_another_scale(root: Path) -> None:
    models: list[dict[str, Any]] = [{"lora_rank": 2, "lora_alpha": alpha} for alpha in (8, 16)]
    one, other = (source_of(config_of(root, model=model)).identity for model in models)
    assert {key for key in one if one[key] != other[key]} == {"model.lora_alpha"}
    targets = source_of(config_of(root, model=models[1] | {"lora_targets": ["q_proj"]})).identity
    assert {key for key in other if other[key] != targets[key]} == {"model.lora_targets"}


def test_a_run_without_checkpoints_says_that_nothing_is_exported(
    root: Path, tmp_path: Path
) -> None:
    config = config_of(root, str(tmp_path), checkpoint={"every": 0})
    out, opened = io.StringIO(), open_run(config)
    corpus = open_corpus(config)
    run_module._export(config, opened, corpus, Display(Console(file=out), config, opened, corpus))
    assert "checkpoint.every=0 has saved no checkpoint" in out.getvalue()


def test_a_vocabulary_that_is_too_large(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=300, but .* needs 400"):
        check(config_of(root, "errors", tokenizer={"vocabulary": 400}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_weights_that_cannot_be_read_are_not_replaced_by_random_values(
    root: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(root / "llama", tmp_path / "model")
    (tmp_path / "model" / name).touch()
    (tmp_path / "model" / "training_args.bin").touch()
    model = {"path": str(tmp_path / "model")}
    with pytest.raises(ConfigError, match=rf"has weights in {name}, but only \*\.safetensors"):
        check(config_of(root, "errors", model=model))
    check(config_of(root, "errors", model=model | {"from_scratch": True}))


def test_quantized_weights_are_not_read_as_if_they_were_values(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "llama", tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    check(config_of(root, "errors", model={"path": str(tmp_path / "model")}))  # it has no weights
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="has quantized weights, which cannot be trained"):
        check(config_of(root, "errors", model={"path": str(tmp_path / "model")}))


@pytest.mark.parametrize(("rank", "usual"), [(0, "2e-5"), (2, "2e-4 for adapters")])
def test_weights_are_not_trained_with_the_learning_rate_for_random_values(
    root: Path, trained: tuple[list[float], Path], rank: int, usual: str
) -> None:
    model = {"path": str(trained[1]), "context": 32, "lora_rank": rank}
    document: Document = {
        "model": model,
        "data": {"path": str(root / "texts.jsonl"), "cache": str(root / "cache")},
    }
    with pytest.raises(ConfigError, match=rf"train.lr is not set, .* 0\.004, .*often {usual}"):
        check(Config.model_validate(document))
    check(Config.model_validate(document | {"train": {"lr": 4e-3}}))
    if not rank:
        check(
            Config.model_validate(document | {"model": {**document["model"], "from_scratch": True}})
        )


def test_adapters_need_weights(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights .* for model\.lora_rank=2 to adapt"):
        check(config_of(root, "errors", model={"lora_rank": 2}))


def test_a_run_resumes_from_a_moved_model_with_another_version_of_transformers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "llama", tmp_path / "moved")
    before = source_of(config_of(root)).identity
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.0")
    assert source_of(config_of(root, model={"path": str(tmp_path / "moved")})).identity == before
    settings = llama_config(vocab_size=300, intermediate_size=32, tie_word_embeddings=True)
    settings.save_pretrained(str(tmp_path / "other"))
    other = source_of(config_of(root, model={"path": str(tmp_path / "other")})).identity
    assert {key for key in before if before[key] != other[key]} == {"model.path"}


def test_a_run_resumes_from_a_checkpoint_of_an_older_version(
    root: Path, trained: tuple[list[float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which had the whole configuration of the model, and neither optimizer nor targets."""
    shutil.copytree(trained[1].parent, tmp_path / "run")
    config = changed_config(config_of(root), {"run": {"directory": str(tmp_path / "run")}})
    saved = identity(config, open_corpus(config))
    del saved["train.optimizer"]
    whole = HuggingFace(config).settings.to_dict() | {"transformers_version": "4.0"}
    state = {"step": 6, "shared": saved | {"model.path": json.dumps(whole, sort_keys=True)}}
    monkeypatch.setattr("shardwise.checkpoint.tree.decode", lambda *_: state)
    assert open_run(config).step == 6
    other = json.dumps(whole | {"intermediate_size": 32})
    state["shared"] = saved | {"model.path": other}
    with pytest.raises(ConfigError, match=r"model\.path: the config\.json differs"):
        open_run(config)


def test_a_callback_that_does_not_exist_is_found_before_training(root: Path) -> None:
    config = config_of(root, "errors", run={"callbacks": ["tests.train.running:NoSuch"]})
    with pytest.raises(ConfigError, match=r"run\.callbacks='tests\.train\.running:NoSuch'"):
        check(config)
    config = config_of(root, "errors", run={"callbacks": ["NoSuch"]})
    with pytest.raises(
        ConfigError, match=r"run\.callbacks='NoSuch': expected package\.module:attr"
    ):
        check(config)


def _warnings_of(config: Config) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train(config)
    return [str(one.message) for one in caught if "keep documents apart" in str(one.message)]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_model_in_which_documents_attend_to_each_other_is_named(
    root: Path, tmp_path: Path, name: str
) -> None:
    """OPT ignores positions; Llama derives its mask from them."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    opt = OPTConfig(**sizes, word_embed_proj_dim=32, num_attention_heads=4)
    opt.save_pretrained(str(tmp_path / "opt"))
    path = {"opt": tmp_path / "opt", "llama": root / "llama"}[name]
    config = config_of(tmp_path, "run", model={"path": str(path)}, train={"steps": 1})
    data = {"path": str(root / "texts.jsonl"), "cache": str(root / "cache")}
    config = changed_config(config, {"data": data}).with_ranks(2)
    first, second = run_on(2, _warnings_of, config)
    assert second == []
    assert len(first) == (name == "opt")
