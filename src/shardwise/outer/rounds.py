"""The round of a fragment that is next: the differences that have come so far."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.outer.frames import Frame, Kind
from shardwise.outer.members import Replica

__all__ = ["Difference", "Round", "rounds_text"]


@dataclass(frozen=True, eq=False)
class Difference:
    """Of one rank."""

    body: bytes
    step: int  # the local step after which it was taken
    values: str  # a checksum of the shared parameters that it was taken from


@dataclass(eq=False)
class Round:
    """The round of a fragment that is next."""

    fragment: int
    number: int
    digest: str  # of all before it
    differences: dict[int, dict[int, Difference]] = field(default_factory=dict)  # replica, rank
    timer: asyncio.TimerHandle | None = None

    def add(self, replica: int, rank: int, difference: Difference) -> int | None:
        """Keep it; returns another replica whose rank took it from other shared parameters."""
        self.differences.setdefault(replica, {})[rank] = difference
        others = (
            number
            for number, ranks in self.differences.items()
            if rank in ranks and ranks[rank].values != difference.values
        )
        return next(others, None)

    def has_all_of(self, replica: Replica) -> bool:
        return len(self.differences.get(replica.number, ())) == len(replica.ranks)

    def is_passed_by(self, replica: Replica) -> bool:
        """Whether a rank of it has sent nothing, and a later difference of another fragment.

        It was not a member at the step of this round. It may wait for the other fragment now, as
        those that have sent this one wait for this one.
        """
        every = [one.step for ranks in self.differences.values() for one in ranks.values()]
        own = self.differences.get(replica.number, ())
        return bool(every) and any(
            rank not in own and connection.sent_step > min(every)
            for rank, connection in replica.ranks.items()
        )

    def missing(self, late: Sequence[Replica]) -> list[str]:
        """The ranks of late replicas that have sent nothing."""
        return [
            f"replica {one.number} (rank {rank}, after step {one.step})"
            for one in late
            for rank in one.ranks
            if rank not in self.differences.get(one.number, ())
        ]

    def header(
        self, complete: Sequence[Replica], late: Sequence[str], after: str
    ) -> dict[str, Any]:
        """Of the decision that the differences of ``complete`` count."""
        steps = (one.step for each in complete for one in self.differences[each.number].values())
        return {
            "fragment": self.fragment,
            "round": self.number,
            "before": self.digest,
            "after": after,
            "step": max(steps),
            "replicas": [one.number for one in complete],
            "late": list(late),
        }

    def decision(self, header: dict[str, Any], replica: int, rank: int, ticket: int) -> Frame:
        """For one rank, with the differences of the other replicas."""
        others = [number for number in header["replicas"] if number != replica]
        parts = [self.differences[number][rank].body for number in others]
        own = {**header, "sizes": [len(part) for part in parts]}
        if ticket:
            own["ticket"] = ticket
        return Frame(Kind.DECISION, own, b"".join(parts))

    def follow(self, salt: str) -> "Round":
        """The round after it."""
        if self.timer is not None:
            self.timer.cancel()
        after = hashlib.sha256((self.digest + salt).encode()).hexdigest()[:24]
        return Round(self.fragment, self.number + 1, after)


def rounds_text(rounds: Sequence[int]) -> str:
    """The rounds of all fragments, for messages."""
    if not rounds:
        return "before the first round"
    return f"in rounds {', '.join(map(str, rounds))} of fragments 0 to {len(rounds) - 1}"
