"""Processes that are forked from one that has imported torch once.

The server (`multiprocessing`'s forkserver) runs no tensor operation, so it has no threads that a
fork could lose.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import TypeVar, cast

import pytest

T = TypeVar("T")

if sys.platform == "linux":
    CONTEXT = multiprocessing.get_context("forkserver")
else:
    CONTEXT = multiprocessing.get_context("spawn")
# Optimizers and checkpointing import the second on their first call, which takes over a second.
# The others, which most ranks use, would take a fifth of a second in each of them.
PRELOAD = (
    "tests.rank_process",
    "torch._dynamo",
    "shardwise.api",
    "shardwise.checkpoint.load",
    "shardwise.checkpoint.save",
    "shardwise.replicas.elastic",
)
# Takes seconds, and only some tests need it: preloaded if one of them has been collected.
PRELOAD_IF_IMPORTED = (
    "shardwise.train.run",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "torch.distributed.optim",
    "torch._dynamo.testing",
    "torchft",
)
LAST = "tests.frozen"  # hides all of the above from the garbage collector
DEADLINE_SECONDS = 120.0


def run_forked(function: Callable[[], T]) -> T:
    """Call ``function``, which is of a module, in a process of its own; its result."""
    ours, theirs = Pipe(duplex=False)
    with ours, theirs, tempfile.NamedTemporaryFile("r") as output:
        process = start_forked(_send_result, theirs, function, output.name)
        try:
            succeeded, result = ours.recv() if ours.poll(DEADLINE_SECONDS) else (False, "no answer")
            assert succeeded, f"{result}\n{output.read()}"
        finally:
            process.kill()
            process.join()
    return cast("T", result)


def start_forked(function: Callable[..., None], *args: object) -> BaseProcess:
    """Start ``function(*args)`` in a process forked from the server."""
    choose_imports_of_server()
    process = CONTEXT.Process(target=function, args=args)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environment_of_server().items():
            patch.setenv(name, value)
        process.start()
    return process


def choose_imports_of_server() -> None:
    also = [name for name in PRELOAD_IF_IMPORTED if name in sys.modules]
    CONTEXT.set_forkserver_preload([*PRELOAD, *also, LAST])


def _environment_of_server() -> dict[str, str]:
    chosen = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # it starts its threads when numpy is imported
        "PYTEST_ADDOPTS": "",  # the options of the parent are not for ranks
    }
    # Gloo binds to the address of the host's name, which on many machines is not reachable.
    return chosen | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def _send_result(pipe: Connection, function: Callable[[], object], output: str) -> None:
    file = os.open(output, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        pipe.send((True, function()))
    except BaseException:  # noqa: BLE001 (the caller's to show)
        pipe.send((False, traceback.format_exc()))
