"""A rank's last collectives in the format of PyTorch's Flight Recorder, for its analyzer.

``python -m torch.distributed.flight_recorder.fr_trace DIRECTORY --prefix NAME`` compares the files
of all ranks.

Source: PyTorch's tutorial "Flight Recorder for Debugging Stuck Jobs".
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.comm.api import CollectiveId

__all__ = ["PREFIX_VARIABLE", "write_flight_record"]

PREFIX_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"  # as for PyTorch's own: files are prefix + rank
_VERSION = "2.10"
# The operation by the first word of a label; all other collectives are gathers.
_OPERATIONS = {"reduce": "reduce_scatter_single", "agree": "all_reduce"}


def write_flight_record(
    path: Path,
    backend: str,
    members: Sequence[int],
    collectives: Sequence[tuple[CollectiveId, str]],
) -> None:
    """Write the ``collectives`` of one queue, oldest first.

    Each has a state: "completed", "started" or "scheduled". ``path`` ends with the rank, and
    ``members`` are the global ranks.
    """
    groups = {one.ranks: [members[rank] for rank in one.ranks] for one, _ in collectives}
    names = {ranks: ",".join(map(str, group)) for ranks, group in groups.items()}
    record = {
        "version": _VERSION,
        "pg_config": {
            name: {"name": name, "desc": "shardwise", "ranks": str(groups[ranks])}
            for ranks, name in names.items()
        },
        "pg_status": {},
        "entries": [
            {"record_id": i, "op_id": i, **_entry(one, state, backend, names[one.ranks])}
            for i, (one, state) in enumerate(collectives)
        ],
    }
    path.write_bytes(pickle.dumps(record))


def _entry(collective: CollectiveId, state: str, backend: str, group: str) -> dict[str, Any]:
    operation = _OPERATIONS.get(collective.label.split()[0], "all_gather_single")
    sizes = [[collective.slot_bytes]]
    return {
        "pg_id": 0,
        "process_group": (group, "shardwise"),
        "collective_seq_id": collective.number,
        "p2p_seq_id": 0,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": 0,
        "input_sizes": sizes,
        "input_dtypes": ["Byte"],
        "output_sizes": sizes,
        "output_dtypes": ["Byte"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "is_p2p": False,
        "frames": [{"name": collective.label, "filename": "shardwise", "line": 0}],
    }
