"""Bytes of a training run on one rank, and what one process alone would need."""

from dataclasses import dataclass

from shardwise.forecast.memory import StepMemory, step_memory
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.transport.api import Capabilities

__all__ = ["Footprint", "foresee", "one_process", "one_rank"]

ADAMW_STATES = 2  # the running means of the gradient and of its square


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that a step needs, activations aside (sharding does not touch those)."""

    parameters: int
    gradients: int
    optimizer: int
    transient: int  # whole units and their gradients on the way to the shards, at the peak
    host: int = 0  # of these, in the memory of the host by choice

    @property
    def total(self) -> int:
        """No less than the peak: the last gradients come when less is on the way."""
        return self.parameters + self.gradients + self.optimizer + self.transient


def one_process(plan: Plan) -> Footprint:
    """Everything whole, nothing to gather."""
    return Footprint(
        parameters=plan.parameter_bytes,
        gradients=plan.gradient_bytes,
        optimizer=ADAMW_STATES * plan.gradient_bytes,
        transient=0,
    )


def one_rank(plan: Plan, memory: StepMemory, *, transient: int | None = None) -> Footprint:
    """What a rank keeps, and what a step takes besides: as foreseen, or ``transient`` bytes."""
    parameters = plan.shard_bytes + sum(unit.device_copy_bytes for unit in plan.units)
    states = ADAMW_STATES * plan.gradient_shard_bytes
    states_on_host = ADAMW_STATES * sum(
        unit.gradient_shard_bytes for unit in plan.units if unit.offload is not None
    )
    return Footprint(
        parameters=parameters,
        gradients=memory.gradient_bytes,
        optimizer=states,
        transient=memory.transient_bytes if transient is None else transient,
        host=memory.host_bytes + states_on_host,
    )


def foresee(plan: Plan, config: Config, device: str) -> StepMemory:
    """The memory of a step of a run on ``device``, "cpu" or "cuda"."""
    holds = config.memory.accumulate == "whole"
    several = config.micro_batch < config.share
    return step_memory(
        plan,
        transport=Capabilities(point_to_point=device == "cpu" and config.shard.nproc > 1),
        accumulates=several and not holds,
        holds=several and holds,
        steps_in_backward=config.memory.step_in_backward,
        on_cpu=device == "cpu",
    )
