"""Which replicas left a run and came back, from the metrics of its steps."""

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.plan.spelling import counted

__all__ = ["changes_of_replicas"]


def changes_of_replicas(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each step in which replicas left, came back or repeated, and a last one for all.

    ``records`` are the metrics of the steps. Those of a run without replicas give no lines.
    """
    lines: list[str] = []
    away: dict[int, Mapping[str, Any]] = {}  # by the number of a replica, the step without it
    num_left = num_back = repeats = 0
    lost, last = 0.0, None
    for record in records:
        last = record if "goodput" in record else last
        if "lost_seconds" not in record:
            continue
        words = []
        for number in record.get("left", ()):
            away[number] = record
            num_left += 1
            words.append(f"replica {number} left")
        for number in record.get("joined", ()):
            words.append(_joined(number, record, away.pop(number, None)))
            num_back += 1
        if record.get("repeats"):
            words.append(f"repeated {counted(record['repeats'], 'time')}")
            repeats += record["repeats"]
        if record.get("waited_seconds"):
            words.append(f"waited {record['waited_seconds']:.1f} s for a quorum")
        lost += record["lost_seconds"]
        lines.append(
            f"step {record['step']}: {', '.join(words)}; {record['lost_seconds']:.1f} s lost"
        )
    if last is None:
        return []
    total = f"replicas: {num_left} left, {num_back} joined; {lost:.1f} s and "
    total += f"{counted(repeats, 'repeated step')} lost; goodput {last['goodput']:.1%}"
    return [*lines, total]


def _joined(number: int, record: Mapping[str, Any], left: Mapping[str, Any] | None) -> str:
    if left is None:
        return f"replica {number} joined"
    steps = counted(record["step"] - left["step"], "step")
    return f"replica {number} came back after {steps}, {record['seconds'] - left['seconds']:.0f} s"
