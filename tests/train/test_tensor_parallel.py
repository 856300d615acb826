"""Tensor parallelism of Hugging Face models by their plans: the same training as on one rank."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from shardwise.errors import ConfigError
from shardwise.launch.world import World
from shardwise.plan.plan import Plan
from shardwise.train import utilization
from shardwise.train.build import build_model, check, memory_of, plan_of_rank
from shardwise.train.config import Config
from shardwise.train.data import open_corpus
from shardwise.train.huggingface import HuggingFace
from shardwise.train.loop import train
from shardwise.train.run_directory import open_run
from shardwise.train.sinks import StepMetrics
from shardwise.train.tensor_parallel import TensorRanks, part_of_rank
from shardwise.train.trainer import Trainer
from tests.covering import leaving
from tests.ranks import RankFailed, run_on
from tests.runtime.one_process import full
from tests.train.running import Document, Recorder, config_with, cpu_world

SIZES: dict[str, Any] = {
    "vocab_size": 301,  # an odd number, so that parts of the embedding differ in size
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED, tie_word_embeddings=True),  # with biases
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=8),  # with norms of each head
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=8),  # whose embedding has a buffer
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, tie_word_embeddings=True),  # embedding not in plan
}
RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"tensor": 2}),
    "2 x 2": (4, {"tensor": 2}),
    "hsdp": (4, {"tensor": 2, "strategy": "hsdp", "replicas": 2}),
    "4": (4, {"tensor": 4}),
}
TEXTS = [f"def f{n}(x):\n    return x + {n}\n" + f"# {n}\n" * (n % 3) for n in range(80)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and the configs of small models."""
    path = tmp_path_factory.mktemp("tensor")
    lines = (json.dumps({"text": text}) for text in TEXTS)
    (path / "texts.jsonl").write_text("\n".join(lines))
    for name, settings in FAMILIES.items():
        settings().save_pretrained(str(path / name))
    return path


def config_of(root: Path, family: str, directory: str = "", **sections: dict[str, Any]) -> Config:
    document: Document = {
        "run": {"directory": str(root / f"{family}-{directory}")},
        "model": {"path": str(root / family), "context": 32},
        "tokenizer": {"vocabulary": 300},
        "data": {"path": str(root / "texts.jsonl"), "cache": str(root / "cache")},
        "train": {
            "steps": 3, "warmup_share": 0, "global_batch": 4, "validation_batches": 1, "lr": 1e-2,
            "grad_clip": 0.5,
            # With a small eps, Adam would turn a gradient that is only rounding error into a step.
            "optimizer_options": {"eps": 1e-3},
        },
        "sample": {"bytes": 0},
        "checkpoint": {"every": 3},
        "record": {"enabled": False},
    }  # fmt: skip
    return config_with(document, sections)


def _train(config: Config) -> list[StepMetrics]:
    world, sink = cpu_world(), Recorder()
    run = world.on_first(lambda: open_run(config))
    train(config, world, run, [sink])
    return sink.records


def run(config: Config, num_ranks: int) -> list[StepMetrics]:
    config = config.with_ranks(num_ranks)
    check(config)
    return run_on(num_ranks, _train, config)[0]


def assert_same(one: list[StepMetrics], other: list[StepMetrics], rel: float = 1e-6) -> None:
    assert [r.loss for r in one] == pytest.approx([r.loss for r in other], rel=rel)
    norms, expected = ([r.grad_norm for r in records] for records in (one, other))
    is_known = None not in expected
    assert norms == (pytest.approx(expected, rel=rel) if is_known else expected)
    validation = [records[-1].validation_loss for records in (one, other)]
    assert validation[0] == pytest.approx(validation[1], rel=rel)


