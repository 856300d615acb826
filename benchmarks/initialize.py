"""``python -m benchmarks.initialize``: memory and time of a start on the meta device, and without.

Every way runs in fresh processes, one for each rank, all on this machine:

- *meta*: the model has no storage until `sw.fully_shard` makes, fills and cuts one unit at a time;
- *whole*: every rank holds the whole model, fills it in the same way, and cuts it: the same bits;
- *eager*: the constructor of the model fills it, as it does in most programs, before it is cut.

The peak is that of resident memory above what the process had before (VmHWM, which the kernel sets
back on request); it is told relative to the rank's shards and the largest gathered unit.
"""

import argparse
import hashlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing, nn

import shardwise as sw
from shardwise.plan.plan import make_plan
from shardwise.train.model import GPT, Block, Shape, rotary_table

SEED = 0
SHAPES = {
    "30M": Shape(vocabulary=8192, context=256, width=512, layers=8, heads=8),
    "200M": Shape(vocabulary=8192, context=256, width=1024, layers=15, heads=16),
    "300M": Shape(vocabulary=8192, context=256, width=1280, layers=15, heads=20),
    "1B": Shape(vocabulary=8192, context=256, width=2048, layers=20, heads=16),
}
LIBRARIES_BYTES = 300_000_000  # of a process that has imported torch


@dataclass(frozen=True, slots=True)
class Start:
    """What one start took."""

    way: str
    seconds: float  # until the last rank has its shards
    peaks: tuple[int, ...]  # bytes above what was there before, by rank
    digests: tuple[str, ...]  # of the shards, by rank


def main() -> None:
    """Parse the command line, start, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.initialize", description=__doc__)
    parser.add_argument("--parameters", choices=SHAPES, default="1B")
    parser.add_argument("--ways", default=",".join(WAYS), help="by comma")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="of which the median time is told")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    ways = tuple(name.strip() for name in options.ways.split(","))
    unknown = [name for name in ways if name not in WAYS]
    if unknown:
        parser.error(f"unknown ways {unknown}; expected some of {', '.join(WAYS)}")
    sizes = Sizes.of(SHAPES[options.parameters], options.ranks)
    needed, available = sizes.needed(ways), available_bytes()
    if needed > available:
        parser.error(
            f"needs {needed / 1e9:.1f} GB of memory for {', '.join(ways)}, and "
            f"{available / 1e9:.1f} GB are available; choose fewer --parameters, or --ways meta"
        )
    starts = [
        run(way, options.parameters, options.ranks) for _ in range(options.rounds) for way in ways
    ]
    figures = summarize(starts, sizes)
    Console().print(as_table(figures, f"{options.parameters} on {options.ranks} ranks", sizes))
    if options.out is not None:
        write(options.out, options.parameters, sizes, figures)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model on some ranks."""

    ranks: int
    parameters: int
    model_bytes: int
    shard_bytes: int  # of one rank
    unit_bytes: int  # the largest one, gathered

    @classmethod
    def of(cls, shape: Shape, ranks: int) -> "Sizes":
        """Of a GPT in float32, planned only."""
        with torch.device("meta"):
            plan = make_plan(GPT(shape), world_size=ranks, units=Block)
        return cls(
            ranks=ranks,
            parameters=plan.num_parameters,
            model_bytes=plan.parameter_bytes,
            shard_bytes=plan.shard_bytes,
            unit_bytes=max(unit.gathered_bytes for unit in plan.units),
        )

    def needed(self, ways: Sequence[str]) -> int:
        """Bytes of all ranks together, whichever of the ways needs most."""
        whole = self.model_bytes if set(ways) - {"meta"} else 0
        return self.ranks * (whole + self.shard_bytes + self.unit_bytes + LIBRARIES_BYTES)


