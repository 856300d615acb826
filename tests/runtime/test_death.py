"""C8: ranks that outlive another one know of it in seconds, and have undone the step.

The ranks are processes of each test's own: those of a pool are killed soon after one dies.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import shardwise as sw
from tests.features.training import SECONDS, Training

RANKS = 3
LAST = RANKS - 1
DEADLINE = 120.0


@pytest.mark.parametrize(("dying", "place"), [(0, "data"), (LAST, "after backward")])
def test_ranks_that_are_left_know_it_soon(dying: int, place: str, tmp_path: Path) -> None:
    ranks = [_start(rank, dying, place, tmp_path) for rank in range(RANKS)]
    try:
        results = [rank.communicate(timeout=DEADLINE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (output, errors)) in enumerate(zip(ranks, results, strict=True)):
        if number == dying:
            assert rank.returncode == -signal.SIGKILL, errors
        else:
            assert rank.returncode == 0, errors
            assert float(output) < SECONDS, "nobody knew, or the second attempt waited"


def _start(rank: int, dying: int, place: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", __name__, str(rank), str(dying), place, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


class Mortal(Training):
    """Its process dies where another's step raises."""

    def body(self, place: str) -> None:
        try:
            super().body(place)
        except ValueError:
            os.kill(os.getpid(), signal.SIGKILL)


def _main(rank: int, dying: int, place: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = _store(rank, folder / "port")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    training = Mortal()
    training.step()
    before = training.fingerprint()
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(sw.PeerLost):
        training.step(place if rank == dying else "")
    assert training.fingerprint() == before
    done = folder / "done"
    if rank == 1:  # a second attempt ends at once, and does not wait for ranks that make none
        with pytest.raises(sw.PeerLost):
            training.step()
        done.touch()
    while not done.exists() and time.monotonic() < began + SECONDS:
        time.sleep(0.05)
    sys.stdout.write(f"{time.monotonic() - began}\n")
    sys.stdout.flush()
    # Not through the interpreter's end: a lane may still be in a receive of Gloo's, and Python 3.11
    # ends such a thread in a way that C++ answers with abort.
    os._exit(0)


def _store(rank: int, port_file: Path) -> TCPStore:
    """Held by rank 0, so that it dies with it."""
    patience = timedelta(seconds=DEADLINE)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        port_file.with_suffix(".new").write_text(str(store.port), encoding="ascii")
        port_file.with_suffix(".new").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.05)
    return TCPStore("127.0.0.1", int(port_file.read_text("ascii")), timeout=patience)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