def exported(config: Config) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint, in transformers' format."""
    path = Path(config.run.directory)
    checkpoint = path / "checkpoints" / f"step-{config.train.steps:08}"
    HuggingFace(config).export(checkpoint, path / "model", open_corpus(config).tokenizer)
    return load_file(path / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def on_one_rank(root: Path) -> Callable[[str], list[StepMetrics]]:
    """The records of a run on one rank, which each family has once."""
    known: dict[str, list[StepMetrics]] = {}

    def records(family: str) -> list[StepMetrics]:
        if family not in known:
            known[family] = run(config_of(root, family, "one"), 1)
        return known[family]

    return records


CASES = [(family, ranks) for family in FAMILIES for ranks in RANKS]
ORDINARY = {("llama", "2"), ("qwen2", "2 x 2"), ("gpt_neox", "2")}


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(*case, marks=() if case in ORDINARY else pytest.mark.thorough)
        for case in CASES
        if case[1] != "4" or case[0] == "gpt_neox"  # the others have two key-value heads
    ],
)
def test_losses_norms_and_weights_equal_those_of_one_rank(
    root: Path, on_one_rank: Callable[[str], list[StepMetrics]], family: str, ranks: str
) -> None:
    num_ranks, shard = RANKS[ranks]
    config = config_of(root, family, ranks, shard=shard)
    assert_same(run(config, num_ranks), on_one_rank(family))
    weights, expected = exported(config), exported(config_of(root, family, "one"))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], rtol=1e-5, atol=1e-6), name


def test_values_and_the_plan_are_those_of_one_rank(root: Path) -> None:
    config = config_of(root, "qwen3", shard={"tensor": 2}).with_ranks(2)
    [one] = run_on(1, _start, config_of(root, "qwen3").with_ranks(1))
    expected = plan_of_rank(config)
    found = run_on(2, _start, config)
    assert found[0][0] == expected, "the memory would not be what is forecast"
    for _, values in found:
        assert values.keys() == one[1].keys()
        assert all(torch.equal(value, one[1][name]) for name, value in values.items())


def test_weights_are_loaded_into_the_parts_of_ranks(root: Path) -> None:
    on_disk = LlamaForCausalLM(FAMILIES["llama"]())
    on_disk.save_pretrained(str(root / "trained"))
    config = config_of(root, "trained", shard={"tensor": 2}).with_ranks(4)
    for _, values in run_on(4, _start, config):
        for name, value in on_disk.state_dict().items():
            assert torch.equal(values[name], value), name


