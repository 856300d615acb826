"""Bytes of a training run on one rank, and in one process without sharding."""

from dataclasses import dataclass

from shardwise.forecast.memory import StepMemory, step_memory
from shardwise.plan.plan import Plan
from shardwise.train.config import Config

__all__ = ["Footprint", "forecast_step", "process_footprint", "rank_footprint"]

ADAMW_STATES = 2  # the running means of the gradient and of its square


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a step without activations, which sharding does not change."""

    parameters: int
    gradients: int
    optimizer: int
    transient: int  # gathered units and gradients that are being reduced, at the peak
    host: int = 0  # part of the above, offloaded to the host

    @property
    def total(self) -> int:
        """An upper bound of the peak: the last gradients exist when less is transient."""
        return self.parameters + self.gradients + self.optimizer + self.transient


def process_footprint(plan: Plan) -> Footprint:
    """One process that holds the whole model."""
    states = ADAMW_STATES * plan.gradient_bytes
    return Footprint(plan.parameter_bytes, plan.gradient_bytes, states, transient=0)


def rank_footprint(plan: Plan, memory: StepMemory, *, transient: int | None = None) -> Footprint:
    """One rank, with the forecast's transient bytes or with measured ones."""
    states_on_host = ADAMW_STATES * sum(
        unit.gradient_shard_bytes for unit in plan.units if unit.offload is not None
    )
    return Footprint(
        parameters=plan.shard_bytes + sum(unit.device_copy_bytes for unit in plan.units),
        gradients=memory.gradient_bytes,
        optimizer=ADAMW_STATES * plan.gradient_shard_bytes,
        transient=memory.transient_bytes if transient is None else transient,
        host=memory.host_bytes + states_on_host,
    )


def forecast_step(plan: Plan, config: Config, device: str) -> StepMemory:
    """The memory of a step on ``device``, "cpu" or "cuda"."""
    accumulates = config.micro_batch < config.rank_batch
    whole = config.memory.accumulate == "whole"
    return step_memory(
        plan,
        accumulates=accumulates and not whole,
        unreduced=accumulates and whole,
        steps_in_backward=config.memory.step_in_backward,
        on_cpu=device == "cpu",
    )
