"""The Llama example, with a much smaller model."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shardwise.train.build import build_model
from shardwise.train.config import read_config
from shardwise.train.run import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama"


def test_the_example_has_ten_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    model = build_model(read_config(EXAMPLE / "train.toml"))
    assert 9.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 10.5e6


@pytest.mark.thorough
def test_the_example_trains_and_generates(tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 40, "intermediate_size": 96, "num_hidden_layers": 2}
    config: Any = AutoConfig.from_pretrained(EXAMPLE, **sizes)
    config.save_pretrained(tmp_path / "llama")
    source = Path(json.__file__).parent
    settings = [
        f"run.directory={tmp_path / 'run'}",
        f"model.path={tmp_path / 'llama'}",
        "model.context=64",
        "tokenizer.vocabulary=512",
        f"data.path={source}",
        f"data.cache={tmp_path / 'cache'}",
        "data.validation_share=0.3",
        "train.steps=40",
        "train.validate_every=20",
        "train.global_batch=8",
        "train.validation_batches=2",
        "sample.bytes=10",
    ]
    run(read_config(EXAMPLE / "train.toml", settings))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.5
    exported = tmp_path / "run" / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    inputs = tokenizer("def main(", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=True)
    assert tokenizer.decode(tokens[0]).startswith("def main(")
