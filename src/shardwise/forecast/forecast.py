"""The forecast of a configuration: memory of a rank and time of a step."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property, partial

from torch import nn
from torch.optim import AdamW

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import Cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.memory.step import Certificate, memory_certificate
from shardwise.forecast.models.model import Model, workload_of
from shardwise.forecast.planned import plan_of
from shardwise.forecast.time.saving import CheckpointPlan, save_plan
from shardwise.forecast.time.step import StepTime, step_time
from shardwise.forecast.work import Workload
from shardwise.plan.plan import Plan

__all__ = ["Forecast", "Forecaster", "Verdict"]

_SECONDS_PER_HOUR = 3600.0


class Verdict(StrEnum):
    """Whether a configuration fits."""

    FITS = "fits"
    CLOSE = "close: measure it"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True)
class Forecast:
    """The forecast of one configuration on one cluster."""

    configuration: Configuration
    cluster: Cluster
    memory: Certificate
    time: StepTime | None = None  # None: not predicted
    stage: int = -1  # the pipeline stage whose time it is

    @property
    def missing_bytes(self) -> int:
        """Bytes by which a device's memory is too small; negative if memory is left."""
        return self.memory.device_bytes - self.cluster.accelerator.memory_bytes

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def verdict(self) -> Verdict:
        """Whether the range of the memory is within that of the device."""
        low, high = self.memory.range_bytes
        available = self.cluster.accelerator.memory_bytes
        if high <= available:
            return Verdict.FITS
        return Verdict.DOES_NOT_FIT if low > available else Verdict.CLOSE

    @cached_property
    def step(self) -> StepTime:
        """The time of a step; only for forecasts of `Forecaster.timed`."""
        assert self.time is not None, "Forecaster.timed adds it"
        return self.time

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.configuration.tokens_per_step / self.step.seconds

    def gpu_hours(self, num_tokens: float) -> float:
        """Return the device-hours of all devices together for ``num_tokens``."""
        seconds = num_tokens / self.tokens_per_second
        return seconds * self.cluster.num_devices / _SECONDS_PER_HOUR


class Forecaster:
    """Forecasts of one model on one machine. Work that configurations share is done once."""

    def __init__(self, model: Model, machine: Machine) -> None:
        self.model = model
        self.machine = machine
        self.on_cpu = machine.computes_on_cpu  # whether ranks allocate in the memory of the host
        self._build, self._plan = cache(model.build), cache(plan_of)
        self._trace = cache(partial(workload_of, model))

    @property
    def cluster(self) -> Cluster:
        return self.machine.cluster

    def with_devices(self, num_devices: int) -> "Forecaster":
        """Return a forecaster of the same model on another number of the same devices."""
        cluster = replace(self.cluster, num_devices=num_devices)
        other = copy(self)  # shares plans and traces, whose keys contain the ranks
        other.machine = replace(self.machine, cluster=cluster)
        return other

    def forecast(self, configuration: Configuration) -> Forecast:
        """Predict memory and time."""
        return self.timed(self.memory(configuration))

    def memory(self, configuration: Configuration) -> Forecast:
        """Predict only memory, which is cheaper, for the pipeline stage that needs the most."""
        # The first stage holds the most micro-batches, and the last one has the head and the loss.
        stages = sorted({0, configuration.pipeline - 1})
        certificates = [self.memory_of_stage(configuration, stage) for stage in stages]
        largest = max(certificates, key=lambda one: one.device_bytes)
        return Forecast(configuration, self.cluster, largest)

    def memory_of_stage(self, configuration: Configuration, stage: int = -1) -> Certificate:
        """Predict the memory of a rank of a stage, by default of the last stage."""
        return memory_certificate(
            self.plan(configuration, stage),
            self.workload(configuration, stage),
            configuration,
            stage=stage % configuration.pipeline,
            buffer_bytes=sum(one.nbytes for one in self._module(configuration, stage).buffers()),
            on_cpu=self.on_cpu,
        )

    def timed(self, forecast: Forecast) -> Forecast:
        """Add the time of a step, predicted for the slowest pipeline stage."""
        configuration = forecast.configuration
        whole = None
        if configuration.pipeline > 1:
            whole = self.workload(replace(configuration, pipeline=1, chunks=1))
        # The first stage has the most blocks, and the last one has the head.
        times = {
            stage: step_time(
                self.plan(configuration, stage),
                self.workload(configuration, stage),
                self.machine,
                configuration,
                whole,
            )
            for stage in sorted({0, configuration.pipeline - 1})
        }
        slowest = max(times, key=lambda stage: times[stage].seconds)
        return replace(forecast, time=times[slowest], stage=slowest)

    def checkpoint(self, configuration: Configuration, stage: int = -1) -> CheckpointPlan:
        """Plan the checkpoint of the model, and of its optimizer if that is AdamW.

        With tensor parallelism or a pipeline, the plan covers the data-parallel ranks that share
        one rank's part of a stage, by default of the last stage.
        """
        plan = self.plan(configuration, stage)
        has_states = configuration.optimizer == "adamw"
        optimizer = (lambda model: AdamW(model.parameters())) if has_states else None
        return save_plan(self._module(configuration, stage), plan, optimizer=optimizer)

    def plan(self, configuration: Configuration, stage: int = -1) -> Plan:
        """Plan the part of the model on one rank of a stage, by default of the last stage."""
        shared = replace(
            configuration,
            micro_batch=1,
            accumulation=1,
            checkpointing="none",
            activation_offload=False,
            prefetch=1,
        )
        plan = self._plan(self._module(shared, stage), shared)
        return replace(plan, prefetch=configuration.prefetch)

    def workload(self, configuration: Configuration, stage: int = -1) -> Workload:
        """Trace one micro-batch of one rank of a stage, by default of the last stage."""
        return self._trace(*_key(configuration, stage, _OF_TRACES))

    def _module(self, configuration: Configuration, stage: int) -> nn.Module:
        return self._build(*_key(configuration, stage, _OF_MODULES))


# The settings that determine a module's parameters, and those that determine a trace.
_OF_MODULES = (
    "tensor",
    "split_vocabulary",
    "pipeline",
    "chunks",
    "expert",
    "sequence",
    "master_dtype",
    "compute_dtype",
    "attention",
    "adapters",
    "units",
)
_OF_TRACES = (
    *_OF_MODULES,
    "sequence_parallel",
    "context",
    "micro_batch",
    "checkpointing",
    "gather_dtype",
    "reduce_dtype",
    "autocast",
)


def _key(
    configuration: Configuration, stage: int, names: Iterable[str]
) -> tuple[Configuration, int]:
    """Return a configuration with the named settings, and defaults for all others; and a stage."""
    settings = {name: getattr(configuration, name) for name in names}
    shared = Configuration(shard_size=configuration.expert, **settings)
    return shared, stage % configuration.pipeline
