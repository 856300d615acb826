"""What ``shardwise plan --config`` writes, ``shardwise train`` trains."""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.find import typical_cpu
from shardwise.forecast.models.hugging_face import read_hugging_face, settings_of
from shardwise.forecast.models.model import Model, known_models
from shardwise.forecast.planned import plan_of
from shardwise.forecast.search.candidates import Goal, configurations, offloaded
from shardwise.plan.optimizers import OPTIMIZERS, optimizer_spec
from shardwise.plan.strategy import PRESETS
from shardwise.train.build import build_model, check
from shardwise.train.config import Config, DataConfig, ModelConfig, read_config
from shardwise.train.planned import (
    averaged_replicas,
    config_of,
    configuration_of,
    shared_settings,
    toml_of,
)
from tests.cli import commands
from tests.cli.planning import run
from tests.models import llama_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODEL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "context": 32}
TEXTS = Path(sysconfig.get_path("stdlib")) / "email"
BASE = Config(model=ModelConfig(**MODEL), data=DataConfig(path=str(TEXTS)))
SMALL = Configuration(shard_size=4, sequence=32, compute_dtype=torch.float32)


def printed() -> Iterator[Configuration]:
    """Yield all configurations that a search on four ranks of two nodes can print."""
    goal = Goal(
        global_batch=16,
        settings=replace(SMALL, compute_dtype=torch.bfloat16),
        checkpointing=("none", "products", "selective", "full"),
    )
    for one in configurations(goal, num_ranks=4, ranks_per_node=2):
        for variant in (one, *offloaded(goal, one)):
            for prefetch in (0, 1, 2, 3):
                yield replace(variant, prefetch=prefetch)


def trained_as(configuration: Configuration, path: Path, base: Config = BASE) -> Config:
    """Return the configuration that the trainer reads from the file of a plan."""
    path.write_text(toml_of(config_of(configuration, base)), "utf-8")
    return read_config(path)


def test_every_configuration_of_a_search_is_trained_as_planned(tmp_path: Path) -> None:
    plans = set()
    found = list(printed())
    assert len(found) > 1000
    for configuration in found:
        config = trained_as(configuration, tmp_path / "train.toml")
        assert configuration_of(config) == configuration
        assert config.with_ranks(4) == config
        assert (config.model.layers, config.model.width, config.model.context) == (2, 32, 32)
        plans.add((configuration.strategy, configuration.offload, configuration.shard_size))
    assert {strategy for strategy, _, _ in plans} == set(PRESETS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_optimizer_and_dtype_is_trained_as_planned(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    for name, spec in OPTIMIZERS.items():
        configuration = replace(
            SMALL,
            compute_dtype=dtype,
            optimizer=name,
            optimizer_loop=spec.loop,
            optimizer_options=spec.options,
        )
        if not spec.path:
            with pytest.raises(ConfigError, match=f"{name!r}: there is no class that works on"):
                config_of(configuration, BASE)
            continue
        config = trained_as(configuration, tmp_path / "train.toml")
        assert configuration_of(config) == configuration
        model = build_model(config)
        plan = plan_of(model, configuration)
        assert plan == plan_of(model, configuration_of(config))
        assert plan.units[1].layouts[0].dtype == "float32"
        check(config)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 2},
        {"context": 2},
        {"expert": 2},
        {"master_dtype": torch.bfloat16},
        {"autocast": True},
        {"attention": "math"},
        {"reshard_after_forward": False},
        {"checkpointing": ("full", "none")},
    ],
    ids=str,
)
def test_what_the_trainer_cannot_do_is_named(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ConfigError, match=rf"shardwise train cannot train with .*{name}="):
        config_of(replace(SMALL, **options), BASE)


