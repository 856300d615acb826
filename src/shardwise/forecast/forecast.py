"""The forecast of a configuration: the memory of a rank and the time of a step, joined."""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from torch.optim import AdamW

from shardwise.forecast.calibrated import CalibratedMachine
from shardwise.forecast.certificate import Certificate, memory_certificate
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.hardware import Cluster
from shardwise.forecast.machine import Machine
from shardwise.forecast.models import Model, workload_of
from shardwise.forecast.planned import plan_of
from shardwise.forecast.saving import CheckpointPlan, save_plan
from shardwise.forecast.timeline import StepTime, step_time
from shardwise.forecast.work import Workload
from shardwise.plan.plan import Plan

__all__ = ["Forecast", "Forecaster"]

_SECONDS_PER_HOUR = 3600.0
_Key = tuple[Configuration, int]  # what they have in common, and the stage of the pipeline


@dataclass(frozen=True)
class Forecast:
    """One configuration on one cluster."""

    configuration: Configuration
    cluster: Cluster
    memory: Certificate
    time: StepTime | None = None  # None: it was not asked for

    @property
    def missing_bytes(self) -> int:
        """What the memory of a device lacks; negative: that is left."""
        return self.memory.device_bytes - self.cluster.accelerator.memory_bytes

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @cached_property
    def step(self) -> StepTime:
        """The time of a step, of a configuration that fits."""
        assert self.time is not None, "Forecaster.timed adds it"
        return self.time

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.configuration.tokens_per_step / self.step.seconds

    def gpu_hours(self, num_tokens: float) -> float:
        """Of all devices together, for as many tokens."""
        seconds = num_tokens / self.tokens_per_second
        return seconds * self.cluster.num_devices / _SECONDS_PER_HOUR


class Forecaster:
    """Forecasts of one model on one machine; what configurations share is made once."""

    def __init__(self, model: Model, machine: Machine) -> None:
        self.model = model
        self.machine = machine
        self._modules: dict[_Key, nn.Module] = {}
        self._plans: dict[_Key, Plan] = {}
        self._workloads: dict[_Key, Workload] = {}

    @property
    def cluster(self) -> Cluster:
        return self.machine.cluster

    def with_devices(self, num_devices: int) -> "Forecaster":
        """The same model on more or fewer of the same devices."""
        cluster = replace(self.cluster, num_devices=num_devices)
        other = Forecaster(self.model, replace(self.machine, cluster=cluster))
        other._modules, other._plans = self._modules, self._plans  # which name their ranks
        other._workloads = self._workloads
        return other

    def forecast(self, configuration: Configuration) -> Forecast:
        """Memory and time."""
        return self.timed(self.memory(configuration))

    def memory(self, configuration: Configuration) -> Forecast:
        """Memory alone, which is cheaper: of the stage of the pipeline that takes most."""
        on_cpu = isinstance(self.machine, CalibratedMachine) and self.machine.calibration.cores > 0
        # The first stage holds the most micro-batches, and the last one has the head and the loss.
        certificates = [
            memory_certificate(
                self.plan(configuration, stage),
                self.workload(configuration, stage),
                configuration,
                stage=stage,
                on_cpu=on_cpu,
            )
            for stage in sorted({0, configuration.pipeline - 1})
        ]
        largest = max(certificates, key=lambda one: one.device_bytes)
        return Forecast(configuration, self.cluster, largest)

    def timed(self, forecast: Forecast) -> Forecast:
        """The same with the time of a step, which is that of the last stage."""
        configuration = forecast.configuration
        plan, workload = self.plan(configuration), self.workload(configuration)
        time = step_time(plan, workload, self.machine, configuration)
        return replace(forecast, time=time)

    def checkpoint(self, configuration: Configuration, stage: int = -1) -> CheckpointPlan:
        """Of the model, and of AdamW if that is its optimizer.

        With tensor parallelism or a pipeline it is that of the data-parallel ranks which share one
        rank's part of a stage, by default of the last one.
        """
        plan = self.plan(configuration, stage)
        has_states = configuration.optimizer == "adamw"
        optimizer = (lambda model: AdamW(model.parameters())) if has_states else None
        module = self._module(configuration, stage % configuration.pipeline)
        return save_plan(module, plan, optimizer=optimizer)

    def plan(self, configuration: Configuration, stage: int = -1) -> Plan:
        """Of what one rank of a stage holds, by default of the last one."""
        one = replace(
            configuration, micro_batch=1, accumulation=1, checkpointing="none", prefetch=1
        )
        key = one, stage % configuration.pipeline
        if key not in self._plans:
            self._plans[key] = plan_of(self._module(*key), one)
        return replace(self._plans[key], prefetch=configuration.prefetch)

    def workload(self, configuration: Configuration, stage: int = -1) -> Workload:
        """Of one micro-batch of one rank of a stage."""
        one = replace(
            configuration,
            strategy="fsdp",
            shard_size=configuration.expert,
            replicas=1,
            reshard_after_forward=None,
            accumulation=1,
            offload="none",
            prefetch=1,
        )
        key = one, stage % configuration.pipeline
        if key not in self._workloads:
            self._workloads[key] = workload_of(self.model, *key)
        return self._workloads[key]

    def _module(self, configuration: Configuration, stage: int) -> nn.Module:
        one = Configuration(
            tensor=configuration.tensor,
            split_vocabulary=configuration.split_vocabulary,
            pipeline=configuration.pipeline,
            chunks=configuration.chunks,
            expert=configuration.expert,
            shard_size=configuration.expert,
            sequence=configuration.sequence,
            master_dtype=configuration.master_dtype,
            attention=configuration.attention,
        )
        key = one, stage
        if key not in self._modules:
            self._modules[key] = self.model.build(*key)
        return self._modules[key]