def run(way: str, parameters: str, ranks: int) -> Start:
    """Start once, in processes of its own."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="initialize-") as folder:
        meeting = f"file://{folder}/ranks"
        multiprocessing.spawn(
            rank_main, args=(way, parameters, ranks, meeting, queue), nprocs=ranks
        )
    start: Start = queue.get()
    return start


def rank_main(
    rank: int,
    way: str,
    parameters: str,
    ranks: int,
    meeting: str,
    queue: "multiprocessing.SimpleQueue[Start]",
) -> None:
    """One rank's part; the first one tells what all of them took."""
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    WAYS[way](Shape(vocabulary=64, context=8, width=64, layers=2, heads=2))  # loads what is loaded
    dist.barrier()
    before = reset_peak()
    began = time.perf_counter()
    model = WAYS[way](SHAPES[parameters])
    dist.barrier()
    seconds = time.perf_counter() - began
    own = (seconds, peak() - before, digest(model))
    by_rank: list[tuple[float, int, str]] = [own] * ranks
    dist.all_gather_object(by_rank, own)
    if rank == 0:
        all_seconds, peaks, digests = zip(*by_rank, strict=True)
        queue.put(Start(way, max(all_seconds), peaks, digests))
    dist.barrier()
    dist.destroy_process_group()


# -- the ways ------------------------------------------------------------------------------------


def from_meta(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        model = GPT(shape)
    return sw.fully_shard(model, units=Block, init=sw.Initialization(SEED, fill))


def from_whole(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    sw.initialize(model, SEED, init_fn=fill)
    return sw.fully_shard(model, units=Block)


def from_eager(shape: Shape) -> nn.Module:
    torch.manual_seed(SEED)
    return sw.fully_shard(GPT(shape), units=Block)


WAYS: dict[str, Callable[[Shape], nn.Module]] = {
    "meta": from_meta,
    "whole": from_whole,
    "eager": from_eager,
}


def fill(module: nn.Module) -> None:
    """Draw what ``module`` holds itself."""
    if isinstance(module, GPT):
        module.rotations = rotary_table(module.shape)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


# -- measuring -----------------------------------------------------------------------------------


def reset_peak() -> int:
    """Let the peak begin anew; the resident bytes of now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak() -> int:
    """The most resident bytes since `reset_peak`."""
    return _status("VmHWM")


def available_bytes() -> int:
    """What the machine has left for new processes."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _status(field: str) -> int:
    return _kilobytes("/proc/self/status", field)


def _kilobytes(path: str, field: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no {field}; this benchmark needs Linux")


def digest(model: nn.Module) -> str:
    """Of the bits of this rank's shards, by name."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, sw.ShardedTensor)
        found.update(name.encode())
        found.update(parameter.to_local().detach().numpy().data)
    return found.hexdigest()


# -- telling -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One way, over all rounds."""

    way: str
    seconds: float  # median
    peak_bytes: int  # of the rank and the round that needed most
    peak_relative: float  # to the shards and the largest unit
    same_bits_as_whole: bool | None  # None where nobody promises it, or that way did not run


def summarize(starts: Sequence[Start], sizes: Sizes) -> list[Figure]:
    """One figure for each way, in the order in which they ran."""
    whole = next((start.digests for start in starts if start.way == "whole"), None)
    figures = []
    for way in dict.fromkeys(start.way for start in starts):
        own = [start for start in starts if start.way == way]
        most = max(max(start.peaks) for start in own)
        compares = way == "meta" and whole is not None
        figures.append(
            Figure(
                way=way,
                seconds=statistics.median(start.seconds for start in own),
                peak_bytes=most,
                peak_relative=most / (sizes.shard_bytes + sizes.unit_bytes),
                same_bits_as_whole=all(s.digests == whole for s in own) if compares else None,
            )
        )
    return figures


def as_table(figures: Sequence[Figure], what: str, sizes: Sizes) -> Table:
    """The figures, one line each."""
    limit = (sizes.shard_bytes + sizes.unit_bytes) / 1e6
    table = Table("way", title=f"{what}: shards and the largest unit are {limit:,.0f} MB")
    for heading in ("time", "peak of a rank", "of shards and a unit", "bits of whole"):
        table.add_column(heading, justify="right")
    for one in figures:
        same = {None: "", True: "the same", False: "OTHERS"}[one.same_bits_as_whole]
        table.add_row(
            one.way,
            f"{one.seconds:.1f} s",
            f"{one.peak_bytes / 1e6:,.0f} MB",
            f"{one.peak_relative:.2f} x",
            same,
        )
    return table


def write(out: Path, parameters: str, sizes: Sizes, figures: Sequence[Figure]) -> None:
    """Put the figures of one size beside those of others that ``out`` has."""
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    known[parameters] = {
        "command": shlex.join(["python", "-m", "benchmarks.initialize", *sys.argv[1:]]),
        "sizes": asdict(sizes),
        "ways": [asdict(figure) for figure in figures],
    }
    out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