@pytest.mark.parametrize(
    ("path", "adapters", "message"),
    [
        ("", {}, "lora_rank=16: expected the model of model.path to adapt"),
        ("llama", {"alpha": 0.5}, "model.lora_alpha: expected a valid integer, got 0.5"),
        ("llama", {"dora": True}, "cannot train with adapters=DoRA"),
        ("llama", {"quantized": True}, "cannot train with adapters=QLoRA"),
    ],
)
def test_adapters_that_the_trainer_cannot_train_are_named(
    path: str, adapters: dict[str, Any], message: str
) -> None:
    base = BASE.model_copy(update={"model": BASE.model.model_copy(update={"path": path})})
    with pytest.raises(ConfigError, match=message):
        config_of(replace(SMALL, adapters=Adapters(**adapters)), base)


def test_blocks_are_compiled_as_planned(tmp_path: Path) -> None:
    configuration = replace(SMALL, compiled=True, checkpointing="full")
    config = trained_as(configuration, tmp_path / "train.toml")
    assert configuration_of(config) == configuration
    with mock.patch.object(nn.Module, "compile", autospec=True) as compiled:
        model = build_model(config)
    assert [call.args[0] for call in compiled.call_args_list] == list(model.blocks)  # type: ignore[arg-type]


def test_a_degree_of_a_model_with_a_plan_is_trained_as_planned(tmp_path: Path) -> None:
    base = BASE.model_copy(update={"model": ModelConfig(path="llama", context=32)})
    options: dict[str, Any] = {"sequence_parallel": False, "split_vocabulary": False}
    for strategy, sizes in (("fsdp", (4, 1)), ("ddp", (1, 4)), ("hsdp", (2, 2))):
        configuration = replace(
            SMALL, strategy=strategy, shard_size=sizes[0], replicas=sizes[1], tensor=2, **options
        )
        config = trained_as(configuration, tmp_path / "train.toml", base)
        assert configuration_of(config) == configuration
        assert (config.shard.nproc, config.shard.tensor, config.data_ranks) == (8, 2, 4)
        assert config.with_ranks(8) == config
    assert config_of(replace(SMALL, **options), base) == config_of(SMALL, base), "they say nothing"
    with pytest.raises(ConfigError, match="cannot train with sequence_parallel=True"):
        config_of(replace(configuration, sequence_parallel=True), base)
    with pytest.raises(ConfigError, match="the embedded GPT has no plan"):
        config_of(configuration, BASE)


def test_a_checkpoint_of_every_second_block_is_kept() -> None:
    memory = {"checkpoint_every": 2, "checkpoint": "products"}
    config = Config.model_validate({"model": MODEL, "memory": memory})
    assert configuration_of(config).checkpointing == ("none", "products")