def _start(config: Config) -> tuple[Plan, dict[str, torch.Tensor]]:
    """The plan and all values of a run before its first step."""
    trainer = Trainer(config, cpu_world())
    numel = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert numel == sum(parameter.numel() for parameter in build_model(config).parameters())
    return trainer.runtime.plan, {n: full(p.detach()) for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("degrees", [(2, 1), pytest.param((1, 2), marks=pytest.mark.thorough)])
def test_a_run_is_resumed_with_another_degree(
    root: Path, tmp_path: Path, degrees: tuple[int, int]
) -> None:
    """On the same number of ranks, whose random states are restored."""
    changes: Document = {"train": {"steps": 4}, "checkpoint": {"every": 2}}
    runs = []
    for degree in (*degrees, degrees[0]):
        sections = {**changes, "run": {"directory": str(tmp_path / "run")}}
        runs.append(run(config_of(root, "llama", "", **sections, shard={"tensor": degree}), 2))
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    whole, *resumed = runs
    assert [record.step for record in resumed[0]] == [3, 4]
    for records in resumed:
        assert_same(records, whole[2:])


def test_a_signal_on_a_rank_of_the_tensor_axis_stops_all(root: Path) -> None:
    config = config_of(root, "llama", "stopped", shard={"tensor": 2}).with_ranks(2)
    assert run_on(2, _train_until_signal, config) == [signal.SIGTERM] * 2


def _train_until_signal(config: Config) -> int:
    world = cpu_world()
    run = world.on_first(lambda: open_run(config))
    return train(config, world, run, [SignalOnLastRank(world)]).stopped_by


class SignalOnLastRank(Recorder):
    """Sends a signal to the last rank after the first step."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._is_last = world.rank == world.size - 1

    def log(self, record: StepMetrics) -> None:
        if self._is_last and record.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


OPTIONS: dict[str, Document] = {
    "a recording, a selective checkpoint of every block, whole gradients": {
        "record": {"enabled": True, "steps": [2]},
        "train": {"micro_batch": 1},
        "memory": {"checkpoint_every": 1, "checkpoint": "selective", "accumulate": "whole"},
    },
    "a step in backward": {"train": {"grad_clip": 0.0}, "memory": {"step_in_backward": True}},
    "on the host": {"memory": {"offload": "all", "activations": "host"}},
    "reentrant": {"memory": {"checkpoint_every": 1, "checkpoint": "reentrant"}},
    "products": {"memory": {"checkpoint_every": 2, "checkpoint": "products"}},
    "momentum": {"train": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}},
    "zero1": {"shard": {"strategy": "zero1"}},
    "ddp": {"shard": {"strategy": "ddp", "units": 1000}},
}


@pytest.mark.parametrize("name", leaving([*OPTIONS][1:], OPTIONS))
def test_losses_do_not_depend_on_options(root: Path, name: str) -> None:
    options = OPTIONS[name]
    alone = run(config_of(root, "qwen3", "option-1", **options | UNSAVED), 1)
    shard = {**options.get("shard", {}), "tensor": 2}
    config = config_of(root, "qwen3", "option-4", **options | UNSAVED | {"shard": shard})
    records = run(config, 4)
    assert_same(records, alone)
    if config.record.enabled:
        path = Path(config.run.directory)
        for place in (path, path / "tensor-1"):
            files = sorted(file.name for file in (place / "recording").iterdir())
            assert files == ["rank-00000.jsonl", "rank-00001.jsonl"]
        assert all(0 <= (record.slowest_rank or 0) < 4 for record in records)
        assert any(record.exposed_seconds for record in records)
        open_run(config)  # starts over
        assert not (path / "tensor-1").exists()


UNSAVED: Document = {"checkpoint": {"every": 0}, "run": {"overwrite": True}}


def test_bfloat16_has_nearly_the_same_losses(
    root: Path, on_one_rank: Callable[[str], list[StepMetrics]]
) -> None:
    half = run(config_of(root, "llama", shard={"tensor": 2}, precision={"compute": "bfloat16"}), 2)
    losses, expected = ([r.loss for r in one] for one in (half, on_one_rank("llama")))
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses != pytest.approx(expected, rel=1e-6)


def test_a_plan_that_leaves_out_a_module_is_found_in_the_first_step(root: Path) -> None:
    config = config_of(root, "qwen3", "incomplete", shard={"tensor": 2}).with_ranks(2)
    message = r"k_norm\.weight: its gradient differs .* plan .* is incomplete; set shard\.tensor=1"
    with pytest.raises(RankFailed, match=message):
        run_on(2, _train_without_norm, config)


def _train_without_norm(config: Config) -> None:
    with mock.patch.dict(Qwen3Config.base_model_tp_plan or {}):
        del Qwen3Config.base_model_tp_plan["layers.*.self_attn.k_norm"]
        _train(config)


def test_memory_is_forecast_for_the_part_of_a_rank(root: Path) -> None:
    shard: dict[str, Any] = {"strategy": "ddp"}
    whole, process = memory_of(config_of(root, "llama", shard=shard).with_ranks(2), "cpu")
    config = config_of(root, "llama", shard=shard | {"tensor": 2}).with_ranks(2)
    part, same = memory_of(config, "cpu")
    assert same == process
    assert whole["parameters"] == process["parameters"]
    layers = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    embeddings = (301 * 32, 301 * 32 - 151 * 32)  # the first rank has the larger part
    divided = 4 * (layers // 2 + 2 * embeddings[1])
    assert process["parameters"] - part["parameters"] == divided
    assert process["optimizer"] - part["optimizer"] == 2 * divided


FLOAT64 = [  # families that compute in the dtype of their inputs throughout
    "arcee",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "gpt_neox",
    "granite",
    "helium",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral",
    "mistral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
]


@pytest.mark.parametrize("family", leaving({*FLOAT64} - {"gemma2", "phi3"}, FLOAT64))
def test_gradients_of_a_family_equal_those_of_one_rank(family: str) -> None:
    gradients = run_on(2, _gradients, family)
    assert not any(gradients), "parameters whose gradients differ"


def _gradients(family: str) -> list[str]:
    """The names of parameters whose gradients differ from those of the whole model."""
    config = Config.model_validate({"shard": {"nproc": 2, "tensor": 2}})
    whole, divided = _tiny(family), _tiny(family)
    assert part_of_rank(_tiny(family), config) is not None
    TensorRanks(config, cpu_world()).divide(divided)
    tokens = torch.arange(20).view(2, 10) % 37
    for model in (whole, divided):
        logits = model(input_ids=tokens, use_cache=False).logits
        functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()  # type: ignore[no-untyped-call]
    parameters = dict(divided.named_parameters())
    assert any(isinstance(parameter, DTensor) for parameter in parameters.values())
    return [
        name
        for name, parameter in whole.named_parameters()
        if parameter.grad is not None
        and not torch.allclose(full(parameters[name].grad), parameter.grad, rtol=1e-10, atol=1e-13)
    ]


def _tiny(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    sizes = GROUPED | {"vocab_size": 37, "head_dim": 8}
    sizes |= {"attention_dropout": 0.0, "residual_dropout": 0.0}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    known = {key: size for key, size in sizes.items() if hasattr(kind(), key)}
    if layer_types := getattr(kind(), "layer_types", None):
        known["layer_types"] = layer_types[:2]
    torch.manual_seed(0)
    settings = kind(**known, **tokens)
    return AutoModelForCausalLM.from_config(
        settings, dtype=torch.float64, attn_implementation="eager"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"path": ""}}, "the embedded GPT has no plan"),
        ({"model": {"lora_rank": 2}}, "model.lora_rank=2 with .* set model.lora_rank=0 or"),
        ({"train": {"compile": True}}, "train.compile=true with .* set train.compile=false or"),
        ({"train": {"optimizer": "muon"}}, 'train.optimizer="muon" .* train.optimizer="adamw"'),
        ({"train": {"optimizer": "adam8bit"}}, 'train.optimizer="adam8bit" with shard.tensor=2'),
        ({"precision": {"compute": "float16"}}, 'set precision.compute="bfloat16" or shard'),
        ({"shard": {"strategy": "hfsdp"}}, 'set shard.strategy="hsdp" or shard.tensor=1'),
        ({"shard": {"tensor": 3}}, "shard.tensor=3 does not divide the 4 ranks; .* 1, 2, 4"),
        ({"shard": {"tensor": 4}}, "shard.tensor=4 does not divide num_key_value_heads=2"),
        ({"shard": {"strategy": "hsdp", "replicas": 4}}, "the 2 groups of 2 ranks"),
        ({"train": {"global_batch": 3}}, "train.global_batch=3 is not divisible by 2 ranks"),
    ],
)
def test_what_is_not_supported_is_named(
    root: Path, changes: dict[str, dict[str, Any]], message: str
) -> None:
    shard = {"tensor": 2, **changes.get("shard", {})}
    config = config_of(root, "llama", "", **changes | {"shard": shard})
    with pytest.raises(ConfigError, match=message):
        check(config.with_ranks(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPT2Config, "no plan .* of model_type='gpt2'; set shard.tensor=1"),
        (lambda: MixtralConfig(**GROUPED), "'mixtral' has the style .* is not supported"),
        (
            lambda: LlamaConfig(**GROUPED | {"intermediate_size": 27}),
            "does not divide out_features=27 of model.layers.0.mlp.gate_proj; .* 1, 3, 9, 27",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_named(
    root: Path, tmp_path: Path, settings: Callable[[], PreTrainedConfig], message: str
) -> None:
    settings().save_pretrained(str(tmp_path / "model"))
    config = config_of(root, "llama", model={"path": str(tmp_path / "model"), "context": 32})
    shard = config.shard.model_copy(update={"tensor": 2})
    with pytest.raises(ConfigError, match=message):
        check(config.model_copy(update={"shard": shard}).with_ranks(2))


def test_a_tied_parameter_that_is_cut_along_two_dims_is_named(root: Path) -> None:
    config = config_of(root, "qwen2", shard={"tensor": 2}).with_ranks(2)
    plan: dict[str, str] = Qwen2Config.base_model_tp_plan
    with mock.patch.dict(plan, embed_tokens="embedding_colwise"):
        message = r"model\.embed_tokens\.weight and lm_head\.weight are one parameter, but .* dims"
        with pytest.raises(ConfigError, match=message):
            check(config)


def _share_of_peak(config: Config) -> float | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilization, "peak_flops", lambda _device, _dtype: 1e9)
        return Trainer(config, cpu_world()).share_of_peak


def test_mfu_counts_the_whole_model(root: Path) -> None:
    config = config_of(root, "llama", shard={"tensor": 2}).with_ranks(2)
    whole = config_of(root, "llama").with_ranks(2)
    assert run_on(2, _share_of_peak, config) == run_on(2, _share_of_peak, whole)
