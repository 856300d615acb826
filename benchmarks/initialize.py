"""``python -m benchmarks.initialize``: memory and time to initialize and shard a model.

Every initialization runs in new processes, one for each rank, all on this machine:

- *meta*: the model is on the meta device; `sw.fully_shard` allocates, fills and shards it unit by
  unit;
- *whole*: every rank fills the whole model in the same way and then shards it: the same bits;
- *eager*: the model's constructor fills it, as in most programs, before it is sharded.

The peak is that of resident memory minus the memory before, and is compared with the rank's shards
plus the largest gathered unit.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.harness import Figures
from shardwise.bench.memory import high_water_bytes, reset_high_water
from shardwise.forecast.memory.process import resident_bytes
from shardwise.forecast.models.transformer import Shape
from shardwise.launch.world import World
from shardwise.plan.plan import make_plan
from shardwise.train.model import GPT, Block, gpt_shape

SEED = 0
SHAPES = {
    "tiny": gpt_shape(vocabulary=64, context=8, width=64, layers=2, heads=2),
    "30M": gpt_shape(vocabulary=8192, context=256, width=512, layers=8, heads=8),
    "200M": gpt_shape(vocabulary=8192, context=256, width=1024, layers=15, heads=16),
    "300M": gpt_shape(vocabulary=8192, context=256, width=1280, layers=15, heads=20),
    "1B": gpt_shape(vocabulary=8192, context=256, width=2048, layers=20, heads=16),
}
LIBRARIES_BYTES = 300_000_000  # memory of a process that has imported torch


def main() -> None:
    """Parse the command line, initialize, print."""
    parser = make_parser("initialize", __doc__, ranks=4, rounds=1)
    parser.add_argument("--parameters", choices=SHAPES, default="1B")
    parser.add_argument("--modes", default=",".join(MODES), help="modes, comma-separated")
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown modes {sorted(unknown)}; expected some of {', '.join(MODES)}")
    sizes = measure_sizes(SHAPES[options.parameters], options.ranks)
    if (needed := needed_bytes(sizes, modes)) > (available := psutil.virtual_memory().available):
        parser.error(
            f"--modes {options.modes} needs {needed / 1e9:.1f} GB of memory, but only "
            f"{available / 1e9:.1f} GB are available; choose fewer --parameters, or --modes meta"
        )
    digests: dict[str, list[str]] = {}

    def measure(mode: str, _number: int) -> Figures:
        by_rank = harness.run_ranks(options.ranks, start, mode, options.parameters)
        digests[mode] = [digest for _, digest in by_rank]
        return harness.largest([figures for figures, _ in by_rank])

    cases = {mode: partial(measure, mode) for mode in modes}
    rounds = harness.merge([harness.interleave(cases, options.rounds, title="initialization")])
    rows = {mode: harness.medians(rounds, mode) for mode in modes}
    limit = sizes["shard_bytes"] + sizes["unit_bytes"]
    for figures in rows.values():
        figures["peak_relative"] = figures["peak_bytes"] / limit
    if "whole" in digests and "meta" in digests:
        rows["meta"]["same_bits_as_whole"] = digests["meta"] == digests["whole"]
    columns = (
        ("time, s", "seconds", "{:.1f}".format),
        ("peak per rank, MB", "peak_bytes", lambda peak: f"{peak / 1e6:,.0f}"),
        ("/ shards and a unit", "peak_relative", "{:.2f} x".format),
        ("bits of whole", "same_bits_as_whole", lambda same: "the same" if same else "DIFFERENT"),
    )
    model = f"{options.parameters} on {options.ranks} ranks"
    title = f"{model}: shards and the largest unit are {limit / 1e6:,.0f} MB"
    print_figures(title, columns, rows, options.out, sizes=sizes)


def measure_sizes(shape: Shape, ranks: int) -> dict[str, int]:
    """Return the bytes of a float32 GPT according to its plan."""
    with torch.device("meta"):
        plan = make_plan(GPT(shape), world_size=ranks, units=Block)
    return {
        "ranks": ranks,
        "parameters": plan.num_parameters,
        "model_bytes": plan.parameter_bytes,
        "shard_bytes": plan.shard_bytes,  # per rank
        "unit_bytes": max(unit.gathered_bytes for unit in plan.units),
    }


def needed_bytes(sizes: dict[str, int], modes: Sequence[str]) -> int:
    """Return the memory of all ranks together, for the mode that needs the most."""
    whole = sizes["model_bytes"] if set(modes) - {"meta"} else 0
    return sizes["ranks"] * (whole + sizes["shard_bytes"] + sizes["unit_bytes"] + LIBRARIES_BYTES)


def start(_world: World, mode: str, parameters: str) -> tuple[Figures, str]:
    """Initialize on one rank; return time and peak, and a digest of its shards."""
    MODES[mode](SHAPES["tiny"])  # runs lazy imports
    dist.barrier()
    reset_high_water()
    before, began = resident_bytes(), time.perf_counter()
    model = MODES[mode](SHAPES[parameters])
    dist.barrier()
    seconds, peak = time.perf_counter() - began, high_water_bytes() - before
    return {"seconds": seconds, "peak_bytes": peak}, digest(model)


def from_meta(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        model = GPT(shape)
    return sw.fully_shard(model, units=Block, init=sw.Initialization(SEED, model.fill))


def from_whole(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    sw.initialize(model, SEED, init_fn=model.fill)
    return sw.fully_shard(model, units=Block)


def from_eager(shape: Shape) -> nn.Module:
    torch.manual_seed(SEED)
    return sw.fully_shard(GPT(shape), units=Block)


MODES: dict[str, Callable[[Shape], nn.Module]] = {
    "meta": from_meta,
    "whole": from_whole,
    "eager": from_eager,
}


def digest(model: nn.Module) -> str:
    """Hash the bits of this rank's shards, with their names."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, sw.ShardedTensor)
        found.update(name.encode())
        found.update(parameter.to_local().detach().numpy().data)
    return found.hexdigest()


if __name__ == "__main__":
    main()
