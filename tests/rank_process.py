"""One rank of a pool: ``run`` is the main function of its process.

It runs inside pytest, because that is the public way to have ``assert`` rewritten: a failing
``assert a == b`` in a rank shows values. The imports here are what the server of
``tests/forked.py`` does once for all ranks; none of them may start a thread.
"""

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import debug

from shardwise import parts  # noqa: F401 - as in programs
from shardwise.runtime import unit
from shardwise.watch import ranks
from shardwise.watch.monitor import Patience, usual_patience

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper

REPOSITORY = Path(__file__).parent.parent
# Frames of these files come before those of the test in a rank's traceback, and are left out.
HARNESS = {__file__, str(Path(__file__).with_name("ranks.py"))}
LOOPBACK = "127.0.0.1"
# Longer than any deadline of a call: the pool decides when to stop waiting, and shows where.
GROUP_TIMEOUT = timedelta(minutes=10)
# Plugins that would collect what a rank should print, or take the handler its stacks come from.
UNWANTED_PLUGINS = ("faulthandler", "threadexception", "unraisableexception", "cacheprovider")

KindOfCache = type(functools.cache(int))

Request: TypeAlias = bytes | None  # a pickled (function, arguments), or: renew the groups
Reply: TypeAlias = tuple[bool, bytes]  # (returned, pickled result) or (raised, traceback)


class Rank:
    """Runs what the pool asks for, one call at a time, on the main thread."""

    def __init__(self, pool: Connection, rank: int, world_size: int) -> None:
        self.pool = pool
        self.rank = rank
        self.world_size = world_size
        self.num_groups = 0
        self.store = self.meet()

    def meet(self) -> Store:
        """Join the store of rank 0, whose free port goes round through the pool."""
        if self.rank == 0:
            store = TCPStore(LOOPBACK, 0, self.world_size, is_master=True, wait_for_workers=False)
            self.pool.send(store.port)
            return store
        return TCPStore(LOOPBACK, self.pool.recv(), self.world_size, wait_for_workers=False)

    def renew_groups(self) -> None:
        """Start with a default group that knows nothing of what earlier calls did to theirs."""
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_caches_of_meshes()
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"groups{self.num_groups}", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=GROUP_TIMEOUT,
        )
        self.num_groups += 1

    def serve(self) -> None:
        """Answer requests until the pool hangs up."""
        requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        # A thread of its own reads the socket, so that a rank which is stuck in a call still
        # notices that the pool is gone, and leaves with it.
        threading.Thread(target=self.read_requests, args=(requests,), daemon=True).start()
        while True:
            request = requests.get()
            self.pool.send_bytes(pickle.dumps(self.answer(request)))

    def read_requests(self, requests: queue.SimpleQueue[Request]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(self.pool.recv_bytes() or None)
        os._exit(0)

    def answer(self, request: Request) -> Reply:
        try:
            if request is None:
                self.renew_groups()
                return True, pickle.dumps(None)
            return True, call(request)
        except BaseException as error:  # noqa: BLE001 (the pool's to show)
            return False, own_traceback(error).encode()


def call(request: bytes) -> bytes:
    function: Callable[..., object]
    function, arguments = pickle.loads(request)
    # What lives by now is not this call's. Hidden from the collector, it makes a collection take
    # well under a millisecond instead of 100, so that a call's groups and models go at once.
    gc.collect()
    gc.freeze()
    torch.default_generator.manual_seed(0)
    environment = dict(os.environ)  # libraries set LOCAL_RANK, which would number simulated devices
    before = settings_of_torch()
    try:
        result = pickle.dumps(function(*arguments))
        changed = {name: x for name, x in settings_of_torch().items() if x != before[name]}
        assert not changed, f"it has left {changed} to the next calls, before: {before}"
        return result
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        clear_planners()
        gc.collect()


def clear_caches_of_meshes() -> None:
    """Forget what DTensor keeps by the looks of a mesh, whose groups are gone now.

    Their threads end with the last mesh.
    """
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    modules = [x for name, x in sys.modules.items() if name.startswith("torch.distributed.tensor.")]
    clear_planners()
    for module in modules:
        classes = [vars(value) for value in vars(module).values() if isinstance(value, type)]
        for value in [value for names in (vars(module), *classes) for value in names.values()]:
            function = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(function, KindOfCache):
                function.cache_clear()


def clear_planners() -> None:
    """Forget the plans of redistributions, which are in cycles of references with their meshes.

    After each call, as the next one would hide them from the collector for ever.
    """
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    getattr(redistribute, "clear_redistribute_planner_cache", int)()  # PyTorch 2.13 has it


def settings_of_torch() -> dict[str, object]:
    """What changes the numbers that later calls compute."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "precision of float32 in mkldnn": torch.backends.mkldnn.fp32_precision,
        "mkldnn": torch.backends.mkldnn.enabled,
        "autocast": torch.is_autocast_enabled("cpu"),
        "gradients": torch.is_grad_enabled(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math attention": torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        "flushes denormals": not (torch.tensor(1e-40) * 0.5).item(),
    }


def own_traceback(error: BaseException) -> str:
    """The traceback from the test's function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename in HARNESS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


@dataclass(frozen=True)
class Serving:
    """A pytest plugin that serves a pool instead of running tests."""

    pool: Connection
    stacks: Path
    rank: int
    world_size: int

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        pytest.register_assert_rewrite("tests")
        torch.set_num_threads(1)
        unit.SMALL_UNIT_BYTES = 256  # so that the units of tests are treated as large ones
        # That of the module formats a stack for each kind of device that is absent.
        mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed).start()
        # Many tests wait until a rank looks whether another one has failed: look more often.
        mock.patch.object(ranks, "usual_patience", _impatient).start()
        with self.stacks.open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            rank = Rank(self.pool, self.rank, self.world_size)
            rank.renew_groups()
            rank.pool.send_bytes(pickle.dumps((True, pickle.dumps(None))))
            rank.serve()
        return 0


def _impatient() -> Patience:
    return replace(usual_patience(), poll_seconds=0.1)


def run(pool: Connection, stacks: Path, output: Path, rank: int, world_size: int) -> None:
    """Answer the requests of ``pool`` until it hangs up; print into the file ``output``."""
    os.setsid()  # Ctrl-C is for the parent, which then kills its ranks
    os.chdir(REPOSITORY)
    # The default again, as in a user's ranks, not what this process was started by: the workers of
    # a DataLoader would import torch.
    multiprocessing.set_start_method(None, force=True)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(line_buffering=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading the others takes half a second
    without = [option for name in UNWANTED_PLUGINS for option in ("-p", f"no:{name}")]
    options = ["-s", "--noconftest", "-c", os.devnull, "--rootdir", str(REPOSITORY), *without]
    sys.exit(pytest.main(options, plugins=[Serving(pool, stacks, rank, world_size)]))
