"""The other engines, each with its best settings.

In bf16, FSDP1, FSDP2 and shardwise gather, compute and reduce in bfloat16 and keep float32 shards.
DDP and ZeroRedundancyOptimizer have no precision policy and run under `torch.autocast`.
"""

import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shardwise.bench.work import LEARNING_RATE, TrainedModel, Work, fused_adamw

__all__ = [
    "DeepSpeed",
    "Fsdp1",
    "Fsdp2",
    "has_deepspeed",
    "start_alone",
    "start_alone_bf16",
    "start_ddp",
    "start_zero_optimizer",
]

CPU = torch.device("cpu")


def start_alone(work: Work) -> TrainedModel:
    """Train without an engine, each rank alone."""
    return TrainedModel(work, work.make(), autocast=work.bf16)


def start_alone_bf16(work: Work) -> TrainedModel:
    """Train without an engine, entirely in bfloat16."""
    return TrainedModel(work, work.make().to(torch.bfloat16))


def start_ddp(work: Work, group: dist.ProcessGroup | None = None) -> TrainedModel:
    return TrainedModel(work, _in_ddp(work, group), autocast=work.bf16)


def start_zero_optimizer(work: Work) -> TrainedModel:
    """Train with DDP and optimizer states sharded by whole parameters."""
    model = _in_ddp(work)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        fused=True,
    )
    return TrainedModel(work, model, optimizer, autocast=work.bf16)


@dataclass(frozen=True, slots=True)
class Fsdp1:
    """FullyShardedDataParallel with each block as a unit."""

    original_parameters: bool

    def __call__(self, work: Work) -> TrainedModel:
        half = torch.bfloat16
        # Cast the inputs of each unit, as FSDP2 and shardwise do.
        precision = MixedPrecision(half, half, cast_forward_inputs=True) if work.bf16 else None
        model = FullyShardedDataParallel(
            work.make(),
            auto_wrap_policy=ModuleWrapPolicy({work.block}),
            use_orig_params=self.original_parameters,
            mixed_precision=precision,
            device_id=CPU,
        )
        return TrainedModel(work, model)


@dataclass(frozen=True, slots=True)
class Fsdp2:
    """PyTorch's ``fully_shard`` on each block and on the root."""

    reshard: bool = True
    unshard_async: bool = False  # wait for gathers when they are used, not when they are issued

    def __call__(self, work: Work, group: dist.ProcessGroup | None = None) -> TrainedModel:
        model = work.make()
        device = next(model.parameters()).device.type
        if group is None:
            mesh = init_device_mesh(device, (dist.get_world_size(),))
        else:
            mesh = DeviceMesh.from_group(group, device)
        options: dict[str, Any] = {"mesh": mesh}
        if not self.reshard:
            options["reshard_after_forward"] = False
        if work.bf16:
            half = torch.bfloat16
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
        for module in list(model.modules()):
            if isinstance(module, work.block):
                fully_shard(module, **options)
        sharded = fully_shard(model, **options)
        if self.unshard_async:
            sharded._set_unshard_async_op(True)  # has no public name
        return TrainedModel(work, model)


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


class DeepSpeed(TrainedModel):
    """ZeRO-3 and torch's fused AdamW."""

    def __init__(self, work: Work) -> None:
        import deepspeed  # noqa: PLC0415 (optional; the import takes seconds and compiles code)

        model = work.make()
        optimizer = fused_adamw(model.parameters())
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": work.bf16},
            },
            dist_init_required=False,
        )
        super().__init__(work, self._engine, optimizer)

    def step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()


def _in_ddp(work: Work, group: dist.ProcessGroup | None = None) -> nn.Module:
    # The model's buffers never change, so DDP need not broadcast them. Renamed in torch 2.13.
    known = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {option: False, "process_group": group}
    return DistributedDataParallel(work.make(), gradient_as_bucket_view=True, **options)
