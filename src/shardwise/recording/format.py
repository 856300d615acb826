"""A recording: what every rank did in a run, in files that `shardwise report` reads.

``RUN_DIR/recording/rank-00003.jsonl`` has one JSON object per line: the header first, then events,
spans and memory samples in chronological order. Times are seconds on the clock of rank 0: each rank
measures the offset of its own clock when it starts to record, and adds it.
"""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import EventKind

__all__ = [
    "MEMORY_CATEGORIES",
    "Header",
    "HeldBytes",
    "Line",
    "MemorySample",
    "RankRecording",
    "RecordedEvent",
    "RecordingError",
    "Span",
    "StepTotals",
    "UnitFigures",
    "file_of_rank",
    "read_recording",
    "to_json",
]


class RecordingError(ShardwiseError):
    """A recording cannot be read."""


@dataclass(frozen=True, slots=True)
class UnitFigures:
    """The fields of a `UnitPlan` that a report needs, with the same names."""

    label: str
    num_parameters: int  # number of tensors
    num_elements: int  # without padding
    gathered_bytes: int
    kept_bytes: int
    shard_bytes: int
    own_bytes: int  # this rank's bytes of the parameters: `shard_bytes` without padding
    gradient_bytes: int
    gradient_shard_bytes: int
    reshard: bool
    subgroup: int
    two_level_gather: bool
    has_child_units: bool
    parent: int | None
    offloads_gradients: bool = False

    @classmethod
    def of(cls, unit: UnitPlan, own_bytes: int) -> Self:
        own: dict[str, Any] = {
            "num_parameters": len(unit.parameters),
            "num_elements": sum(spec.num_elements for spec in unit.parameters),
            "own_bytes": own_bytes,
        }
        same = {f.name: getattr(unit, f.name) for f in fields(cls) if f.name not in own}
        return cls(**own, **same)

    @property
    def is_trainable(self) -> bool:
        """Whether it has gradients to exchange."""
        return self.gradient_bytes > 0


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a rank's file."""

    rank: int
    world_size: int
    strategy: str
    prefetch: int
    replicas: int
    device: str  # such as "cpu" or "NVIDIA H100"
    clock_offset: float  # seconds added to this rank's clock to get rank 0's
    units: tuple[UnitFigures, ...]
    info: dict[str, Any]  # further facts: optimizer, versions, granularity, ...
    format: Literal[1] = 1
    kind: Literal["header"] = "header"


class _Interval:
    __slots__ = ()
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class RecordedEvent(_Interval):
    """An event of the schedule, with its times."""

    step: int  # in the ledger's count: one forward and its backward
    event: EventKind
    unit: int  # index in the header's units
    bytes: int
    began: float
    ended: float  # for a wait, `ended - began` is exposed communication
    spans: tuple[tuple[float, float], ...] = ()  # begin and end of communication it launched
    kind: Literal["event"] = "event"


@dataclass(frozen=True, slots=True)
class Span(_Interval):
    """Work around the steps: "data", "optimizer", "validation", "checkpoint", ..."""

    step: int  # in the ledger's count: the current step, or the next one
    name: str
    began: float
    ended: float
    kind: Literal["span"] = "span"


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that a rank holds, by category; the page stacks them in this order."""

    shards: int
    optimizer: int
    gradients: int  # gradient shards and reduce buffers
    gathered: int
    activations: int  # tensors that autograd keeps for backward
    buffers: int

    @property
    def total(self) -> int:
        return sum(getattr(self, category) for category in MEMORY_CATEGORIES)


MEMORY_CATEGORIES = tuple(field.name for field in fields(HeldBytes))


@dataclass(frozen=True, slots=True)
class MemorySample(HeldBytes):
    """Bytes that a rank holds at one time."""

    step: int
    at: float
    unit: int  # the last unit whose forward or backward began
    kind: Literal["memory"] = "memory"


@dataclass(frozen=True, slots=True)
class StepTotals(_Interval):
    """The totals of one step. They are written for every step, even if it has no events."""

    step: int
    began: float
    ended: float
    updates: int  # number of parameter updates before the step
    # None on an accelerator, unless the step was recorded in detail or the ledger takes all times:
    exposed_seconds: float | None  # time that compute waited for communication
    communication_seconds: float | None  # time of gathers and reductions, hidden or exposed
    communication_bytes: int
    peak_gathered_bytes: int
    tokens: int | None = None  # tokens that counted on this rank
    padded_tokens: int | None = None  # padding
    kind: Literal["step"] = "step"


Line = Header | RecordedEvent | Span | MemorySample | StepTotals


@cache
def _adapters() -> tuple[Any, Any]:
    """Pydantic's adapters for a line and for several. Forecasts use events without pydantic."""
    from pydantic import Field, TypeAdapter  # noqa: PLC0415

    line: Any = Annotated[Line, Field(discriminator="kind")]
    return TypeAdapter(line), TypeAdapter(list[line])


@dataclass(frozen=True, slots=True)
class RankRecording:
    header: Header
    events: tuple[RecordedEvent, ...]
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    steps: tuple[StepTotals, ...]

    @property
    def detailed_steps(self) -> tuple[int, ...]:
        """Complete steps whose events were recorded."""
        ended = {step.step for step in self.steps}
        return tuple(sorted({event.step for event in self.events} & ended))


def file_of_rank(directory: Path, rank: int) -> Path:
    return directory / "recording" / f"rank-{rank:05}.jsonl"


def to_json(line: Line) -> str:
    """Serialize one line, without a newline."""
    text: str = _adapters()[0].dump_json(line).decode()
    return text


def read_recording(directory: Path) -> tuple[RankRecording, ...]:
    """Read the files of all ranks of the run in ``directory``, in rank order.

    A RecordingError names the file and the line of damage, or the ranks whose files are missing.
    """
    paths = sorted((directory / "recording").glob("rank-*.jsonl"))
    if not paths:
        if any(directory.glob("rank-*.jsonl")):
            raise ConfigError(
                f"{directory} is a recording; expected the directory that contains it"
            )
        raise ConfigError(
            f"{directory} has no recording; record a run with `shardwise train` or with "
            "`with sw.record(model, directory):`"
        )
    ranks = tuple(_read_rank(path) for path in paths)
    expected = list(range(ranks[0].header.world_size))
    found = [one.header.rank for one in ranks]
    if found != expected:
        raise RecordingError(
            f"{directory}: expected the files of {len(expected)} ranks, got the files of ranks "
            f"{found}; copy the files of every host into this directory"
        )
    return ranks


def _read_rank(path: Path) -> RankRecording:
    from pydantic import ValidationError  # noqa: PLC0415

    complete = path.read_bytes().split(b"\n")[:-1]  # without a line that a kill truncated
    try:
        lines = _adapters()[1].validate_json(b"[" + b",".join(complete) + b"]")
    except ValidationError as error:
        first = error.errors()[0]
        number, *where = first["loc"] or (0,)
        place = f"line {int(number) + 1}{''.join(f', {key}' for key in where)}"
        raise RecordingError(f"{path}: {place}: {first['msg']}") from None
    if not lines or not isinstance(header := lines[0], Header):
        raise RecordingError(f"{path}: line 1: expected the header of a recording")
    return RankRecording(
        header,
        tuple(line for line in lines if isinstance(line, RecordedEvent)),
        tuple(line for line in lines if isinstance(line, Span)),
        tuple(line for line in lines if isinstance(line, MemorySample)),
        tuple(line for line in lines if isinstance(line, StepTotals)),
    )
