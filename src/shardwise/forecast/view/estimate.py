"""``sw.estimate``: what `shardwise plan` prints, as an object."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.forecast.adapters import adapters_of
from shardwise.forecast.configuration import Checkpointing, Configuration, Float8, Offload
from shardwise.forecast.forecast import Forecast, Forecaster, Verdict
from shardwise.forecast.machines.find import machine_of
from shardwise.forecast.memory.step import Certificate
from shardwise.forecast.models.functions import find_function
from shardwise.forecast.models.model import Model, model_of
from shardwise.forecast.options import parse_outer, parse_wire
from shardwise.forecast.planned import call_of
from shardwise.forecast.search.applying import apply_to
from shardwise.forecast.search.candidates import Degree, Goal, Objective
from shardwise.forecast.search.search import Ranking, search
from shardwise.forecast.time.step import StepTime
from shardwise.forecast.view.text import describe, reasons
from shardwise.page.formatting import bytes_text, seconds_text
from shardwise.plan.optimizers import OPTIMIZERS, optimizer_spec
from shardwise.plan.spelling import counted

__all__ = ["Estimate", "estimate", "settings_of"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Estimate:
    """The forecast of a model under its best configuration on a cluster.

    Attributes:
        model: name of the model.
        ranking: all configurations that were compared, best first.
        forecast: the forecast of the best one that fits; if none fits, of the smallest.
    """

    model: str
    ranking: Ranking
    forecast: Forecast

    @property
    def configuration(self) -> Configuration:
        """How to train: strategy, sizes, micro-batch, checkpointing, offload, dtypes, optimizer."""
        return self.forecast.configuration

    @property
    def fits(self) -> bool:
        """Whether a rank needs at most the memory of its device."""
        return self.forecast.fits

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of a rank's device at the peak: tensors by category, and what is beside them.

        "reserved" is what the allocator reserves beyond the tensors, and "overhead" what the driver
        and its libraries take.
        """
        found = self.certificate.peak.by_category()
        found["reserved"] = self.certificate.reserve_bytes
        found["overhead"] = self.certificate.overhead_bytes
        return found

    @property
    def device_bytes(self) -> int:
        """The sum of `memory`."""
        return self.certificate.device_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, does not fit, or is so close that a short run should tell."""
        return self.forecast.verdict

    @property
    def host_bytes(self) -> int:
        """Bytes of a rank on the host."""
        return self.certificate.host_bytes

    @property
    def certificate(self) -> Certificate:
        """The memory of a rank at every event of a step."""
        return self.forecast.memory

    @property
    def step(self) -> StepTime:
        """The time of a step by cause, its FLOPs, and the replayed events."""
        return self.forecast.step

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.forecast.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.step.mfu

    @cached_property
    def reasons(self) -> list[str]:
        """What bounds the step, and what other configurations cost or lack."""
        return reasons(self.ranking)

    @property
    def code(self) -> str:
        """Python code that trains with the configuration."""
        return call_of(self.configuration)

    def apply(self, model: nn.Module) -> nn.Module:
        """Checkpoint, compile and shard ``model`` with the configuration, and return it.

        Raises:
            PlanError: the configuration is for another number of ranks, or for model parallelism.
        """
        return apply_to(model, self.configuration)

    def __str__(self) -> str:
        cluster = self.forecast.cluster
        return (
            f"{self.model} on {cluster}: {describe(self.configuration)}: "
            f"{seconds_text(self.step_seconds)} per step, "
            f"{self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}; "
            f"{bytes_text(self.device_bytes)} of {bytes_text(cluster.accelerator.memory_bytes)}, "
            f"{self.verdict}"
        )


def estimate(
    model: str | nn.Module | Callable[[], nn.Module],
    *,
    cluster: str,
    sequence: int = 4096,
    global_batch: int | None = None,
    objective: Objective = "tokens/s",
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False,
    wire: str | None = None,
    outer: str | None = None,
    reproducible: int = 0,
    float8: Float8 = "none",
    float8_gather: bool = False,
    lora: Any = None,
    qlora: bool = False,
    strategies: Sequence[str] = (),
    micro_batches: Sequence[int] = (),
    checkpointing: Sequence[Checkpointing] = (),
    offload: Sequence[Offload] = ("none", "optimizer", "parameters"),
    tensor: Degree = 1,
    pipeline: Degree = 1,
    chunks: Degree = 1,
    context: Degree = 1,
    expert: Degree = 1,
    configuration: Configuration | None = None,
    inputs: Callable[[int, int], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Estimate:
    """Find the best way to train a model on a cluster, without a GPU or a process group.

    ::

        found = sw.estimate("llama-3-8b", cluster="64xH100", sequence=8192, global_batch=512)
        print(found)
        found.memory["activations"], found.mfu, found.reasons

    Args:
        model: a name as for `shardwise plan`, a module on any device (also one of peft), or a
            function that returns one. A module counts with its frozen parameters and its dtypes.
        cluster: such as "64xH100", "64xA100-40GB/8:1600", or "2xFILE" with a calibration.
        sequence: tokens per sequence.
        global_batch: sequences per step over all devices; None: 8 per device.
        objective: "tokens/s", "memory" or "cost".
        optimizer: a name in `plan.optimizers`, or "package.module:Class".
        dtype: dtype of gathered parameters and of compute.
        compiled: whether the blocks run under torch.compile.
        wire: formats in which parameters and gradients travel, such as "gather=int8,reduce=int4".
        outer: replicas that train independently, such as "replicas=2,every=32,dtype=int4".
        reproducible: micro-batches of a step over all ranks, as in `fully_shard`; 0: no promise.
        float8: how linear layers of blocks scale operands of 8-bit products: "tensorwise",
            "rowwise", "delayed" or "mxfp8"; "none": products are in ``dtype``.
        float8_gather: whether the weights of these layers are gathered in 8 bits, and what
            tensor-parallel ranks gather.
        lora: train adapters on a frozen base: "r=16,targets=q_proj+v_proj", or peft's LoraConfig.
        qlora: whether the base of the adapters has 4-bit weights.
        strategies: one name or several names of strategies to try; empty: all.
        micro_batches: sequences per forward of a rank to try; empty: divisors of its batch, up to
            64 (with "auto" degrees, powers of two and all of it).
        checkpointing: kinds of activation checkpointing to try; empty: none, products and full.
        offload: what may be on the host if nothing fits otherwise.
        tensor: ranks that compute a layer together, or "auto".
        pipeline: stages, or "auto".
        chunks: parts of the model on each stage of a pipeline, or "auto".
        context: ranks that share a sequence, or "auto".
        expert: data-parallel ranks that share the experts, or "auto".
        configuration: forecast exactly this instead of searching; the other settings are ignored.
        inputs: returns the arguments of the module's forward for a number of sequences and their
            length: a tensor, a tuple or a mapping. None: tokens [sequences, length], twice if
            forward takes two arguments, or a Hugging Face model's. With ``sequence=1``, figures per
            token are per sample.
        loss: computes the scalar loss from the module's output; None: the output if it is a scalar,
            otherwise the cross-entropy of logits.

    Raises:
        ConfigError: a name or a number is not valid.
        PlanError: a setting does not fit the model.
    """
    machine = machine_of(cluster)
    resolved = model_of(model, inputs=inputs, loss=loss)
    forecaster = Forecaster(resolved, machine)
    if configuration is not None:
        if not isinstance(configuration, Configuration):
            raise ConfigError(
                f"configuration={configuration!r}: expected that of another estimate, or a changed "
                "one"
            )
        if configuration.row.num_axes == 1 < configuration.replicas and configuration.row.shards:
            raise ConfigError(
                f"configuration: replicas={configuration.replicas}: strategy "
                f"{configuration.strategy!r} has no replicas; set it to 1, or use 'hsdp'"
            )
        if configuration.world_size != machine.cluster.num_devices:
            raise ConfigError(
                f"configuration: it is for {counted(configuration.world_size, 'rank')}, but "
                f"cluster={cluster!r} has {machine.cluster.num_devices:,} devices"
            )
        found = forecaster.forecast(configuration)
        goal = Goal(global_batch=configuration.global_batch, settings=configuration)
        fitting, too_large = ((found,), ()) if found.fits else ((), (found,))
        return Estimate(resolved.name, Ranking(goal, fitting, too_large), found)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(map(str, _DTYPES))}")
    settings = settings_of(
        resolved,
        optimizer=optimizer,
        wire=wire,
        outer=outer,
        lora=lora,
        qlora=qlora,
        sequence=sequence,
        compute_dtype=dtype,
        compiled=compiled,
        reproducible=reproducible,
        float8=float8,
        float8_gather=float8_gather,
    )
    goal = Goal(
        global_batch=8 * machine.cluster.num_devices if global_batch is None else global_batch,
        settings=settings,
        objective=objective,
        strategies=_several(strategies),
        micro_batches=_several(micro_batches),
        checkpointing=_several(checkpointing),
        offload=_several(offload) or ("none",),
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        context=context,
        expert=expert,
    )
    ranking = search(forecaster, goal)
    return Estimate(resolved.name, ranking, ranking.winner)


def _several(given: Any) -> tuple[Any, ...]:
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return (given,) if is_one else tuple(given)


def settings_of(
    model: Model,
    base: Configuration | None = None,
    *,
    optimizer: str | None = None,
    wire: str | None = None,
    outer: str | None = None,
    lora: Any = None,
    qlora: bool = False,
    **settings: Any,
) -> Configuration:
    """Return what all candidates share: ``base``, changed by all that is not None.

    Args:
        model: gives the units and the dtype of shards if there is no ``base``.
        base: how a run trains that is planned; None: the defaults of `Configuration`.
        optimizer: as of `estimate`, as are the others.
        settings: fields of `Configuration`.

    Raises:
        ConfigError: an option is malformed, or there is no such optimizer.
        PlanError: a value is out of range, or contradicts another.
    """
    base = base or Configuration(master_dtype=model.master_dtype)
    changes = {name: value for name, value in settings.items() if value is not None}
    if base.units == "auto":
        changes["units"] = model.units
    if optimizer is not None and optimizer != base.optimizer:
        spec = optimizer_spec(optimizer)
        if optimizer not in OPTIMIZERS:  # a class, which must exist
            find_function(optimizer)
        changes |= {"optimizer": optimizer, "optimizer_loop": spec.loop}
        changes["optimizer_options"] = spec.options
    if wire is not None:
        changes["wire"] = parse_wire(wire)
    if outer is not None:
        changes["outer"], changes["outer_replicas"] = parse_outer(outer)
    if lora is not None or qlora:
        changes["adapters"] = adapters_of(base.adapters if lora is None else lora, qlora=qlora)
    return replace(base, **changes)
