"""Runs checks in processes of their own, and writes the results after each of them.

They are forked from one process that has imported torch and has not asked the driver for anything,
or else the children could not use the card. Where that fails, they are spawned, which takes longer.
"""

import faulthandler
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from tests.gpu import staged
from tests.gpu.registry import CHECKS, SECTIONS, Check, Context

__all__ = ["Results", "find_cards", "load_checks", "run_checks"]

BODIES = (
    "first_contact",
    "one_rank",
    "many_ranks",
    "no_waits",
    "fuzzing",
    "forecasts",
    "fake_group",
    "cards",
)  # modules with checks
# What the first step of a model would import otherwise, in every process.
PRELOADED = ("shardwise.api", "torch._dynamo", "torch.distributed.tensor")
LOOPBACK = "127.0.0.1"
NO_TIME = "the time of the section is over"
GRACE_SECONDS = 12.0  # for the other ranks of a check, once one has failed
TAIL = 8000  # characters of output in the results
FAKE_RANKS = 8
ELSEWHERE_SECONDS = 3600.0  # for a section where no card is waiting
GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass
class Results:
    """The document that is written after every check."""

    path: Path | None
    document: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        check: Check,
        verdict: str,
        seconds: float = 0.0,
        *,
        quiet: bool = False,
        **more: Any,
    ) -> None:
        row: dict[str, Any] = {"section": check.section, "name": check.name, "verdict": verdict}
        self.rows.append(row | {"seconds": round(seconds, 2), **more})
        note = f"  {more['reason']}" if "reason" in more else ""
        if not quiet:
            print(f"{check.section:<11} {check.name:<58} {verdict}{note}", flush=True)  # noqa: T201
        self.write()

    def write(self) -> None:
        if self.path is not None:
            temporary = self.path.with_suffix(".partial")
            text = json.dumps(self.document | {"checks": self.rows}, indent=1)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path)

    @property
    def num_bad(self) -> int:
        return sum(row["verdict"] not in {"ok", "skipped"} for row in self.rows)


def find_cards() -> list[tuple[str, int]]:
    """Return name and bytes of each card, and choose how processes are started."""
    cards: list[tuple[str, int]] = []
    for method in ("fork", "spawn"):
        multiprocessing.set_start_method(method, force=True)
        pipe, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_send_cards, args=(theirs,))
        process.start()
        theirs.close()
        try:
            cards = pipe.recv()
        except EOFError:
            continue
        finally:
            process.join()
        if cards:
            return cards
    multiprocessing.set_start_method("fork", force=True)
    return cards


def _send_cards(pipe: Connection) -> None:
    found = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    properties = [torch.cuda.get_device_properties(number) for number in found]
    pipe.send([(one.name, one.total_memory) for one in properties])


def load_checks() -> None:
    """Import what has checks, and what they use."""
    for name in (*PRELOADED, *(f"tests.gpu.{name}" for name in BODIES)):
        importlib.import_module(name)


def run_checks(
    chosen: Callable[[Check], bool], kind: str, num_cards: int, results: Results
) -> None:
    """Run the checks that are ``chosen``, by section; each section has its time."""
    todo: dict[str, list[Check]] = {section: [] for section in SECTIONS}
    left_out: dict[str, list[Check]] = {}
    for check in filter(chosen, CHECKS):
        reason = check.why_not(kind, num_cards)
        (left_out.setdefault(reason, []) if reason else todo[check.section]).append(check)
    for reason, checks in left_out.items():
        names = "; ".join(f"{check.section}: {check.name}" for check in checks)
        print(f"Skipped, {reason}: {names}\n")  # noqa: T201
        for check in checks:
            results.add(check, "skipped", reason=reason, quiet=True)
    with _store() as port:
        for section, (budget, jobs) in SECTIONS.items():
            end = time.monotonic() + (budget if kind == "cuda" else ELSEWHERE_SECONDS)
            _run_section(todo[section], kind, port, results, end, jobs)


def _run_section(
    todo: list[Check], kind: str, port: int, results: Results, end: float, jobs: int
) -> None:
    jobs = jobs if kind == "cuda" else 1
    running: list[_Running] = []
    try:
        while todo or running:
            while todo and len(running) < jobs:
                check = todo.pop(0)
                left = end - time.monotonic()
                if left < check.seconds / 3:
                    results.add(check, "skipped", reason=NO_TIME)
                    continue
                running.append(_Running(check, kind, port, left + GRACE_SECONDS))
            wait([rank.pipe for one in running for rank in one.waiting], timeout=0.2)
            for one in list(running):
                if one.is_over():
                    running.remove(one)
                    results.add(one.check, *one.verdict(), **one.more())
                    one.close()
    finally:
        for one in running:
            one.kill()


class _Rank:
    """One process of a check."""

    def __init__(self, check: Check, kind: str, rank: int, port: int, seconds: float) -> None:
        handle, path = tempfile.mkstemp(prefix="gpu-check-")
        os.close(handle)
        self.output = Path(path)
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        arguments = (check.section, check.name, kind, rank, port, seconds, theirs, path)
        self.process = multiprocessing.Process(target=_run_rank, args=arguments)
        self.process.start()
        theirs.close()
        self.figures: dict[str, Any] = {}
        self.error: str | None = None
        self.is_over = False

    def read(self) -> None:
        """Read what the process has sent; after its end, say how it ended."""
        while not self.is_over and self.pipe.poll():
            try:
                what, value = self.pipe.recv()
            except EOFError:
                self.process.join()
                self.is_over, self.error = True, f"ended with exit code {self.process.exitcode}"
                return
            if what == "figure":
                self.figures |= value
            else:
                self.is_over, self.error = True, value

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.join(2.0 if self.is_over else 0.0)
        if self.process.is_alive():
            with self.output.open("a", encoding="utf-8") as file:
                file.write(f"\nThreads in the kernel:\n{_threads(self.process.pid)}")
            self.process.kill()
        self.process.join()
        self.pipe.close()

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-TAIL:]