# Keys that a search chooses, and values of all others that are not their defaults.
CHOSEN = {
    "train": {"micro_batch"},
    "shard": {"nproc", "strategy", "replicas", "prefetch"},
    "memory": {"checkpoint_every", "offload", "offload_step", "activations"},
}
PLAIN: dict[str, dict[str, Any]] = {
    "run": {
        "name": "own", "directory": "here", "overwrite": True, "log_every": 3,
        "sinks": ("wandb",), "callbacks": ("a.b:C",), "export": False,
    },
    "model": MODEL,
    "tokenizer": {"path": "there"},
    "data": {
        "path": "texts", "glob": "*.txt", "format": "jsonl", "column": "body", "validation": "v",
        "cache": "c", "validation_share": 0.1, "workers": 2,
    },
    "train": {
        "steps": 9, "global_batch": 32, "optimizer": "sgd", "compile": True, "grad_clip": 0.5,
        "optimizer_options": {"momentum": 0.8, "nesterov": True}, "schedule": "wsd", "lr": 0.1,
        "final_lr_share": 0.1, "warmup_share": 0.2, "weight_decay": 0.0, "betas": (0.8, 0.9),
        "seed": 5, "validate_every": 2, "validation_batches": 4, "patience": 2,
    },
    "checkpoint": {"every": 5, "keep": 1, "best": True, "directory": "d", "wait": False},
    "record": {"enabled": False, "steps": (1, 2)},
    "sample": {"prompt": "a", "bytes": 5, "temperature": 1.0, "top_k": 4},
    "shard": {"units": "Block", "tensor": 1},
    "precision": {"compute": "bfloat16", "reduce": "bfloat16", "norms": "compute"},
    "memory": {"accumulate": "whole", "checkpoint_every": 1, "checkpoint": "reentrant"},
    "replicas": {
        "lighthouse": "http://a:1", "number": 1, "count": 2, "minimum": 2, "timeout": 6.0,
        "quorum_timeout": 7.0, "retries": 3,
    },
    "outer": {
        "every": 0, "fragments": 2, "delay": 1, "dtype": "int8", "block": 64, "mixing": 0.5,
        "lr": 0.6, "momentum": 0.8,
    },
}  # fmt: skip
ADAPTED: dict[str, dict[str, Any]] = {
    "model": {
        "path": "llama", "from_scratch": True, "lora_rank": 4, "lora_alpha": 8,
        "lora_targets": ("q_proj",),
    },
    "tokenizer": {"vocabulary": 300},
    "outer": {"every": 4},
    "replicas": {"lighthouse": "http://a:1", "count": 2},
}  # fmt: skip
REPRODUCIBLE: dict[str, dict[str, Any]] = {
    "train": {"reproducible": 8, "grad_clip": 0.0},
    "memory": {"step_in_backward": True},
}
DIVIDED: dict[str, dict[str, Any]] = {"model": {"path": "llama"}, "shard": {"tensor": 2}}
RUNS = {"plain": PLAIN, "adapted": ADAPTED, "reproducible": REPRODUCIBLE, "divided": DIVIDED}


