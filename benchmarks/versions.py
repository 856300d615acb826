"""``python -m benchmarks.versions``: what older versions of torch cost.

*Steps*: torch 2.11 cannot swap the memory of storages, so buffers get theirs from the allocator in
each step, and the ranks of a host do not gather into shared memory. The same GPT takes steps with
both, without shared memory, and with neither; the cases take turns.

*Updates*: in torch 2.11, a mode intercepts the operators of sharded parameters. An update of AdamW
on sharded parameters is compared with one on plain tensors of the same sizes. Run this part with
each version of torch.

Times are CPU seconds of a rank; page faults are those that the kernel serves without a disk.
"""

import resource
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise._private import can_swap_storages
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures, Round
from shardwise.bench.options import Setting, read_shape
from shardwise.bench.work import gpt_work
from shardwise.launch.world import World
from shardwise.runtime import buffers, gradients, memory

NUM_PARAMETERS = 300
WIDTH = 16
CALLS = 20  # updates per round
LOOPS = ("fused", "foreach")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = make_parser("versions", __doc__, ranks=2, rounds=30)
    parser.add_argument("--size", default="10M", help="the GPT, as in `shardwise bench`")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    options = parser.parse_args(arguments)
    by_rank = harness.run_ranks(options.ranks, measure, options)
    steps, updates = (harness.merge([views[part] for views in by_rank]) for part in (0, 1))
    *_, best = steps[0].cases
    rows = {name: _row(steps, name, best) for name in steps[0].cases}
    rows |= {name: _row(updates, name, f"{name.split()[0]} plain") for name in updates[0].cases}
    columns = (
        ("ms", "seconds", lambda seconds: f"{seconds * 1e3:.2f}"),
        ("CPU ms", "cpu_seconds", lambda seconds: f"{seconds * 1e3:.2f}"),
        ("page faults", "page_faults", "{:.0f}".format),
        ("/ base", "ratio", "{:.2f}".format),
    )
    title = f"steps and updates on torch {torch.__version__}, {options.ranks} ranks"
    setting = {name: getattr(options, name) for name in ("ranks", "size", "batch")}
    print_figures(title, columns, rows, options.out, **setting)


def _row(rounds: Sequence[Round], name: str, base: str) -> dict[str, Any]:
    return {
        **harness.medians(rounds, name),
        "ratio": harness.ratio(rounds, name, base, "cpu_seconds").median,
    }


def measure(world: World, options: Namespace) -> tuple[list[Round], list[Round]]:
    """Measure steps in each way that this torch has, and updates."""
    interleave = partial(harness.interleave, rounds=options.rounds, visible=world.is_first)
    steps = interleave(_steps(world, options), title="steps", warm_up=3)
    return steps, interleave(_updates(), title="updates", warm_up=3)


@contextmanager
def patched(*, swaps: bool, shares: bool) -> Iterator[None]:
    """Use memory as a version of torch that cannot swap storages does, or without sharing it."""
    with ExitStack() as stack:
        for module in (memory, buffers, gradients):
            stack.enter_context(mock.patch.object(module, "CAN_SWAP", swaps))
        if not shares:
            stack.enter_context(mock.patch.object(memory, "new_shared_memory", return_value=None))
        yield


def _steps(world: World, options: Namespace) -> dict[str, Callable[[int], Figures]]:
    setting = Setting("", read_shape(options.size, 128), world.size, "fp32", (), 0, options.batch)
    work = gpt_work(setting)
    ways = {"resized": {"swaps": False, "shares": False}}
    if can_swap_storages():
        ways["swapped"] = {"swaps": True, "shares": False}
        ways["swapped and shared"] = {"swaps": True, "shares": True}

    def case(way: dict[str, bool]) -> Callable[[int], Figures]:
        with patched(**way):
            trained = ENGINES["shardwise-fsdp"].start(work)

        def step(number: int) -> Figures:
            batch = work.batch(number, world.rank)
            with patched(**way):
                return timed(lambda: trained.step(batch))

        return step

    return {name: case(way) for name, way in ways.items()}


def _updates() -> dict[str, Callable[[int], Figures]]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_PARAMETERS // 2)]
    model = sw.fully_shard(nn.Sequential(*layers))
    model(torch.ones(1, WIDTH)).sum().backward()
    plain = [_plain(parameter) for parameter in model.parameters()]
    assert len(plain) == NUM_PARAMETERS

    def case(parameters: Sequence[Tensor], loop: str) -> Callable[[int], Figures]:
        is_fused = loop == "fused"
        optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=is_fused, foreach=not is_fused)

        def update(_number: int) -> Figures:
            figures = timed(lambda: [optimizer.step() for _ in range(CALLS)])
            return {name: figure / CALLS for name, figure in figures.items()}

        return update

    kinds: dict[str, list[Tensor]] = {"plain": plain, "sharded": [*model.parameters()]}
    return {f"{loop} {kind}": case(kinds[kind], loop) for loop in LOOPS for kind in kinds}


def _plain(parameter: Any) -> Tensor:
    """A parameter that is this rank's shard, with a gradient."""
    made = nn.Parameter(parameter.to_local().detach().clone())
    made.grad = torch.zeros_like(made)
    return made


def timed(call: Callable[[], object]) -> Figures:
    """The time and page faults of a call."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "page_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults),
    }


if __name__ == "__main__":
    main()
