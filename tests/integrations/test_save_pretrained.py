"""``model.save_pretrained`` writes the same files whether or not the model is sharded.

Functions that save from one rank alone raise an error that names the alternative.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import shardwise as sw
from shardwise import fsdp
from shardwise.errors import CheckpointError, ShardedTensorError
from shardwise.integrations.state import full_state_dict
from shardwise.tensor.sharding import sharding_of
from tests.models import llama
from tests.ranks import on_ranks
from tests.runtime.one_process import rank

SHARDED: dict[str, Callable[[nn.Module], object]] = {
    "elements": lambda model: sw.fully_shard(model, units="LlamaDecoderLayer"),
    "rows": fsdp.fully_shard,
    "replicas": lambda model: sw.fully_shard(model, strategy="ddp"),
}


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_files(found: Path, expected: Path) -> None:
    names, others = ({file.name for file in path.iterdir()} for path in (found, expected))
    assert names == others
    for name in names - {"README.md"}:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@on_ranks(2)
@pytest.mark.parametrize("way", SHARDED)
def test_files_are_those_of_the_whole_model(way: str, tmp_path: Path) -> None:
    """A model with a tied head is saved in several files, with an index and a generation config."""
    alone, model = (llama(tie_word_embeddings=True) for _ in range(2))
    SHARDED[way](model)
    for each, name in ((alone, "whole"), (model, "sharded")):
        each.generation_config.max_new_tokens = 7
        each.save_pretrained(tmp_path / name, max_shard_size="20KB")
    if rank() == 0:
        assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
        assert_same_files(tmp_path / "sharded", tmp_path / "whole")
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
        assert opened.generation_config.max_new_tokens == 7
        for one, other in zip(opened.parameters(), alone.parameters(), strict=True):
            assert torch.equal(one, other)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()  # it still trains


@on_ranks(2)
def test_names_are_those_of_the_hub(tmp_path: Path) -> None:
    """transformers joins the experts of Mixtral in memory, and separates them in files."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    for name in ("whole", "sharded"):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
        if name == "sharded":
            sw.fully_shard(model)
        model.save_pretrained(tmp_path / name)
    if rank() == 0:
        assert_same_files(tmp_path / "sharded", tmp_path / "whole")


class Mixed(nn.Module, PyTorchModelHubMixin):
    """Its ``save_pretrained`` takes no state dict: it reads the module, as that of diffusers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.outer.weight = self.inner.weight
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.outer(self.inner(x))) * self.scale  # type: ignore[no-any-return]

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)
        # A model of sentence-transformers encodes a text for its card, and diffusers writes names.
        output = self(torch.ones(2, 6))
        (save_directory / "card").write_text(f"{type(self).__name__} {output.tolist()}")


@on_ranks(2)
@pytest.mark.parametrize("granularity", ["element", "dim"])
def test_a_library_may_read_and_call_the_model(granularity: Any, tmp_path: Path) -> None:
    for name in ("whole", "sharded"):
        torch.manual_seed(0)
        model = Mixed(6)
        if name == "sharded":
            policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            options = {"granularity": granularity, "mp_policy": policy}
            sw.fully_shard(model, units={nn.LayerNorm}, **options)
            cast("sw.FSDPModule", model).unshard()  # the modules hold values in bfloat16 now
        if name == "sharded" or rank() == 0:
            model.save_pretrained(tmp_path / name)
    if rank() == 0:
        assert_same_files(tmp_path / "sharded", tmp_path / "whole")
    model(torch.ones(2, 6)).sum().backward()  # it still trains, sharded
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(sharding_of(parameter) is not None for parameter in model.parameters())
    assert isinstance(model, sw.FSDPModule)
    assert isinstance(model.norm, sw.FSDPModule)


@on_ranks(2)
def test_an_error_of_the_first_rank_is_raised_by_all(tmp_path: Path) -> None:
    model = sw.fully_shard(llama())
    (tmp_path / "file").touch()
    dist.barrier()
    with pytest.raises(FileExistsError if rank() == 0 else CheckpointError):
        model.save_pretrained(tmp_path / "file")
    model.save_pretrained(tmp_path / "directory")


@on_ranks(2)
def test_only_adapters_are_saved_including_frozen_ones(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    embeddings = ["q_proj", "embed_tokens"]  # peft also saves the base weights of embeddings
    for name in ("whole", "sharded"):
        model = peft.get_peft_model(
            llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        )
        other = peft.LoraConfig(r=2, target_modules=embeddings, init_lora_weights=False)
        model.add_adapter("other", other)
        if name == "sharded":
            sw.fully_shard(model, units="LlamaDecoderLayer")
        if name == "sharded" or rank() == 0:
            model.save_pretrained(tmp_path / name)
    if rank() == 0:
        for part in (".", "other"):
            found, expected = (tensors_in(tmp_path / n / part) for n in ("sharded", "whole"))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in found)
            assert len(found) == (4 if part == "." else 7)


@on_ranks(2)
def test_ranks_with_an_empty_state_dict_write_nothing(tmp_path: Path) -> None:
    """accelerate's ``get_state_dict`` returns one on all ranks but the first."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config)
    if rank() == 0:
        model.save_pretrained(tmp_path / "whole")
    sw.fully_shard(model)
    state = full_state_dict(model)
    is_first = rank() == 0
    model.save_pretrained(tmp_path / "sharded", is_main_process=is_first, state_dict=state)
    if is_first:
        assert_same_files(tmp_path / "sharded", tmp_path / "whole")


@on_ranks(2)
def test_prompts_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), prompts)
    expected = model.prompt_encoder["default"].embedding.weight.detach().clone()
    sw.fully_shard(model, units="LlamaDecoderLayer")
    model.save_pretrained(tmp_path)
    if rank() == 0:
        assert torch.equal(tensors_in(tmp_path)["prompt_embeddings"], expected)


@on_ranks(2)
def test_a_rank_cannot_save_alone_by_safetensors(tmp_path: Path) -> None:
    model: nn.Module = sw.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    savers: list[Any] = [
        lambda: safetensors.torch.save_model(model, str(tmp_path / "x")),
        lambda: safetensors.torch.save_file(model.state_dict(), tmp_path / "x"),
        lambda: safetensors.torch.save(model.state_dict()),
    ]
    for save in savers:
        with pytest.raises(ShardedTensorError, match=r"0\.weight: .* or use sw\.save"):
            save()
