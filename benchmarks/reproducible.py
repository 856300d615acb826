"""``python -m benchmarks.reproducible``: the cost of a reproducible step.

There are as many ranks as micro-batches in a step, so that an ordinary step does the same.

A GPT takes steps with clipping and AdamW, with and without ``reproducible``, in turns. Columns:
*time* and *CPU time* are relative to those of an ordinary step in the same round (median); *sent*
are the bytes that a rank sends in a step, from the ledger, also relative to an ordinary step.
"""

import gc
import time
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.harness import Figures
from shardwise.launch.world import World
from shardwise.train.model import GPT, Block, gpt_shape

WARM_UP = 3  # steps
CONTEXT = 128


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("reproducible", __doc__, ranks=2, rounds=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument(
        "--width", type=int, default=384, help="width of the GPT (384: 10.7M parameters)"
    )
    options = parser.parse_args()
    rows = harness.run_ranks(options.ranks, measure_all, options)[0]
    columns = (
        ("step, ms", "seconds", lambda seconds: f"{seconds * 1e3:.0f}"),
        ("time", "time", "{:.3f}".format),
        ("CPU time", "cpu_time", "{:.3f}".format),
        ("sent, MB", "sent_bytes", lambda sent: f"{sent / 1e6:.2f}"),
        ("of ordinary", "sent", "{:.4f}".format),
    )
    setting = {"ranks": options.ranks, "sequences_of_a_rank": options.batch, "width": options.width}
    title = f"reproducible={options.ranks} on {options.ranks} CPU ranks, beside an ordinary step"
    print_figures(title, columns, rows, options.out, **setting)


def measure_all(world: World, options: Namespace) -> dict[str, Figures]:
    rows = {}
    for strategy in ("fsdp", "zero2", "ddp"):
        rows[strategy] = measure(world, options, strategy)
        gc.collect()
    return rows


def measure(world: World, options: Namespace, strategy: str) -> Figures:
    """Take ordinary and reproducible steps in turns."""
    torch.set_num_threads(1)
    runs = {
        "ordinary": Run(options, strategy, None),
        "reproducible": Run(options, strategy, world.size),
    }
    cases = {name: run.step for name, run in runs.items()}
    rounds = harness.interleave(
        cases, options.rounds, title=strategy, warm_up=WARM_UP, visible=world.is_first
    )
    rounds = harness.merge(world.gather(rounds))
    sent = {name: run.sent_bytes for name, run in runs.items()}
    return {
        "seconds": harness.medians(rounds, "reproducible")["seconds"],
        "time": harness.ratio(rounds, "reproducible", "ordinary").median,
        "cpu_time": harness.ratio(rounds, "reproducible", "ordinary", "cpu_seconds").median,
        "sent_bytes": sent["reproducible"],
        "sent": sent["reproducible"] / sent["ordinary"],
    }


class Run:
    """A model in training."""

    def __init__(self, options: Namespace, strategy: str, leaves: int | None) -> None:
        shape = gpt_shape(vocabulary=256, context=CONTEXT, width=options.width, layers=6, heads=4)
        torch.manual_seed(0)
        self._model: nn.Module = sw.fully_shard(
            GPT(shape), units=Block, strategy=strategy, reproducible=leaves
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._batch = options.batch

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent in the last step."""
        return sw.ledger(self._model).sent_bytes().total

    def step(self, number: int) -> Figures:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(256, (self._batch, CONTEXT + 1), generator=generator)
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        logits = self._model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        sw.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.barrier()
        cpu_seconds = time.process_time() - cpu_began
        return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds}


if __name__ == "__main__":
    main()