def _threads(pid: int | None) -> str:
    """Describe where each thread of a process is in the kernel, as far as Linux tells."""
    lines = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        words = [task.name]
        for name in ("comm", "wchan", "syscall"):
            with suppress(OSError):
                words.append((task / name).read_text(encoding="utf-8").strip()[:60])
        lines.append("  ".join(words))
    return "\n".join(lines)


class _Running:
    """The processes of a check."""

    def __init__(self, check: Check, kind: str, port: int, left: float) -> None:
        self.check, seconds = check, min(check.seconds, left)
        self._is_cut = left < check.seconds  # by the end of its section
        self._began = time.monotonic()
        self._end = self._began + seconds
        ranks = 2 if kind == "simulated" and check.group == "fake" else check.ranks
        self.ranks = [_Rank(check, kind, rank, port, seconds) for rank in range(ranks)]

    @property
    def waiting(self) -> list[_Rank]:
        return [rank for rank in self.ranks if not rank.is_over]

    def is_over(self) -> bool:
        for rank in self.ranks:
            rank.read()
        if any(rank.is_over and rank.error for rank in self.ranks):
            self._end = min(self._end, time.monotonic() + GRACE_SECONDS)
        if self.waiting and time.monotonic() < self._end:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        for rank in self.ranks:
            rank.output.unlink()

    def verdict(self) -> tuple[str, float]:
        seconds = time.monotonic() - self._began
        if any(rank.is_over and rank.error for rank in self.ranks):
            return "FAILED", seconds
        if not self.waiting:
            return "ok", seconds
        return ("skipped" if self._is_cut else "HUNG"), seconds

    def more(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.ranks[0].figures:
            found["figures"] = self.ranks[0].figures
        errors = {}
        for number, rank in enumerate(self.ranks):
            late = NO_TIME if self._is_cut else "no answer before the deadline"
            error = rank.error if rank.is_over else late
            if error:
                errors[str(number)] = f"{error}\n{rank.tail()}".strip()
        if errors:
            found["errors"] = errors
            lines = next(iter(errors.values())).splitlines()
            found["reason"] = lines[0][:150]
        return found


def _run_rank(
    section: str,
    name: str,
    kind: str,
    rank: int,
    port: int,
    seconds: float,
    pipe: Connection,
    output: str,
) -> None:
    """The main function of a rank."""
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, seconds - 2.0))  # shows where it hangs
    load_checks()
    check = next(one for one in CHECKS if (one.section, one.name) == (section, name))
    error = ""
    try:
        with _context(check, kind, rank, port, pipe) as context:
            context.seconds = seconds
            if kind == "cuda" and check.group in ("staged", "monitored"):
                with staged.host_waits():
                    check.body(context)
                context.earlier_runs += 1
            check.body(context)
    except BaseException as raised:  # noqa: BLE001 - the results have it
        error = f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"
    pipe.send(("end", error))
    os._exit(0)  # what is left of groups and streams must not decide about the verdict


@contextmanager
def _context(check: Check, kind: str, rank: int, port: int, pipe: Connection) -> Iterator[Context]:
    """Join the group of the check."""
    ranks = 2 if kind == "simulated" and check.group == "fake" else check.ranks
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank if check.section == "cards" else 0)
        if check.section != "cards" or check.group != "none":
            torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    name = f"{check.section}/{check.name}"
    store = PrefixStore(name, TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False))
    _join(check, kind, store, rank, ranks, port)
    simulation = None
    with ExitStack() as stack:
        if kind == "simulated":
            from tests.streams.install import simulated  # noqa: PLC0415 (needs pytest)
            from tests.streams.programs import DEVICE  # noqa: PLC0415
            from tests.streams.random_programs import PATIENCE  # noqa: PLC0415
            from tests.streams.simulation import Simulation  # noqa: PLC0415

            simulation, device = Simulation(is_late=True), DEVICE
            simulation.current_device = DEVICE.index
            patience = PATIENCE if check.group == "monitored" else None
            stack.enter_context(simulated(simulation, patience=patience))
        yield Context(
            kind,
            device,
            rank,
            ranks,
            report=lambda key, value: pipe.send(("figure", {key: value})),
            simulation=simulation,
        )
    if simulation is not None and simulation.found:
        raise AssertionError("\n".join(map(str, simulation.found[:6])))


def _join(check: Check, kind: str, store: Store, rank: int, ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    if kind == "cuda" and check.section != "cards":
        os.environ["LOCAL_RANK"] = "0"  # all ranks share the card
    if check.group == "none":
        return
    if check.group == "fake" and kind != "simulated":
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        dist.init_process_group("fake", rank=0, world_size=FAKE_RANKS, store=FakeStore())
        return
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    on_one_card = {"cuda": ("staged", "monitored"), "cpu": ("staged",), "simulated": ()}
    if check.group in on_one_card[kind]:
        staged.register(is_stream_ordered=kind == "cuda")
        backend = "staged"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT
    )


@contextmanager
def _store() -> Iterator[int]:
    """A process with the store of all checks; yields its port."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.poll(None)  # until it is killed