@pytest.mark.parametrize("document", RUNS.values(), ids=RUNS)
def test_a_plan_of_a_run_changes_only_what_a_search_chooses(
    document: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(toml_of(Config.model_validate(document)), "utf-8")
    base = read_config(tmp_path / "run.toml")
    settings = shared_settings(base)
    goal = Goal(
        global_batch=base.train.global_batch // averaged_replicas(base),
        settings=replace(settings, sequence_parallel=False, split_vocabulary=False),
        tensor=base.shard.tensor,
        micro_batches=() if settings.reproducible else (2,),
        checkpointing=("full",),
    )
    [found, *_] = configurations(goal, num_ranks=4, ranks_per_node=4)
    written = trained_as(found, tmp_path / "plan.toml", base).model_dump(exclude=CHOSEN)
    assert written == base.model_dump(exclude=CHOSEN)


def test_every_key_of_a_run_that_a_search_does_not_choose_is_in_a_test_above() -> None:
    for section, default in Config().model_dump(exclude=CHOSEN).items():
        for key, value in default.items():
            given = [one.get(section, {}).get(key, value) for one in RUNS.values()]
            assert any(one != value for one in given), f"{section}.{key}"


@pytest.mark.parametrize("name", [n for n in known_models() if not n.startswith("t5")])
@pytest.mark.thorough
def test_a_built_in_model_is_written_with_its_sizes(name: str, tmp_path: Path) -> None:
    _sizes_are_kept(name, tmp_path)


def test_models_are_written_with_their_sizes(tmp_path: Path) -> None:
    for name in ("gpt2", "llama-3.2-1b", "qwen-2-0.5b", "qwen-3-0.6b", "mixtral-8x7b"):
        _sizes_are_kept(name, tmp_path)


def _sizes_are_kept(name: str, tmp_path: Path) -> None:
    shape = known_models()[name]
    (tmp_path / "config.json").write_text(json.dumps(settings_of(shape, 64)), "utf-8")
    _, read, factory = read_hugging_face(tmp_path)
    assert factory is not None
    assert read is not None
    built = Model(name, factory=factory)
    expected = Model(name, shape=replace(shape, positions=read.positions))
    assert built.num_parameters == expected.num_parameters
    assert replace(read, positions=shape.positions) == shape


@pytest.mark.parametrize(
    "fields", [{}, {"model_type": "no"}, {"model_type": "llama", "vocab_size": "x"}]
)
def test_fields_that_transformers_refuses_are_one_error(fields: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: \w+Error: "):
        read_hugging_face(tmp_path)


def test_a_built_in_model_is_written_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    found = run(
        "llama-3.2-1b", "--cluster=2xH100", "--seq=64", "--global-batch=4", "--no-scaling",
        "--tensor=2", "--checkpointing=none", "--micro-batch=2", f"--config={path}",
    )  # fmt: skip
    assert found.code == 0, found.errors
    config = read_config(path)
    fields = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
    assert (fields["num_hidden_layers"], fields["hidden_size"]) == (16, 2048)
    assert config.model.context == 64
    assert (config.shard.nproc, config.shard.tensor) == (2, 2)


def test_no_file_is_written_for_more_positions_than_the_model_has(tmp_path: Path) -> None:
    llama_config(vocab_size=300, max_position_embeddings=64).save_pretrained(
        str(tmp_path / "llama")
    )
    path = tmp_path / "plan.toml"
    found = run(
        str(tmp_path / "llama"), "--cluster=2xH100", "--seq=128", "--global-batch=4",
        "--no-scaling", "--checkpointing=none", "--strategy=fsdp", f"--config={path}",
    )  # fmt: skip
    assert found.code == 2
    assert "max_position_embeddings=64, but model.context" in found.errors
    assert not path.exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("t5-small", [], "transformers has no causal language model of this shape"),
        ("tests.cli.test_plan:small", [], "pass the TOML file of a run"),
        (
            "mixtral-8x7b",
            ["--tensor=2", "--no-offload"],
            "which is not supported; set shard.tensor",
        ),
        ("llama-3.2-1b", ["--tensor=2", "--compile"], "train.compile=true with shard.tensor=2 is"),
        (
            "qwen-2-1.5b",
            ["--tensor=4", "--cluster=4xH100"],
            "does not divide num_key_value_heads=2",
        ),
        ("gpt2", ["--wire=gather=int8"], "cannot train with wire="),
        ("gpt2", ["--optimizer=lion"], "there is no class that works on shards"),
    ],
)
def test_no_file_is_written_that_trains_something_else(
    model: str, options: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    found = run(
        model, "--cluster=2xH100", "--seq=64", "--global-batch=4", "--no-scaling",
        "--checkpointing=none", "--strategy=fsdp", f"--config={path}", *options,
    )  # fmt: skip
    assert found.code == 2
    assert f"--config {path}: " in found.errors
    assert message in found.errors
    assert "sw.fully_shard(" in found.output, "the plan is printed nevertheless"
    assert not path.exists()
    assert not list(tmp_path.iterdir())


thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adamw", ["--strategy=zero2", "--checkpointing=selective", "--micro-batch=2"]),
        pytest.param("muon", ["--strategy=fsdp", "--compile"], marks=thorough),
        pytest.param("soap", ["--strategy=zero1", "--checkpointing=full"], marks=thorough),
        pytest.param("adam8bit", ["--strategy=ddp", "--dtype=bfloat16"], marks=thorough),
        pytest.param("sgd_momentum", ["--strategy=fsdp", "--objective=memory"], marks=thorough),
    ],
)
def test_a_run_is_trained_from_the_file_of_a_plan(
    optimizer: str, options: list[str], tmp_path: Path
) -> None:
    document = {"model": MODEL, "train": {"steps": 2, "global_batch": 4}}
    (tmp_path / "run.toml").write_text(toml_of(Config.model_validate(document)), "utf-8")
    _plan_and_train("run.toml", ["--seq=32", f"--optimizer={optimizer}", *options], tmp_path)


def test_a_hugging_face_model_is_trained_from_the_file_of_a_plan(tmp_path: Path) -> None:
    config = llama_config(vocab_size=300, intermediate_size=64, tie_word_embeddings=True)
    config.save_pretrained(str(tmp_path / "llama"))
    options = ["--seq=32", "--strategy=fsdp", "--checkpointing=selective", "--micro-batch=2"]
    _plan_and_train("llama", options, tmp_path)


