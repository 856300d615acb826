"""Whether a viewer of Chrome traces can read a trace."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def assert_opens(events: Sequence[dict[str, Any]]) -> None:
    """Check the properties that a viewer relies on."""
    assert json.loads(json.dumps(events)) == events
    timed = [one for one in events if one["ph"] != "M"]
    assert min(one["ts"] for one in timed) == 0
    assert [one["ts"] for one in timed] == sorted(one["ts"] for one in timed)
    flows = Counter((one["id"], one["ph"]) for one in timed if one["ph"] in "sf")
    assert set(flows.values()) == {1}
    assert {id_ for id_, ph in flows if ph == "s"} == {id_ for id_, ph in flows if ph == "f"}
    by_id = {(one["id"], one["ph"]): one for one in timed if one["ph"] in "sf"}
    for id_, _ in flows:
        assert by_id[id_, "s"]["ts"] <= by_id[id_, "f"]["ts"]
    tracks = defaultdict(list)
    for one in timed:
        if one["ph"] == "X":
            tracks[one["pid"], one["tid"]].append(one)
    for track in tracks.values():
        for before, after in pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, "slices do not overlap"
