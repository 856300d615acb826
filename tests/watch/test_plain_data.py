"""What ranks read from the store is checked, and never executed."""

import json
import os
import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.api import CollectiveId
from shardwise.comm.queue import QueueState
from shardwise.errors import StepError
from shardwise.host.handshake import Identity
from shardwise.watch.history import _Shown
from shardwise.watch.monitor import Monitor, Patience
from shardwise.watch.status import Report
from shardwise.watch.store import BoundedStore, decode, encode

RUNNING = CollectiveId(3, "gather 0", 1 << 40, (0, 1))
QUEUES = (QueueState(4, 3, RUNNING, (1, 2), "gather 1"), QueueState(0, 0, None, ()))
REPORT = Report(
    0, 2, 7, "forward of ä", QUEUES, "", "text", ((1, "0"),), "x", ("a.py:1 in f",), (1,)
)
BEAT = replace(REPORT, count=5, marks=({(0, 1): (3, 99), (1,): (1, 2)}, {}))
SHOWN = _Shown(1, ({(0, 1): ((0, 0, ""), (1, 5, "gather"))},))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("message", [REPORT, BEAT, SHOWN], ids=["report", "heartbeat", "history"])
def test_a_message_is_read_as_it_was_written(message: Any) -> None:
    assert decode(type(message), encode(message).encode()) == message


@pytest.mark.parametrize("message", [REPORT, BEAT, SHOWN], ids=["report", "heartbeat", "history"])
@given(data=st.data())
def test_a_message_with_another_value_is_refused_or_of_the_same_types(
    message: Any, data: st.DataObject
) -> None:
    """One place of the JSON, at any depth, is replaced by any other JSON."""
    whole = json.loads(encode(message))
    at: Any = whole
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = data.draw(st.sampled_from(list(keys)))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(JSON)
        break
    content = json.dumps(whole).encode()
    try:
        read = decode(type(message), content)
    except ValueError:
        return
    assert json.loads(encode(read)) == whole or message is not REPORT


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"[" * 100_000, b"{}", b"null", b"\xff", b"1e999"]
)
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(Report, content)


def test_what_others_write_into_the_store_is_ignored(tmp_path: Path) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    bounded = BoundedStore(store, 20.0)
    monitor = Monitor(bounded, "group", 0, 2, Patience(beat_seconds=60))
    bad = [
        pickle.dumps(Harmful(tmp_path / "ran")),
        b"\x80\x04.",
        encode(Report(0, 0, 0, "", (), blocked_with=(7,))).encode(),  # no such rank
    ]
    keys = [f"shardwise/group/{kind}1" for kind in ("report/", "heartbeat/", "history/")]
    for content in bad:
        for key in keys:
            store.set(key, content)  # type: ignore[arg-type] # bytes do
        store.set("shardwise/group/failed/0", content)  # type: ignore[arg-type] # bytes do
        store.set("shardwise/group/silent", content)  # type: ignore[arg-type] # bytes do
        monitor.check_reports(0)
        assert monitor.reports(0)[1] is None
        monitor.check_heartbeats()
        assert monitor.heartbeat(1) is None
        assert "rank" in monitor.table()
        assert monitor.swap_histories(1, SHOWN) is None
    failure = Report(0, 0, 1, "", (), failure="PeerAborted", error="own")
    assert monitor.announce(failure) == failure
    with pytest.raises(StepError, match="own"):
        monitor.check_reports(0)
    assert not (tmp_path / "ran").exists()


def test_an_identity_of_other_bytes_is_of_another_host(tmp_path: Path) -> None:
    identity = Identity(1 << 47, b"s" * 32, b"\0name")
    assert Identity.unpack(identity.pack()) == identity
    for content in (b"", b"x", pickle.dumps(Harmful(tmp_path / "ran")) * 9, b"x" * 1000):
        assert Identity.unpack(content).name == b""
    assert not (tmp_path / "ran").exists()
