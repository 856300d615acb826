"""What a run tells of itself: before the first step, after each one, and at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.plan.plan import Plan
from shardwise.runtime.ledger import Ledger
from shardwise.train.baselines import Baselines
from shardwise.train.config import Config
from shardwise.train.memory import Footprint
from shardwise.train.switches import Switch

__all__ = ["Observer", "Record", "Silent", "Start", "Summary"]


@dataclass(frozen=True)
class Start:
    """What is known before the first step."""

    config: Config
    plan: Plan
    device: str  # "cpu" or "cuda"
    text: str  # what is trained on, in words
    baselines: Baselines
    switches: Sequence[Switch] = ()  # that are not where they are by default


@dataclass(frozen=True, slots=True)
class Record:
    """One step; losses are means over the global batch, in nats per byte."""

    step: int  # from 1
    loss: float
    grad_norm: float | None  # before clipping; None where units are stepped one by one
    lr: float
    tokens: int  # seen since the start
    tokens_per_second: float  # of this step, all ranks together
    seconds: float  # since the start, validation included
    validation_loss: float | None = None  # where this step was followed by a validation
    loss_scale: float | None = None  # in float16; halved after a step that was skipped


@dataclass(frozen=True)
class Summary:
    """What is known after the last step."""

    loss: float  # mean of the last steps
    loss_steps: int  # how many those are
    validation_loss: float
    tokens: int
    tokens_per_second: float  # validation aside
    seconds: float
    rank: Footprint  # of the rank that needs most
    process: Footprint  # of one process that trains alone
    resident_peaks: tuple[int, ...]  # bytes measured on each rank, the libraries included
    overlapped_share: float  # of the time of the gathers, hidden behind compute
    sample: str
    ledger: Ledger  # of the first rank


class Observer(Protocol):
    """Who is told."""

    def begin(self, start: Start) -> None: ...

    def step(self, record: Record) -> None: ...

    def stop(self, signal: int, step: int) -> None: ...

    def end(self, summary: Summary) -> None: ...

    def close(self) -> None: ...


class Silent:
    """The observer of every rank but the first."""

    def begin(self, start: Start) -> None:
        pass

    def step(self, record: Record) -> None:
        pass

    def stop(self, signal: int, step: int) -> None:
        pass

    def end(self, summary: Summary) -> None:
        pass

    def close(self) -> None:
        pass
