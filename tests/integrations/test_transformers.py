"""transformers' `Trainer` with a sharded model logs what it logs with DDP, saves and resumes."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from transformers import Adafactor, AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwise as sw
from shardwise.integrations.transformers import Trainer
from tests.models import llama
from tests.ranks import on_ranks
from tests.torchrun import torchrun, torchrun_environment

SCRIPT = Path(__file__).parents[2] / "examples" / "hf" / "train_llama.py"
COMPARED = ("loss", "grad_norm", "eval_loss", "train_loss")


def numbers(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: line[key] for key in COMPARED if key in line} for line in history]


@on_ranks(2, deadline=150.0)
def test_trainer_logs_saves_and_generates_what_it_does_with_ddp(tmp_path: Path) -> None:
    """Training, evaluation, the best model and its tokens; a checkpoint after each epoch."""
    with torchrun_environment():
        main = runpy.run_path(str(SCRIPT))["main"]
        ours, ddp = (main(tmp_path / engine, engine) for engine in ("shardwise", "ddp"))
        assert ours.pop()["generated"] == ddp.pop()["generated"]
        ours, ddp = numbers(ours), numbers(ddp)
        assert [sorted(line) for line in ours if "loss" in line] == [["grad_norm", "loss"]] * 6
        for line, expected in zip(ours, ddp, strict=True):
            assert line == pytest.approx(expected, rel=1e-4)
        losses = [line["loss"] for line in ours if "loss" in line]
        assert losses[0] > 1.2 * losses[5], "the loss does not fall"
    dist.barrier()  # with DDP, only the first rank writes models
    for directory in ("model", "trainer/checkpoint-6"):
        opened, expected_model = (
            AutoModelForCausalLM.from_pretrained(tmp_path / engine / directory)
            for engine in ("shardwise", "ddp")
        )
        assert isinstance(opened, LlamaForCausalLM)
        for one, other in zip(opened.parameters(), expected_model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@on_ranks(2)
def test_adafactor_is_refused() -> None:
    model = sw.fully_shard(torch.nn.Linear(4, 4))
    optimizer = Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(sw.PlanError, match=r"transformers\.Adafactor needs whole.*Adam8bit"):
        optimizer.step()


@pytest.mark.parametrize("granularity", ["element", "dim"])
@on_ranks(2)
def test_sharded_embeddings_keep_their_size(granularity: Any) -> None:
    model = sw.fully_shard(llama(), units=LlamaDecoderLayer, granularity=granularity)
    embeddings = model.get_input_embeddings()
    size = embeddings.weight.shape[0]
    assert model.resize_token_embeddings(size) is embeddings
    with pytest.raises(sw.PlanError, match=rf"the {size} embeddings are sharded.*before fully_sh"):
        model.resize_token_embeddings(size + 1)


@pytest.mark.parametrize("option", ["bf16", "fp16"])
@on_ranks(2)
def test_units_compute_in_the_dtype_of_the_arguments(option: str, tmp_path: Path) -> None:
    with torchrun_environment():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, **{option: True})
        trainer = Trainer(model=llama(), args=arguments, fully_shard={"units": LlamaDecoderLayer})
    dtypes = []
    layer = trainer.model.model.layers[0].mlp
    layer.register_forward_hook(lambda _module, _args, output: dtypes.append(output.dtype))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert trainer.model(input_ids=tokens, labels=tokens).loss.dtype == torch.float32
    assert dtypes == [{"bf16": torch.bfloat16, "fp16": torch.float16}[option]]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@on_ranks(2)
def test_models_of_model_init_are_sharded(tmp_path: Path) -> None:
    """`train` calls ``model_init`` again."""

    def build() -> Any:
        return llama()

    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    with torchrun_environment():
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=1, save_strategy="no", disable_tqdm=True
        )
        trainer = Trainer(model_init=build, args=arguments, train_dataset=rows, fully_shard={})
        first = trainer.model
        trainer.train()
    assert trainer.model is not first
    assert isinstance(trainer.model, sw.FSDPModule)


@on_ranks(2)
def test_parameters_outside_the_model_are_not_trained_by_each_rank_alone(tmp_path: Path) -> None:
    """As those of a loss of sentence-transformers: DDP would not average their gradients."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2

    class WithScale(Trainer):
        def __init__(self, scale: Any, **arguments: Any) -> None:
            self.scale = scale
            super().__init__(
                model=llama(),
                args=TrainingArguments(
                    str(tmp_path),
                    use_cpu=True,
                    max_steps=1,
                    disable_tqdm=True,
                    optim="sgd",
                    learning_rate=0.25,
                    max_grad_norm=0.0,
                    **arguments,
                ),
                train_dataset=rows,
                fully_shard={},
            )

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = super().create_optimizer(*args, **kwargs)
            optimizer.add_param_group({"params": list(self.scale.parameters())})
            return optimizer

        def compute_loss(self, model: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> Any:
            return self.scale(model(**inputs).loss[None]).sum() * 8 * (1 + dist.get_rank())

    with torchrun_environment():
        with pytest.raises(sw.PlanError, match=r"has scale\.weight, .*each rank.*sw\.fully_shard"):
            WithScale(torch.nn.Linear(1, 1)).train()
        scale: Any = sw.fully_shard(torch.nn.Linear(1, 1))
        with pytest.raises(sw.PlanError, match=r"scale\.weight, .*checkpoints.*save_only_model"):
            WithScale(scale).train()
        before = scale.bias.full_tensor()
        WithScale(scale, save_only_model=True).train()
        assert scale.bias.full_tensor() == pytest.approx(before - 0.25 * (8 + 16) / 2)


class OfTheHub(torch.nn.Linear, PyTorchModelHubMixin):
    """Its ``save_pretrained`` has other arguments than that of transformers."""


@on_ranks(2)
def test_a_model_of_another_library_is_saved(tmp_path: Path) -> None:
    weight = (model := OfTheHub(4, 4)).weight.detach().clone()
    with torchrun_environment():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True)
        Trainer(model=model, args=arguments, fully_shard={}).save_model()
        dist.barrier()
        assert torch.equal(OfTheHub.from_pretrained(tmp_path).weight, weight)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@on_ranks(2)
