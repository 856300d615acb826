"""``python -m benchmarks.checkpoints``: save and load against torch's own, interleaved in one run.

The same model and AdamW states, in float32, on local CPU ranks: shardwise, distributed checkpoint
(``dcp``, of an FSDP2 model, as its users do) and ``torch.save`` of a full state dict, which one
process writes. Every round runs each of them once, so that what disturbs the machine disturbs all.
Page caches are warm when a load begins. Of two asynchronous saves in a row the second one is timed,
as shardwise keeps memory from one to the next. Memory is the peak of the resident set above what
it was before the call, on the rank that took most.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.multiprocessing.spawn import spawn

import shardwise as sw
from shardwise.bench.machine import Peak, resident_bytes
from shardwise.train.model import GPT, Block, Shape

SHAPES = {  # about so many million parameters
    "50": Shape(vocabulary=8192, context=128, width=576, layers=11, heads=8),
    "500": Shape(vocabulary=16384, context=128, width=1536, layers=16, heads=16),
}


class Engine:
    """A model of some library, and its way to a directory and back."""

    name: str

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT(shape)
        self.shard()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shard(self) -> None: ...

    def save(self, path: Path) -> None: ...

    def start(self, path: Path) -> Callable[[], object] | None:  # noqa: ARG002
        """Begin to save; returns what waits for the end. None: this library has no such way."""
        return None

    def load(self, path: Path) -> None: ...

    def release(self, path: Path) -> None:
        """Give back what asynchronous saves have kept, of which the last went to ``path``."""


class Shardwise(Engine):
    name = "shardwise"

    def shard(self) -> None:
        sw.fully_shard(self.model, units=Block)

    def save(self, path: Path) -> None:
        sw.save(path, model=self.model, optimizer=self.optimizer)

    def start(self, path: Path) -> Callable[[], object]:
        return sw.save(path, model=self.model, optimizer=self.optimizer, wait=False).wait

    def load(self, path: Path) -> None:
        sw.load(path, model=self.model, optimizer=self.optimizer)

    def release(self, path: Path) -> None:
        self.load(path)


class Distributed(Engine):
    name = "dcp"

    def shard(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in self.model.modules():
            if isinstance(module, Block):
                torch_fully_shard(module, mesh=mesh)
        torch_fully_shard(self.model, mesh=mesh)

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def start(self, path: Path) -> Callable[[], object] | None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        saving = dcp.async_save(state, checkpoint_id=path)
        return saving.result  # type: ignore[union-attr]

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


class Full(Distributed):
    """A full state dict, gathered and written by rank 0, and mapped by every rank."""

    name = "torch.save"
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        if dist.get_rank() == 0:
            path.mkdir()
            torch.save({"model": model, "optimizer": optimizer}, path / "state.pt")

    def start(self, path: Path) -> None:  # noqa: ARG002
        return None

    def load(self, path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True, mmap=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


class Bare(Engine):
    """No library: as many bytes as a rank's shards, to a file of its own and back.

    From and to memory that no cache holds.
    """

    name = "bare"

    def __init__(self, shape: Shape) -> None:
        with torch.device("meta"):
            elements = sum(parameter.numel() for parameter in GPT(shape).parameters())
        num_bytes = 12 * elements // dist.get_world_size()
        memory = torch.ones(min(num_bytes, _MOST_BARE_BYTES), dtype=torch.uint8)
        pieces = [memoryview(piece.numpy()) for piece in memory.split(_PIECE_BYTES)]
        self.pieces = list(islice(cycle(pieces), -(-num_bytes // _PIECE_BYTES)))

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / str(dist.get_rank())).open("wb", buffering=0) as file:
            for piece in self.pieces:
                file.write(piece)
            os.fsync(file.fileno())

    def load(self, path: Path) -> None:
        with (path / str(dist.get_rank())).open("rb", buffering=0) as file:
            for piece in self.pieces:
                file.readinto(piece)


ENGINES: tuple[type[Engine], ...] = (Shardwise, Distributed, Full, Bare)
_PIECE_BYTES = 1 << 20
_MOST_BARE_BYTES = 1 << 29
_SAMPLE_SECONDS = 0.005


def measure(action: Callable[[], None]) -> tuple[float, int]:
    """Seconds until all ranks are done, and the extra bytes of the rank that took most."""
    dist.barrier()
    began = time.perf_counter()
    with Peak(resident_bytes, _SAMPLE_SECONDS) as peak:
        action()
        dist.barrier()
    extra = torch.tensor(peak.bytes)
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    return time.perf_counter() - began, int(extra)


def measure_start(engine: Engine, path: Path) -> float | None:
    """Seconds until an asynchronous save has returned on all ranks; it has ended after this."""
    os.sync()
    dist.barrier()
    began = time.perf_counter()
    wait = engine.start(path)
    blocked = torch.tensor(time.perf_counter() - began)
    if wait is None:
        return None
    wait()
    dist.all_reduce(blocked, dist.ReduceOp.MAX)
    return float(blocked)


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank's part of the run; rank 0 reports."""
    torch.set_num_threads(max(1, torch.get_num_threads() // options.ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=rank,
        world_size=options.ranks,
    )
    names = options.vs.split(",")
    engines = [kind(SHAPES[options.size]) for kind in ENGINES if kind.name in names]
    taken: dict[str, list[dict[str, float]]] = {engine.name: [] for engine in engines}
    for number in range(options.rounds + 1):  # the first is to warm up
        for engine in (*engines[number % len(engines) :], *engines[: number % len(engines)]):
            path = Path(folder) / f"{engine.name}-{number}"
            os.sync()  # or it would wait for what the one before it left to the disk
            save_seconds, save_bytes = measure(lambda engine=engine, path=path: engine.save(path))
            load_seconds, load_bytes = measure(lambda engine=engine, path=path: engine.load(path))
            figures = {
                "save_seconds": save_seconds,
                "save_extra_bytes": save_bytes,
                "load_seconds": load_seconds,
                "load_extra_bytes": load_bytes,
            }
            if rank == 0:
                size = sum(file.stat().st_size for file in path.iterdir())
                shutil.rmtree(path)
            again = path.with_name(f"{path.name}-again")
            if not options.no_async:
                blocked = [measure_start(engine, each) for each in (path, again)][-1]
                if blocked is not None:
                    figures["blocked_seconds"] = blocked
                    engine.release(again)
            taken[engine.name].append(figures)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                shutil.rmtree(again, ignore_errors=True)
            dist.barrier()
    if rank == 0:
        report({name: rounds[1:] for name, rounds in taken.items()}, size, options)
    dist.destroy_process_group()


def report(
    taken: dict[str, list[dict[str, float]]], size: int, options: argparse.Namespace
) -> None:
    """Print medians, and write them where asked."""
    figures = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in taken.items()
    }
    for name, rounds in taken.items():
        figures[name] |= _ratios(rounds, taken.get("dcp", []))
    title = f"{size / 1e6:.0f} MB, {options.ranks} CPU ranks, medians of {options.rounds}"
    table = Table("", title=title)
    columns = ("MB/s", "of dcp's time", "extra MB")
    for heading in ("save s", *columns, "blocked s", "of dcp's", "load s", *columns):
        table.add_column(heading, justify="right")
    for name, one in figures.items():
        table.add_row(name, *_what(one, "save", size), *_blocked(one), *_what(one, "load", size))
    Console().print(table)
    if options.out is not None:
        whole = {"bytes": size, "ranks": options.ranks, "rounds": options.rounds, **figures}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _ratios(rounds: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Times relative to the base's in the same round: medians."""
    return {
        f"{key}_of_dcp": statistics.median(
            one[key] / other[key] for one, other in zip(rounds, base, strict=True)
        )
        for key in rounds[0]
        if base and key.endswith("_seconds")
    }


def _what(one: dict[str, float], what: str, size: int) -> list[str]:
    seconds, ratio = one[f"{what}_seconds"], one.get(f"{what}_seconds_of_dcp")
    return [
        f"{seconds:.2f}",
        f"{size / 1e6 / seconds:.0f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{one[f'{what}_extra_bytes'] / 1e6:.0f}",
    ]


def _blocked(one: dict[str, float]) -> list[str]:
    keys = ("blocked_seconds", "blocked_seconds_of_dcp")
    return [f"{one[key]:.2f}" if key in one else "-" for key in keys]


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="50", help="million parameters, about")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vs", default=",".join(kind.name for kind in ENGINES))
    parser.add_argument("--folder", type=Path, help="where to write; the default is temporary")
    parser.add_argument("--no-async", action="store_true", help="which take as much memory again")
    parser.add_argument("--port", type=int, default=29557)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn(run_rank, args=(options, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()
