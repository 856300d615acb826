"""The configuration of a published row. `assumptions_of` lists what is assumed for fields that are
not published. For all rows, these assumptions apply:

- Gradients are reduced in the compute dtype unless the row names float32.
- XLA and fused norm kernels count as compiled.
- "Every n-th block" means that every second block is checkpointed.
- There are as many learned positions as tokens in a sequence.
- The loss takes logits in float32, except in stacks whose code takes them in 16 bits.
- Tensor parallelism splits the sequence and the vocabulary, except in stacks whose code does not.
"""

from dataclasses import replace
from typing import Literal

import torch

from benchmarks.published.rows import Row
from shardwise.errors import ShardwiseError
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import (
    Checkpointing,
    Configuration,
    Float8,
    OptimizerLoop,
    Stack,
)
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.models.transformer import Shape

__all__ = [
    "UnscoredError",
    "assumptions_of",
    "checkpointings_of",
    "configuration_of",
    "is_flash1",
    "machine_of",
    "shape_of",
]


class UnscoredError(ShardwiseError):
    """A row cannot be predicted; the message says why."""


# Stacks whose published runs used kernels before FlashAttention-2, because they are older than its
# release or pinned version 1.
_FLASH1_STACKS = ("llm-foundry",)
Loss = Literal["float32", "compute", "shifted", "fused", "fused_linear"]
# Losses by the code of the stack:
# - 16-bit logits: kernels of FlashAttention, and plain F.cross_entropy (KempnerForge,
#   scripts/train.py at commit 01b461a, of the published runs).
# - the fused linear loss of Liger's kernels for models of transformers.
# - the loss of transformers 4.38, modeling_llama.py, and of GPT-2.
_LOSSES: dict[Loss, tuple[str, ...]] = {
    "compute": ("llm-foundry", "KempnerForge"),
    "fused_linear": ("Liger",),
    "shifted": ("fsdp_qlora", "Accelerate"),
}
# The machine of fsdp_qlora's report (benchmarks_03_2024.md): "without NVLink", "an older
# motherboard and slow PCI lanes". Lanes are not published: four of PCIe 3 are assumed, which the
# second slot of such boards often has. Its power limit of 280 W is ignored, because products that
# accumulate in float32 run at half rate on this device.
_OLD_BOARD_BANDWIDTH = 3.9e9
# Stacks whose training loop has the logits in a variable until the next forward (same file).
_LOGITS_IN_LOOP_STACKS = ("KempnerForge",)
# Stacks that split the head, gather its logits for the loss, and keep the whole embedding on each
# rank (kempnerforge/distributed/tensor_parallel.py).
_GATHERED_LOGITS_STACKS = ("KempnerForge",)
_PRECISION = "bf16 mixed (fp32 sharded params, fp32 reduce)"  # if it is not published
# Stacks that compile, or have fused kernels for norms and activations (Transformer Engine).
_COMPILERS = ("XLA", "JAX", "Megatron-Bridge")
# Stacks with cuDNN's attention (MaxText's attention="cudnn_flash_te", Transformer Engine), which is
# about as fast as FlashAttention-3 (arXiv 2407.08608, figures 5 and 6).
_CUDNN_STACKS = ("MaxText", "Megatron-Bridge")
# Speed of FlashAttention-3 relative to FlashAttention-2 on Hoppers: the middle of the ranges in
# arXiv 2407.08608, 1.5 to 2.0 in forward, and 1.5 to 1.75 in backward.
_FLASH3 = (1.75, 1.625)
_SKIPS = "skips gradient sync between micro-batches"
_MINGPT_DROPOUT = 0.1  # default for embeddings, attention and both residuals
_STRATEGIES = {
    "full_shard": "fsdp",
    "zero3": "fsdp",
    "shard_grad_op": "zero2",
    "zero2": "zero2",
    "hybrid_shard": "hsdp",
    "zero1": "zero1",
    "ddp": "ddp",
    "none": "ddp",
}
_OPTIMIZERS: dict[str, tuple[str, OptimizerLoop]] = {
    "adamw": ("adamw", "foreach"),
    "adamw fused": ("adamw", "fused"),
    "cpu_adam": ("adamw", "fused"),
    "decoupled_adamw": ("adamw", "for_loop"),
    "sgd": ("sgd", "foreach"),
}


def is_flash1(row: Row) -> bool:
    """Whether attention kernels are older than FlashAttention-2."""
    return any(name in row.framework for name in _FLASH1_STACKS)


