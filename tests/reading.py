"""``python -m tests.reading``: the lines of the package that a plain training step runs.

A small model is sharded over eight ranks of a fake process group and trained for three steps with
clipping. Collectives take the path of a backend such as NCCL, and do nothing. The distinct lines
that run are what a reader has to follow; the other lines are options, checks and tools.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise.public  # noqa: F401 - here, so that the lines of imports are not counted
from shardwise import clip_grad_norm_, fully_shard
from shardwise.comm.process_group import ProcessGroupCollectives
from tests.counting import PACKAGE, follow_lines

if TYPE_CHECKING:
    from types import FrameType

NUM_RANKS = 8


class Block(nn.Sequential):
    """A unit."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def train() -> None:
    """Shard a model, and train it for three steps."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*(Block() for _ in range(4))), units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        batch = torch.randn(8, 64)
        (model(batch) - batch).square().mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def fake_group() -> Iterator[None]:
    """A process group of `NUM_RANKS`, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stack_of_a_gather() -> list[tuple[str, str]]:
    """(file, function) of each frame from the call of a unit to its all-gather."""
    stacks: list[list[tuple[str, str]]] = []
    all_gather = ProcessGroupCollectives.all_gather

    def gather(queue: ProcessGroupCollectives, *args: Any, **options: Any) -> Any:
        if not stacks:
            stacks.append([])
            frame: FrameType | None = sys._getframe().f_back
            while frame is not None:
                code, frame = frame.f_code, frame.f_back
                if code.co_filename.startswith(f"{PACKAGE}/"):
                    name = code.co_filename.removeprefix(f"{PACKAGE}/")
                    stacks[0].insert(0, (name, code.co_qualname))
        return all_gather(queue, *args, **options)

    with mock.patch.object(ProcessGroupCollectives, "all_gather", gather), fake_group():
        model = fully_shard(Block())
        model(torch.randn(8, 64))
    code = all_gather.__code__
    return [*stacks[0], (code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname)]


def lines_run(function: Callable[[], None]) -> dict[str, int]:
    """The number of distinct lines of each file of the package that ``function`` runs."""
    lines: defaultdict[str, set[int]] = defaultdict(set)
    follow_lines(function, lambda frame: lines[frame.f_code.co_filename].add(frame.f_lineno))
    return {str(Path(name).relative_to(PACKAGE)): len(found) for name, found in lines.items()}


def lines_of_a_step() -> dict[str, int]:
    """The lines that `train` runs, by file, in a process without a process group."""
    with fake_group():
        return lines_run(train)


def main() -> None:
    found = lines_of_a_step()
    rows = ["  run    all  file"]
    for name, count in sorted(found.items(), key=lambda item: -item[1]):
        total = len((PACKAGE / name).read_text(encoding="utf-8").splitlines())
        rows.append(f"{count:5}  {total:5}  {name}")
    rows.append(f"{sum(found.values()):5}         lines in {len(found)} files")
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
