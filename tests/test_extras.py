"""Each extra of pyproject.toml: without its packages, what needs them names the extra."""

import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import shardwise as sw
from shardwise.bench import report
from shardwise.checkpoint.stores import folder_at
from shardwise.cli.run_verify import BUILT_IN
from shardwise.errors import PackageMissing
from shardwise.train.config import Config
from shardwise.train.display import draw_losses
from shardwise.train.documents import read_arrow, read_parquet
from shardwise.train.huggingface import HuggingFace
from shardwise.train.sinks import check_trackers
from shardwise.train.tokenizer import Subwords
from shardwise.verification.subjects import find_subjects

FILE = Path("x.png")


def with_model() -> HuggingFace:
    return HuggingFace(Config.model_validate({"model": {"path": "examples/llama"}}))


# The extra, a package of it, and what needs that package.
NEEDED: dict[str, tuple[str, str, Callable[[], object]]] = {
    "tokenizer.path": ("hf", "transformers", lambda: Subwords.open(".")),
    "tokenizer.vocabulary": ("hf", "transformers", lambda: Subwords.train([], 300)),
    "model.path": ("hf", "transformers", lambda: with_model().settings),
    "model.lora_rank": ("hf", "peft", lambda: with_adapters()),  # noqa: PLW0108 (defined below)
    "a Parquet file": ("hf", "pyarrow", lambda: next(read_parquet(FILE, "text"))),
    "an Arrow file": ("hf", "pyarrow", lambda: next(read_arrow(FILE, "text"))),
    "verify t5": ("hf", "transformers", lambda: find_subjects("t5", BUILT_IN)),
    "integrations.transformers": ("hf", "transformers", lambda: integration("transformers")),
    "integrations.accelerate": ("hf", "accelerate", lambda: integration("accelerate")),
    "integrations.lightning": ("lightning", "lightning", lambda: integration("lightning")),
    "sw.elastic": ("ft", "torchft", lambda: sw.elastic(nn.Linear(1, 1), None, None)),  # type: ignore[arg-type]
    "TensorBoard": ("log", "tensorboard", lambda: with_sink("tensorboard")),
    "W&B": ("log", "wandb", lambda: with_sink("wandb")),
    "loss.png": ("plot", "matplotlib", lambda: draw_losses(FILE, "title", [])),
    "bench.png": ("bench", "matplotlib", lambda: report._draw(FILE, SimpleNamespace())),  # type: ignore[arg-type]
}


def with_adapters() -> nn.Module:
    return HuggingFace._with_adapters(SimpleNamespace(), nn.Identity())  # type: ignore[arg-type]


def integration(name: str) -> object:
    return import_module(f"shardwise.integrations.{name}")


def with_sink(name: str) -> None:
    check_trackers(Config.model_validate({"run": {"sinks": [name]}}))


@pytest.mark.parametrize("what", NEEDED)
def test_a_missing_package_is_named_with_its_extra(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, package, call = NEEDED[what]
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"shardwise.integrations.{package}", raising=False)
    advice = rf"{package} is not installed; pip install '\.\[{extra}\]' in a clone of shardwise$"
    with pytest.raises(PackageMissing, match=advice):
        call()


@pytest.mark.parametrize("url", ["s3://bucket/x", "s3a://bucket/x"])
def test_a_checkpoint_in_s3_names_its_extra(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        sw.CheckpointError, match=r"\(pip install '\.\[s3\]' in a clone of shardwise\)"
    ):
        folder_at(url)


def test_every_extra_is_here() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    named = {extra for extra, _, _ in NEEDED.values()} | {"s3"}
    assert set(extras) == named | {"docs", "test"}
