"""``python -m benchmarks.wire``: quantized training, compared with exact training.

A small GPT trains on the source of Python's standard library, on CPU ranks, from the same initial
model and on the same batches: with quantized gathers and reductions, and with 8-bit Adam states.

Columns: *loss* is the mean over the last 20 steps; *gather* and *reduce* are the bytes that a rank
sends per step, and *states* the bytes of the optimizer states. Ratios are to the first row.

``--memory`` instead compares the peak of live memory and the bytes of a step of the GPT of 10 M
parameters of `shardwise bench` with their prediction, for each strategy and wire.
"""

import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import shardwise as sw
from benchmarks import make_parser, print_figures
from benchmarks.forecast import BYTE_COLUMNS, Case, measure_bytes, predict_bytes
from shardwise.bench import harness
from shardwise.bench.harness import Figures
from shardwise.comm.communicator import communicator
from shardwise.launch.world import World
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import local_of
from shardwise.train.model import GPT, Block, gpt_shape

LAST = 20  # steps whose losses are averaged
ROWS = 8  # batch rows per rank
TEXT_BYTES = 4 << 20
CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8 gathers, int4 reductions": {"wire": sw.Wire(gather="int8", reduce="int4", block=256)},
    "the same, with error feedback": {
        "wire": sw.Wire(gather="int8", reduce="int4", block=256, error_feedback=True)
    },
    "fp8 gathers, int8 reductions": {"wire": sw.Wire(gather="fp8", reduce="int8", block=256)},
    "Adam8bit": {"granularity": "row"},
}
WIRES = {
    "exact": sw.Wire(),
    "int8 gathers": sw.Wire("int8"),
    "int4 reductions": sw.Wire(None, "int4"),
    "int8 gathers, int4 reductions": sw.Wire("int8", "int4"),
    "the same, with error feedback": sw.Wire("int8", "int4", error_feedback=True),
}
SHAPE = gpt_shape(vocabulary=256, context=32, width=64, layers=2, heads=2)


def main() -> None:
    parser = make_parser("wire", __doc__, ranks=2)
    parser.add_argument("--steps", type=int, default=300, help="number of steps")
    parser.add_argument("--memory", metavar="STRATEGY,STRATEGY", help="measure memory instead")
    options = parser.parse_args()
    if options.memory:
        compare_memory(options.ranks, options.memory.split(","), options.out)
        return
    by_rank = harness.run_ranks(options.ranks, train_all, options.steps)
    cases = {name: mean_over_ranks([own[name] for own in by_rank]) for name in CASES}
    exact = cases["exact"]
    rows = {
        name: case | {f"{key} of exact": value / exact[key] for key, value in case.items()}
        for name, case in cases.items()
    }
    columns = (
        ("loss", "loss", "{:.4f}".format),
        ("of exact", "loss of exact", "{:.4f}".format),
        ("gather", "gathered_bytes of exact", "{:.3f}".format),
        ("reduce", "reduced_bytes of exact", "{:.3f}".format),
        ("states", "state_bytes of exact", "{:.3f}".format),
    )
    print_figures(f"{options.ranks} ranks", columns, rows, options.out, cases=cases)


def train_all(world: World, steps: int) -> dict[str, Figures]:
    """Train all cases on this rank."""
    found = {}
    with harness.show_progress("training", len(CASES), visible=world.is_first) as begin:
        for name in CASES:
            begin(name)
            found[name] = train(world, name, steps)
    return found


def compare_memory(ranks: int, strategies: Sequence[str], out: Path | None) -> None:
    """Print predicted and measured bytes."""
    cases = {
        f"{strategy}, {name}": Case("10M", ranks, strategy, wire=wire)
        for strategy in strategies
        for name, wire in WIRES.items()
    }
    by_rank = harness.run_ranks(ranks, measure_all, [*cases.values()])
    rows = {}
    for index, (name, case) in enumerate(cases.items()):
        measured = harness.largest([own[index] for own in by_rank])
        predicted = predict_bytes(case)[1]
        error = predicted["live_peak"] / measured["live_peak"] - 1
        rows[name] = measured | {f"predicted {k}": v for k, v in predicted.items()}
        rows[name]["live_peak error"] = error
    print_figures(f"{ranks} ranks", BYTE_COLUMNS, rows, out)


def measure_all(world: World, cases: Sequence[Case]) -> list[Figures]:
    measure_bytes(world, cases[0])  # libraries allocate on first use
    return [measure_bytes(world, case)[0] for case in cases]


def mean_over_ranks(by_rank: Sequence[Figures]) -> Figures:
    return {name: statistics.fmean(own[name] for own in by_rank) for name in by_rank[0]}


def train(world: World, name: str, steps: int) -> Figures:
    """Train one case on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = sw.fully_shard(GPT(SHAPE), units=Block, **CASES[name])
    kind = sw.optim.Adam8bit if name == "Adam8bit" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.1)
    runtime = runtime_of_root(model)
    comm = communicator(runtime.mesh.world, runtime.pools.device)
    queues = (comm.gather, comm.reduce)
    losses, before = [], [0, 0]
    for number, tokens in zip(range(steps), batches(world.rank), strict=False):
        if number == steps - 1:
            before = [queue.sent[1] for queue in queues]
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (number + 1) / 20)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    gathered, reduced = (queue.sent[1] - b for queue, b in zip(queues, before, strict=True))
    states = [
        local_of(value).nbytes if hasattr(value, "placements") else value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
    ]
    last = losses[-LAST:]
    return {
        "loss": sum(last) / len(last),
        "gathered_bytes": gathered,
        "reduced_bytes": reduced,
        "state_bytes": sum(states),
    }


def batches(rank: int) -> Iterator[Tensor]:
    """Yield rows of bytes [ROWS, context + 1], which differ between ranks."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(rank)
    length = SHAPE.context + 1
    while True:
        starts = torch.randint(len(tokens) - length, (ROWS,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts.tolist()])


if __name__ == "__main__":
    main()
