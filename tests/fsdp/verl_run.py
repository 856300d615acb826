"""verl's own FSDP engine on a small Llama, on CPU ranks: a program for torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.fsdp.verl_run \
        {torch,shardwise} DIRECTORY [OPTION ...]

Every rank writes what it sees to DIRECTORY/RANK.json: losses and gradient norms, log-probabilities,
the sums of the weights that go to the rollout, and all of this after a resume. Only rank 0 has the
weights at the start. The platform of verl is replaced by one of the CPU.
"""

# ruff: noqa: PLC0415 - verl looks for a GPU when it is imported
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

import contextlib
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.fsdp.frameworks import replace_torch_fsdp

VOCABULARY = 120
PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def use_the_cpu() -> None:
    """Replace the platform of verl, which is one of GPUs or NPUs."""
    from verl.plugin.platform import platform_manager

    class Cpu(platform_manager.PlatformCUDA):
        device_name = vendor_name = "cpu"
        device_module = SimpleNamespace(
            empty_cache=lambda: None,
            synchronize=lambda: None,
            is_available=lambda: False,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (1, 1),
            get_rng_state=torch.get_rng_state,
            set_rng_state=torch.set_rng_state,
        )

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            return torch.device("cpu")

    platform_manager.set_platform(Cpu())


def make_engine(path: Path, options: set[str]) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    lora: dict[str, Any] = {}
    if "lora" in options:
        merge = {"merge": "merge" in options}
        lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora": merge}
    torch.manual_seed(1)
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(path),
            load_tokenizer=False,
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing="checkpointing" in options,
            **lora,
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            param_offload="offload" in options,
            optimizer_offload="offload" in options,
            fsdp_size=2 if "hsdp" in options else -1,
            mixed_precision=PRECISION | ({"param_dtype": "bf16"} if "bf16" in options else {}),
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=100, clip_grad=1.0),
        CheckpointConfig(
            save_contents=["model", "optimizer", "extra", "hf_model"],
            load_contents=["model", "optimizer", "extra"],
        ),
    )
    engine.initialize()
    return engine


def batch(step: int) -> Any:
    """Two micro-batches of two sequences each, of this rank."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(5, 20, (4,), generator=generator).tolist()

    def nested(tensors: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    ids = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    fields = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(length) for length in lengths]),
        "loss_mask": nested([torch.ones(length) for length in lengths]),
    }
    data = TensorDict(fields, batch_size=4)
    tensordict_utils.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        use_remove_padding=False,
        temperature=1.0,
        pad_mode=DatasetPadMode.NO_PADDING,
        global_batch_size=4 * dist.get_world_size(),
    )
    return data


def train(engine: Any, step: int) -> list[float]:
    from verl.workers.utils.losses import sft_loss

    with engine.train_mode():
        output = engine.train_batch(batch(step), partial(sft_loss, None))
        engine.lr_scheduler_step()
    return [*output["loss"], output["metrics"]["grad_norm"]]


def log_probability(engine: Any) -> float:
    from verl.workers.utils.losses import sft_loss

    with engine.eval_mode():
        output = engine.infer_batch(batch(50), partial(sft_loss, None))
    return float(output["model_output"]["log_probs"].values().double().sum())


@torch.no_grad()
def weights(engine: Any, options: set[str]) -> dict[str, float]:
    """What the engine sends to the rollout."""
    adapters = "lora" in options and "merge" not in options
    named, _ = engine.get_per_tensor_param(layered_summon=adapters, base_sync_done=adapters)
    return {name: float(tensor.double().abs().sum()) for name, tensor in named}


def run(directory: Path, options: set[str]) -> dict[str, Any]:
    path, saved = directory / "model", directory / "checkpoint"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    dist.barrier()
    engine = make_engine(path, options)
    seen: dict[str, Any] = {"sent at first": weights(engine, options)}
    seen["steps"] = [train(engine, step) for step in range(3)]
    seen["log-probability"] = log_probability(engine)
    seen["sent"] = weights(engine, options)
    seen["after it"] = train(engine, 3)
    engine.save_checkpoint(str(saved), global_step=4)
    if "lora" not in options and dist.get_rank() == 0:
        whole = LlamaForCausalLM.from_pretrained(saved / "huggingface", dtype=torch.float32)
        seen["saved"] = {n: float(p.double().abs().sum()) for n, p in whole.named_parameters()}
    resumed = make_engine(path, options)
    resumed.load_checkpoint(str(saved), del_local_after_load=False)
    seen["continued"], seen["resumed"] = ([train(e, 4), train(e, 5)] for e in (engine, resumed))
    return seen


if __name__ == "__main__":
    implementation, folder, *given = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        if implementation == "shardwise":
            stack.enter_context(replace_torch_fsdp())
        use_the_cpu()
        found = run(Path(folder), set(given))
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