def test_a_tensor_parallel_run_is_trained_from_the_file_of_a_plan(tmp_path: Path) -> None:
    config = llama_config(vocab_size=300, intermediate_size=64)
    config.save_pretrained(str(tmp_path / "llama"))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "llama"\ncontext = 32\n[tokenizer]\nvocabulary = 300\n'
    )
    options = ["--seq=32", "--strategy=fsdp", "--checkpointing=none", "--micro-batch=2"]
    _plan_and_train("run.toml", [*options, "--tensor=2"], tmp_path)
    assert read_config(tmp_path / "plan.toml").shard.tensor == 2


def _plan_and_train(model: str, options: list[str], path: Path) -> None:
    typical_cpu(2).write(path / "machine.json")
    dtype = [] if any("--dtype" in one for one in options) else ["--dtype=float32"]
    cluster = ["--cluster=2xmachine.json", "--global-batch=8", "--no-scaling", *dtype]
    planned = commands.run(["plan", model, *cluster, *options, "--config=plan.toml"], path)
    assert planned.code == 0, planned.stderr
    settings: dict[str, Any] = {"data.path": TEXTS, "train.steps": 2, "run.directory": path / "run"}
    settings |= {"sample.bytes": 0, "data.cache": path / "cache", "train.validation_batches": 1}
    given = [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]
    trained = commands.run(["train", "plan.toml", *given], path)
    assert trained.code == 0, trained.stderr
    written = configuration_of(read_config(path / "plan.toml"))
    assert configuration_of(read_config(path / "run" / "config.toml")) == written
    assert written.world_size == 2
    assert written.global_batch == 8
    assert f"--optimizer={written.optimizer}" in (*options, "--optimizer=adamw")
    assert written.states == optimizer_spec(written.optimizer)
    metrics = (path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert len(metrics) == 2


def test_a_run_is_planned_and_written_with_the_settings_of_its_file(tmp_path: Path) -> None:
    llama_config(vocab_size=300, intermediate_size=64).save_pretrained(str(tmp_path / "llama"))
    document = {
        "model": {"path": str(tmp_path / "llama"), "lora_rank": 4, "context": 32},
        "tokenizer": {"vocabulary": 300},
        "train": {"global_batch": 4, "optimizer": "sgd", "optimizer_options": {"momentum": 0.8}},
        "precision": {"reduce": "bfloat16"},
    }
    base = Config.model_validate(document)
    (tmp_path / "run.toml").write_text(toml_of(base), "utf-8")
    planned = [str(tmp_path / "run.toml"), "--cluster=2xH100", "--no-scaling", "--strategy=fsdp"]
    planned += ["--checkpointing=none", "--micro-batch=2", f"--config={tmp_path}/plan.toml"]
    found = run(*planned)
    assert found.code == 0, found.errors
    title = " ".join(found.output.split("\n\n")[0].split())
    assert "LoRA of rank 4 on all-linear" in title
    assert "of them trained" in title
    assert "4 sequences of 32 tokens per step; sgd;" in title
    config = read_config(tmp_path / "plan.toml")
    assert config == base.model_copy(
        update={"train": base.train.model_copy(update={"micro_batch": 2})}
    )
    given = ["--seq=16", "--optimizer=adamw", "--dtype=bfloat16", "--lora=r=2", "--compile"]
    assert run(*planned, *given, "--global-batch=8").code == 0
    config = read_config(tmp_path / "plan.toml")
    assert (config.model.context, config.model.lora_rank) == (16, 2)
    assert (config.train.optimizer, config.train.optimizer_options) == ("adamw", {})
    assert (config.train.compile, config.train.global_batch) == (True, 8)
    assert (config.precision.compute, config.precision.reduce) == ("bfloat16", "bfloat16")
    assert config.precision.norms == "float32"
    assert run(*planned, "--seq=100000").errors.count("max_position_embeddings=") == 1