def shape_of(row: Row) -> Shape:
    """Return the shape of the row's model.

    Raises:
        UnscoredError: the shape is not published, or the architecture is not supported.
    """
    model = row.model
    if model.arch not in ("gpt", "llama"):
        raise UnscoredError(f"a {model.arch} cannot be built from a shape")
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab)
    if None in (*sizes, model.seq):
        raise UnscoredError("the shape of the model or its sequence is not published")
    layers, hidden, heads, kv_heads, ffn, vocab = (size or 0 for size in sizes)
    return Shape(
        arch=model.arch,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        dropout=_MINGPT_DROPOUT if "minGPT" in model.name else 0.0,
        positions=(model.seq or 0) if model.arch == "gpt" else 0,
        tied_embeddings=bool(model.tied_embeddings),
        loss=_loss_of(row),
        keeps_logits=any(name in row.framework for name in _LOGITS_IN_LOOP_STACKS),
    )


def _loss_of(row: Row) -> Loss:
    text = f"{row.framework} {row.notes}"
    for loss, stacks in _LOSSES.items():
        if any(name in text for name in stacks):
            return loss
    # torchtune's distributed recipes compute the loss over chunks (CEWithChunkedOutputLoss).
    is_chunked = "chunked cross entropy" in text or "torchtune FSDP2" in text
    return "fused" if is_chunked and row.compile else "float32"


def machine_of(row: Row) -> Machine:
    """Return the machine that the row ran on."""
    cluster = row.cluster()
    if "fsdp_qlora" in row.framework and row.gpu == "RTX-3090":
        cluster = replace(
            cluster, accelerator=replace(cluster.accelerator, link_bandwidth=_OLD_BOARD_BANDWIDTH)
        )
    machine = Machine.of(cluster)
    old = machine.constants
    is_fast = row.attention == "FA3" or any(name in row.framework for name in _CUDNN_STACKS)
    forward = backward = 1.0
    if is_flash1(row):
        forward = backward = old.flash1
    elif is_fast and machine.device.generation == "hopper":
        forward, backward = _FLASH3
    constants = replace(
        old,
        flash_forward=old.flash_forward * forward,
        flash_backward=old.flash_backward * backward,
    )
    return replace(machine, constants=constants)


def configuration_of(row: Row) -> Configuration:
    """Return how the model was trained; checkpointing is "none" if it is not published.

    Raises:
        UnscoredError: a required setting is not published, or not modelled.
    """
    if row.gpus is None:
        raise UnscoredError("the number of GPUs is not published")
    sharding = row.strategy
    replicas = sharding.replicas or 1
    group = sharding.shard_group or row.data_parallel * sharding.cp // replicas
    group //= sharding.cp
    strategy = _STRATEGIES[sharding.sharding]
    if strategy == "fsdp" and replicas > 1:
        strategy = "hsdp"
    if strategy == "ddp":
        group, replicas = 1, row.data_parallel
    optimizer, loop = _OPTIMIZERS.get(row.optimizer or "adamw", ("adamw", "foreach"))
    offload = row.offload or ""
    found = Configuration(
        strategy=strategy,
        shard_size=max(1, group),
        replicas=replicas,
        reshard_after_forward=None if sharding.reshard_after_forward is not False else False,
        tensor=sharding.tp,
        split_vocabulary=not any(name in row.framework for name in _GATHERED_LOGITS_STACKS),
        pipeline=sharding.pp,
        context=sharding.cp,
        expert=sharding.ep,
        micro_batch=_micro_batch(row),
        accumulation=row.grad_accumulation or 1,
        accumulate="whole" if _SKIPS in (row.notes or "") else "shards",
        sequence=row.model.seq or 1,
        checkpointing=checkpointings_of(row)[0],
        activation_offload="activation" in offload,
        offload="parameters"
        if "params" in offload
        else "optimizer"
        if "opt" in offload
        else "none",
        optimizer=optimizer,
        optimizer_loop=loop,
        compiled=_is_compiled(row),
        attention="math" if row.is_legacy else "flash",
        stack=_stack_of(row.framework),
        adapters=_adapters_of(row),
        units=_units_of(row),
        float8=_float8_of(row),
        float8_gather="float8 all-gather" in (row.precision or ""),
        step_in_backward="optimizer in backward"
        in (row.notes or row.activation_checkpointing_detail or ""),
    )
    return _with_precision(found, row)


def _float8_of(row: Row) -> Float8:
    """Return how 8-bit operands are scaled: in JAX with delayed scales (flax.linen.fp8_ops)."""
    precision = row.precision or ""
    if "fp8" not in precision and "float8" not in precision:
        return "none"
    if any(name in row.framework for name in ("XLA", "JAX")):
        return "delayed"
    return "rowwise" if "rowwise" in precision else "tensorwise"


