"""``python -m benchmarks.checkpoints``: saves and loads, compared with PyTorch's.

The same model and AdamW states, in float32, are saved and loaded on local CPU ranks with shardwise,
with PyTorch's distributed checkpoint of an FSDP2 model (``dcp``), with ``torch.save`` of a full
state dict, which one process writes, and with ``bare`` writes of a file of the same size as a
rank's shards.

Page caches are warm when a load begins. Of two consecutive asynchronous saves, the second one is
timed, because shardwise keeps memory from one save to the next. Memory is the peak of the resident
set minus the resident set before the call, on the rank where it is largest.
"""

import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save, save as dcp_save

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round
from shardwise.bench.memory import Peak
from shardwise.bench.options import Setting
from shardwise.bench.work import gpt_work
from shardwise.forecast.memory.process import resident_bytes
from shardwise.forecast.models.transformer import Shape
from shardwise.launch.world import World
from shardwise.train.model import GPT, gpt_shape

SHAPES = {  # by approximate number of parameters, in millions
    "0": gpt_shape(vocabulary=64, context=8, width=16, layers=2, heads=2),  # to test this script
    "50": gpt_shape(vocabulary=8192, context=128, width=576, layers=11, heads=8),
    "500": gpt_shape(vocabulary=16384, context=128, width=1536, layers=16, heads=16),
}
BASE = "dcp"
PIECE_BYTES, MAX_BARE_BYTES = 1 << 20, 1 << 29
SAMPLE_SECONDS = 0.005


class Shardwise:
    engine = "shardwise-fsdp"
    can_wait = True  # has asynchronous saves

    def __init__(self, shape: Shape) -> None:
        setting = Setting("", shape, dist.get_world_size(), "fp32", (), rounds=0, batch=1)
        trainee = ENGINES[self.engine].start(gpt_work(setting))
        self.model, self.optimizer = trainee.model, trainee.optimizer
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        sw.save(path, model=self.model, optimizer=self.optimizer)

    def start(self, path: Path) -> Callable[[], object]:
        """Begin an asynchronous save; return a function that waits for its end."""
        return sw.save(path, model=self.model, optimizer=self.optimizer, wait=False).wait

    def load(self, path: Path) -> None:
        sw.load(path, model=self.model, optimizer=self.optimizer)


class Distributed(Shardwise):
    engine = "fsdp2"

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def start(self, path: Path) -> Callable[[], object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        future = async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        return future.result  # type: ignore[union-attr]

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp_load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


class Full(Distributed):
    """A full state dict, which rank 0 gathers and writes, and every rank maps into memory."""

    can_wait = False
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        if dist.get_rank() == 0:
            path.mkdir()
            torch.save({"model": model, "optimizer": optimizer}, path / "state.pt")

    def load(self, path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True, mmap=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


class Bare(Shardwise):
    """Without a library: each rank writes and reads a file of the size of its shards."""

    can_wait = False

    def __init__(self, shape: Shape) -> None:
        with torch.device("meta"):
            elements = sum(parameter.numel() for parameter in GPT(shape).parameters())
        num_bytes = 12 * elements // dist.get_world_size()
        # Larger than CPU caches, so that writes read from memory.
        memory = torch.ones(min(num_bytes, MAX_BARE_BYTES), dtype=torch.uint8)
        pieces = [memoryview(piece.numpy().data) for piece in torch.split(memory, PIECE_BYTES)]
        self.pieces = list(islice(cycle(pieces), -(-num_bytes // PIECE_BYTES)))

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


LIBRARIES = {"shardwise": Shardwise, BASE: Distributed, "torch.save": Full, "bare": Bare}


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("checkpoints", __doc__, ranks=2, rounds=5)
    parser.add_argument("--size", choices=SHAPES, default="50", help="parameters in millions")
    parser.add_argument("--vs", default=",".join(LIBRARIES), help="libraries, comma-separated")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument(
        "--no-async", action="store_true", help="skip asynchronous saves, which double the memory"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        by_rank = harness.run_ranks(options.ranks, measure_all, options, Path(folder))
    report(harness.merge(by_rank, worst=None), options)


def measure_all(world: World, options: Namespace, folder: Path) -> list[Round]:
    """Run the rounds on one rank."""
    cases = {
        name: partial(measure, LIBRARIES[name](SHAPES[options.size]), world, options, folder / name)
        for name in options.vs.split(",")
    }
    title = "saves and loads"
    return harness.interleave(cases, options.rounds, title=title, warm_up=1, visible=world.is_first)


def measure(
    library: Shardwise, world: World, options: Namespace, path: Path, _number: int
) -> Figures:
    """Save and load, then save asynchronously twice; remove all files."""
    figures = {f"save_{key}": value for key, value in timed(partial(library.save, path)).items()}
    figures |= {f"load_{key}": value for key, value in timed(partial(library.load, path)).items()}
    figures["bytes"] = sum(file.stat().st_size for file in path.iterdir())
    second = path.with_name(f"{path.name}-again")
    remove(world, path)
    if not options.no_async and library.can_wait:
        for target in (path, second):
            figures["blocked_seconds"] = time_start(library, target)
        library.load(second)  # frees the memory that asynchronous saves keep
        remove(world, path, second)
    return figures


def timed(action: Callable[[], None]) -> Figures:
    """Measure seconds until all ranks are done, and the additional bytes of this rank."""
    os.sync()  # otherwise the action would wait for writes of an earlier save
    dist.barrier()
    began = time.perf_counter()
    with Peak(resident_bytes, SAMPLE_SECONDS) as peak:
        action()
        dist.barrier()
    return {"seconds": time.perf_counter() - began, "extra_bytes": peak.bytes}


def time_start(library: Shardwise, path: Path) -> float:
    """Measure seconds until an asynchronous save returns, and wait until it has ended."""
    os.sync()
    dist.barrier()
    began = time.perf_counter()
    wait = library.start(path)
    seconds = time.perf_counter() - began
    wait()
    return seconds


def remove(world: World, *paths: Path) -> None:
    dist.barrier()
    if world.is_first:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def report(rounds: list[Round], options: Namespace) -> None:
    """Print medians and write them to a file; ratios are to dcp in the same round."""
    rows = {name: harness.medians(rounds, name) for name in rounds[0].cases}
    for name, figures in rows.items():
        for action in ("save", "load"):
            figures[f"{action}_bytes_per_second"] = figures["bytes"] / figures[f"{action}_seconds"]
        times = [key for key in figures if key.endswith("_seconds") and key in rows.get(BASE, {})]
        for key in times:
            figures[f"{key}_of_dcp"] = harness.ratio(rounds, name, BASE, key).median
    seconds, megabytes = "{:.2f}".format, lambda number: f"{number / 1e6:.0f}"
    columns = [
        (f"{action} {heading}", f"{action}_{key}", show)
        for action in ("save", "load", "blocked")
        for heading, key, show in (
            ("s", "seconds", seconds),
            ("MB/s", "bytes_per_second", megabytes),
            ("/ dcp", "seconds_of_dcp", seconds),
            ("extra MB", "extra_bytes", megabytes),
        )
        if action != "blocked" or "seconds" in key
    ]
    title = f"{options.size}M, {options.ranks} CPU ranks, medians of {options.rounds}"
    document = {"ranks": options.ranks, "rounds": options.rounds}
    print_figures(title, columns, rows, options.out, **document)


if __name__ == "__main__":
    main()
