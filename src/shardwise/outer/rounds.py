"""The next round of a fragment: the differences that the hub has received for it."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.outer.frames import Frame, Kind
from shardwise.outer.members import Replica

__all__ = ["Round", "rounds_text"]


@dataclass(eq=False)
class Round:
    """The next round of a fragment."""

    fragment: int
    number: int
    digest: str  # of all earlier rounds
    differences: dict[int, dict[int, Frame]] = field(default_factory=dict)  # by replica, rank
    timer: asyncio.TimerHandle | None = None

    def add(self, replica: int, rank: int, difference: Frame) -> int | None:
        """Add a difference; return another replica whose shared parameters differ, or None."""
        checksum = difference.header["checksum"]
        self.differences.setdefault(replica, {})[rank] = difference
        others = (
            number
            for number, ranks in self.differences.items()
            if rank in ranks and ranks[rank].header["checksum"] != checksum
        )
        return next(others, None)

    def remove(self, replica: int) -> None:
        """Remove the differences of a replica; the deadline begins again with the next one."""
        self.differences.pop(replica, None)
        if not self.differences:
            self.stop_timer()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def has_all_of(self, replica: Replica) -> bool:
        """Whether all ranks of ``replica`` have sent their differences."""
        return len(self.differences.get(replica.number, ())) == len(replica.ranks)

    def is_passed_by(self, replica: Replica) -> bool:
        """Whether a rank of ``replica`` sent no difference here but a later one elsewhere.

        The replica was not a member at the step of this round. It may be waiting for the other
        fragment, while the replicas that have sent their differences here wait for this one.
        """
        steps = [x.header["step"] for ranks in self.differences.values() for x in ranks.values()]
        own = self.differences.get(replica.number, ())
        return bool(steps) and any(
            rank not in own and connection.sent_step > min(steps)
            for rank, connection in replica.ranks.items()
        )

    def missing(self, late: Sequence[Replica]) -> list[str]:
        """Describe the ranks of ``late`` that have sent no difference."""
        return [
            f"replica {replica.number} (rank {rank}, after step {replica.step})"
            for replica in late
            for rank in replica.ranks
            if rank not in self.differences.get(replica.number, ())
        ]

    def header(
        self, complete: Sequence[Replica], late: Sequence[str], digest: str
    ) -> dict[str, Any]:
        """The header of the decision to average ``complete``, after which ``digest`` applies."""
        frames = [x for replica in complete for x in self.differences[replica.number].values()]
        return {
            "fragment": self.fragment,
            "round": self.number,
            "before": self.digest,
            "after": digest,
            "step": max(frame.header["step"] for frame in frames),
            "replicas": [replica.number for replica in complete],
            "late": list(late),
        }

    def decision(self, header: dict[str, Any], replica: int, rank: int, ticket: int) -> Frame:
        """The frame for one rank, with the differences of the other replicas."""
        others = [number for number in header["replicas"] if number != replica]
        parts = [self.differences[number][rank].body for number in others]
        own = {**header, "sizes": [len(part) for part in parts], "ticket": ticket}
        return Frame(Kind.DECISION, own, b"".join(parts))

    def following(self, salt: str) -> "Round":
        """The round after this one."""
        self.stop_timer()
        digest = hashlib.sha256((self.digest + salt).encode()).hexdigest()[:24]
        return Round(self.fragment, self.number + 1, digest)


def rounds_text(rounds: Sequence[int]) -> str:
    """Describe the rounds of all fragments."""
    if not rounds:
        return "before the first round"
    return f"in rounds {', '.join(map(str, rounds))} of fragments 0 to {len(rounds) - 1}"