# What the recipes of these stacks train; other stacks: the defaults of `Adapters`.
_RECIPES = {
    # fsdp_qlora, train.py: --lora_rank 64, --lora_dropout 0.1, --lora_target_modules "all"
    "fsdp_qlora": Adapters(
        rank=64,
        dropout=0.1,
        targets=("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
    ),
    # torchtune, recipes/configs/llama3/70B_lora.yaml
    "torchtune": Adapters(
        rank=16,
        alpha=32,
        targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
}


# The option custom_sharded_layers of torchtune's recipe for full training, 70B_full.yaml, names the
# embedding and the output; the recipe for LoRA has no such option.
_TORCHTUNE_70B_UNITS = ("Block", "Embedding", "Head")


def _units_of(row: Row) -> str | tuple[str, ...]:
    is_recipe = "torchtune" in row.framework and "70b" in row.model.name.lower()
    return _TORCHTUNE_70B_UNITS if is_recipe and row.adapter is None else "auto"


def _adapters_of(row: Row) -> Adapters | None:
    if row.adapter is None:
        return None
    recipe = next((one for name, one in _RECIPES.items() if name in row.framework), Adapters())
    return replace(recipe, quantized="QLoRA" in row.adapter)


def _micro_batch(row: Row) -> int:
    if row.micro_batch is not None or row.global_batch is None:
        return row.micro_batch or 1
    return max(1, row.global_batch // (row.data_parallel * (row.grad_accumulation or 1)))


def assumptions_of(row: Row) -> list[str]:
    """Return what the prediction assumes for fields of the row that are not published."""
    found = []
    if row.optimizer is None:
        found.append("the optimizer is AdamW")
    if row.precision is None:
        found.append(f"the precision is {_PRECISION}")
    if row.micro_batch is None:
        known = row.global_batch is not None
        found.append(
            "micro-batches divide the global batch" if known else "a micro-batch has 1 sequence"
        )
    if row.strategy.shard_group is None and row.strategy.sharding not in ("ddp", "none"):
        found.append("shards are on all data-parallel ranks")
    if row.activation_checkpointing is None:
        found.append("checkpointing is the least that fits")
    if row.adapter is not None:
        found.append("adapters are those of the stack's recipe")
    if row.attention is None:
        found.append("attention is fused")
    if row.interconnect.inter_node_gbps_per_node is None and row.cluster().num_nodes > 1:
        found.append("the network is the usual one of these GPUs")
    return found


def checkpointings_of(row: Row) -> list[Checkpointing | tuple[Checkpointing, ...]]:
    """Return the possible checkpointing modes of the row, from the least recomputation to the most.

    If the mode is not published, the run is assumed to use the first one that fits.
    """
    if row.activation_checkpointing is None:
        return ["none", "products", "selective", "full"]
    if row.activation_checkpointing == "selective":
        if "n-th block" in (row.activation_checkpointing_detail or ""):
            layers = row.model.layers or 1
            return [tuple("full" if layer % 2 else "none" for layer in range(layers))]
        keeps_products = "minimal" in (row.activation_checkpointing_detail or "")
        return ["products" if keeps_products else "selective"]
    return [row.activation_checkpointing]


def _is_compiled(row: Row) -> bool:
    by_stack = any(name in row.framework for name in _COMPILERS)
    return bool(row.compile) or by_stack or "RMS kernel" in (row.attention or "")


def _stack_of(framework: str) -> Stack:
    if "FSDP1" in framework or "FairScale" in framework:
        return "fsdp1"
    if "FSDP2" in framework:
        return "fsdp2"
    if "DDP" in framework:
        return "ddp"
    return "deepspeed" if "DeepSpeed" in framework else "shardwise"


def _with_precision(configuration: Configuration, row: Row) -> Configuration:
    """Set the dtypes that the row's text describes.

    FSDP gathers parameters in the compute dtype even with autocast.
    """
    precision = row.precision or _PRECISION
    half = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    if precision.startswith("fp32"):
        half = torch.float32
    is_pure = any(word in precision for word in ("bf16 params", "(params, grads, states)"))
    # fsdp_qlora and torchtune keep everything in the dtype of their option.
    is_pure |= precision == "bf16" and any(name in row.framework for name in _RECIPES)
    return replace(
        configuration,
        master_dtype=half if is_pure else torch.float32,
        compute_dtype=half,
        gather_dtype=half if "FSDP" in row.framework else None,
        reduce_dtype=torch.float32 if "fp32 reduce" in precision else half,
        autocast="AMP" in precision,
    )
