"""What ranks tell each other when a wait takes long, and what follows from it.

Nothing here costs a step anything: a rank speaks only once it has waited a second. It then posts
a `Report` to the job's store, reads the others', and asks `verdict`. Reports are posted at every
*beat* of waiting, so a report that stays the same over two beats is a rank that does not move.

Ranks are stuck for good if none of them moves and no ticket that runs was taken by all that take
part in it: what they all took will end, however slow the wire.
"""

import contextlib
import json
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from torch.distributed.distributed_c10d import Store

from shardwise.errors import PeerAborted, PeerLost, RanksDiverged, StepError

__all__ = ["Board", "LinkState", "Report", "Scope", "Ticket", "Topology", "Trail", "verdict"]

BEATS = 2
TRAIL_LENGTH = 64  # a rank stalls a few units after it took another way than the others


class Scope(StrEnum):
    """Who exchanges something in a collective, seen from one rank."""

    SHARDS = "shards"  # those whose shards make the model with its own
    ROW = "row"  # those of its replica
    COLUMN = "column"  # those that stand at its place in the other replicas
    CROSS = "cross"  # its row, and then its column
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Topology:
    """Who stands where; see `mesh.Axis`."""

    rows: tuple[tuple[int, ...], ...]
    is_two_level: bool = False

    def partners(self, scope: str, rank: int) -> set[int]:
        """The ranks that ``rank`` exchanges something with."""
        row = next(row for row in self.rows if rank in row)
        place = row.index(rank)
        column = {other[place] for other in self.rows}
        everyone = {other for row in self.rows for other in row}
        match scope:
            case Scope.ROW:
                partners = set(row)
            case Scope.COLUMN:
                partners = column
            case Scope.CROSS:
                partners = set(row) | column
            case Scope.SHARDS:
                partners = everyone if self.is_two_level else set(row)
            case Scope.ALL:
                partners = everyone
            case _:
                size = int(scope)  # so many neighbours of its row
                first = place // size * size
                partners = set(row[first : first + size])
        return partners - {rank}


@dataclass(frozen=True, slots=True)
class Ticket:
    """One collective: the ``number``-th of its link; ``slot_bytes`` pass between any two ranks."""

    number: int
    label: str
    slot_bytes: int
    scope: str = Scope.SHARDS
    is_claimed: bool = False  # it may be in memory that its ranks have in common

    @property
    def tag(self) -> int:
        """Names the collective on the wire, so that two different ones can never mix."""
        text = f"{self.number} {self.label} {self.slot_bytes}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class LinkState:
    """How far a rank has come on one link."""

    issued: int
    running: Ticket | None
    ended: tuple[int, ...]  # tags of the last tickets

    def took(self, ticket: Ticket) -> bool:
        return ticket.tag in self.ended or (
            self.running is not None and self.running.tag == ticket.tag
        )


class Trail:
    """The units whose forwards a rank began in the step under way, in order."""

    def __init__(self) -> None:
        self._step = 0
        self._units: deque[str] = deque(maxlen=TRAIL_LENGTH)
        self.num_entered = 0

    @property
    def entered(self) -> tuple[str, ...]:
        """The last of them."""
        return tuple(self._units)

    def append(self, step: int, unit: str) -> None:
        if step != self._step:
            self.clear()
            self._step = step
        self._units.append(unit)
        self.num_entered += 1

    def clear(self) -> None:
        self._units.clear()
        self.num_entered = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Where one rank stands.

    ``error`` says why it gave up; ``relayed`` that the words are those of another rank's error,
    ``diverged`` that the ranks had diverged, and ``lost`` that one of them is gone.
    ``entered`` are the last of ``num_entered`` units that it began in this step.
    """

    epoch: int
    beat: int
    step: int
    where: str
    links: tuple[LinkState, ...]
    error: str | None = None
    relayed: bool = False
    diverged: bool = False
    num_entered: int = 0
    entered: tuple[str, ...] = ()
    lost: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Report":
        fields = json.loads(text)
        fields["links"] = tuple(
            LinkState(
                issued=link["issued"],
                running=link["running"] and Ticket(**link["running"]),
                ended=tuple(link["ended"]),
            )
            for link in fields["links"]
        )
        fields["entered"] = tuple(fields["entered"])
        return Report(**fields)


class Board:
    """The place of one group's reports in the store that all its ranks can read."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = store
        self._keys = [f"shardwise/{name}/{other}" for other in range(size)]
        self._own = self._keys[rank]

    def post(self, report: Report) -> None:
        """Show ``report`` to the others.

        Raises:
            PeerLost: the process that holds the store is gone; so does `read`.
        """
        with _store_answers():
            self._store.set(self._own, report.to_json())

    def read(self) -> list[Report | None]:
        """The last report of every rank, None for those that never posted one."""
        with _store_answers():
            return [
                Report.from_json(self._store.get(key)) if self._store.check([key]) else None
                for key in self._keys
            ]


@contextlib.contextmanager
def _store_answers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the process that holds the job's store is gone: {error}") from error


def verdict(
    reports: Sequence[Report | None], epoch: int, topology: Topology | None = None
) -> StepError | None:
    """The error to raise on every rank, or None while there is hope.

    Args:
        reports: of all ranks.
        epoch: reports of an earlier one are old.
        topology: who stands where; None for one replica over all ranks.
    """
    current = {rank: r for rank, r in enumerate(reports) if r is not None and r.epoch == epoch}
    for rank, report in current.items():
        if report.error is not None:
            return _relay(rank, report)
    if len(current) < len(reports) or any(report.beat < BEATS for report in current.values()):
        return None
    if _can_move(current, topology or Topology((tuple(range(len(reports))),))):
        return None
    places = (f"  rank {rank}: step {r.step}, {r.where}" for rank, r in current.items())
    return RanksDiverged(
        "ranks wait for different things, so none can go on:\n"
        + "\n".join(places)
        + _parting(current)
        + "\nEvery rank must run the same units in the same order; look for a branch, a loop "
        "length or an exception that differs by rank."
    )


def _relay(rank: int, report: Report) -> StepError:
    if report.diverged:
        return RanksDiverged(report.error)
    if report.lost:
        return PeerLost(report.error)
    if report.relayed:
        return PeerAborted(report.error)
    return PeerAborted(f"rank {rank} gave up in step {report.step}: {report.error}")


def _can_move(reports: Mapping[int, Report], topology: Topology) -> bool:
    """Whether some rank's ticket was taken by all that it exchanges something with."""
    for rank, report in reports.items():
        for link, state in enumerate(report.links):
            if state.running is not None:
                partners = topology.partners(state.running.scope, rank)
                if all(reports[other].links[link].took(state.running) for other in partners):
                    return True
    return False


def _parting(reports: Mapping[int, Report]) -> str:
    """The first units in which the ranks differ, if that is what they differ in."""
    if len({report.step for report in reports.values()}) > 1:
        return ""
    skipped = {rank: r.num_entered - len(r.entered) for rank, r in reports.items()}
    end = min(report.num_entered for report in reports.values())
    for position in range(max(skipped.values()), end):
        by_unit: dict[str, list[str]] = {}
        for rank, report in reports.items():
            unit = report.entered[position - skipped[rank]]
            by_unit.setdefault(unit, []).append(str(rank))
        if len(by_unit) > 1:
            ways = (f"rank {', '.join(ranks)} entered {unit}" for unit, ranks in by_unit.items())
            return f"\nThey parted at call {position + 1} of the step: {'; '.join(ways)}."
    return ""