def test_the_trainer_reads_prompts(kind: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    torch.manual_seed(1)
    saved = torch.nn.init.normal_(model.prompt_encoder.default.embedding.weight).detach().clone()
    with torchrun_environment():
        trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path)), fully_shard={})
    model.save_pretrained(tmp_path)
    dist.barrier()
    with torch.no_grad():
        model.prompt_encoder.default.embedding.weight.zero_()
    trainer.model.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert torch.equal(model.prompt_encoder.default.embedding.weight.full_tensor(), saved)


@on_ranks(1, deadline=150.0)
def test_a_single_rank_saves_the_random_states_that_the_trainer_reads(tmp_path: Path) -> None:
    with torchrun_environment():
        runpy.run_path(str(SCRIPT))["main"](tmp_path, "shardwise")
    assert sorted(path.parent.name for path in tmp_path.glob("trainer/*/rng_state.pth")) == [
        "checkpoint-12",
        "checkpoint-6",
    ]


def test_a_resume_without_the_states_of_the_optimizer_warns(tmp_path: Path) -> None:
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=TrainingArguments(str(tmp_path)))
    trainer.resume_callback.directory = tmp_path
    trainer.callback_handler.optimizer = trainer.create_optimizer()
    with pytest.warns(UserWarning, match="has no states of an optimizer"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.thorough
@on_ranks(2, deadline=150.0)
def test_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    with torchrun_environment():
        main = runpy.run_path(str(SCRIPT))["main"]
        whole = numbers(main(tmp_path / "whole", "shardwise"))
        checkpoint = tmp_path / "whole" / "trainer" / "checkpoint-3"
        resumed = numbers(main(tmp_path / "resumed", "shardwise", checkpoint))
    for line, expected in zip(resumed, whole, strict=True):
        if "train_loss" not in line:  # the summary counts the steps of this run only
            assert line == pytest.approx(expected, rel=1e-6)


@pytest.mark.thorough
def test_the_script_runs_under_torchrun_and_resumes_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    torchrun(2, str(SCRIPT), str(tmp_path))
    torchrun(1, str(SCRIPT), str(tmp_path), "--resume", str(tmp_path / "trainer" / "checkpoint-3"))
    assert len(json.loads((tmp_path / "shardwise.json").read_text())) > 8


@on_ranks(2)
def test_a_resume_continues_with_the_scale_of_the_gradients(tmp_path: Path) -> None:
    """accelerate scales no losses on CPUs, so the test does."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4

    def trainer(init_scale: float) -> Any:
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=2, save_steps=1, disable_tqdm=True, report_to=[]
        )
        made = Trainer(model=llama(), args=arguments, train_dataset=rows, fully_shard={})
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale, growth_interval=1)
        return made

    with torchrun_environment():
        trainer(init_scale=8.0).train()  # doubled in each step
        resumed = trainer(init_scale=1024.0)
        resumed.train(str(tmp_path / "checkpoint-1"))
    assert resumed.accelerator.scaler.get_scale() == 32.0
