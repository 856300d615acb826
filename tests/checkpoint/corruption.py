"""``python -m tests.checkpoint.corruption``: detect random damage to a checkpoint.

Prints how often each kind was tried, and every case that `load` or `examine` missed.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.offline import examine

MAX_FILE_BYTES = 3_000_000


class Subject:
    """A checkpoint of several files and blocks, in one process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "whole"
        self.model, self.optimizer = _build(0)
        x = torch.randn(2, 700)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        sw.save(
            self.path,
            model=self.model,
            optimizer=self.optimizer,
            max_file_bytes=MAX_FILE_BYTES,
            cursor={"step": 1, "order": torch.arange(50)},
        )
        self.fresh, self.fresh_optimizer = _build(1)

    def load(self, path: Path) -> None:
        sw.load(path, model=self.fresh, optimizer=self.fresh_optimizer)


def _build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(700, 600), nn.ReLU(), nn.Linear(600, 3))
    return model, torch.optim.AdamW(model.parameters())


def flip_bit(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    # Half of the flips are near the beginning, in the headers.
    at = rng.randrange(min(len(content), 2000) if rng.random() < 0.5 else len(content))
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"byte {at}"


def overwrite(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    length = min(rng.randrange(1, 5000), len(content) - at)
    before = bytes(content[at : at + length])
    content[at : at + length] = bytes(length) if any(before) else rng.randbytes(length)
    path.write_bytes(content)
    return f"bytes {at} to {at + length}"


def truncate(path: Path, rng: random.Random) -> str:
    size = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"cut to {size}"


def append(path: Path, rng: random.Random) -> str:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))
    return "appended"


def remove(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    path.unlink()
    return "removed"


def swap_bytes(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    half = rng.randrange(1, len(content) // 2)
    content[:half], content[half : 2 * half] = content[half : 2 * half], content[:half]
    path.write_bytes(content)
    return f"two pieces of {half} bytes exchanged"


def add_file(path: Path, rng: random.Random) -> str:  # noqa: ARG001
    shutil.copyfile(path, path.with_name("other.safetensors"))
    return "a foreign file"


DAMAGES: list[Callable[[Path, random.Random], str]] = [
    *[flip_bit] * 6,
    *[overwrite] * 3,
    truncate,
    append,
    remove,
    swap_bytes,
    add_file,
]


def find_undetected(cases: int, seed: int, folder: Path) -> tuple[list[str], Counter[str]]:
    """Damage a checkpoint ``cases`` times; return the undetected cases and the counts by kind."""
    rng = random.Random(seed)
    subject = Subject(folder)
    subject.load(subject.path)
    assert examine(subject.path) == []
    undetected, tried = [], Counter[str]()
    damaged = folder / "damaged"
    shutil.copytree(subject.path, damaged)
    for _ in range(cases):
        file = rng.choice(sorted(subject.path.iterdir()))
        damage = rng.choice(DAMAGES)
        what = f"{file.name}: {damage.__name__}: {damage(damaged / file.name, rng)}"
        tried[damage.__name__] += 1
        if _loads(subject, damaged):
            undetected.append(f"load: {what}")
        if not examine(damaged):
            undetected.append(f"doctor: {what}")
        shutil.copyfile(file, damaged / file.name)
        (damaged / "other.safetensors").unlink(missing_ok=True)
    return undetected, tried


def _loads(subject: Subject, path: Path) -> bool:
    try:
        subject.load(path)
    except sw.CheckpointError:
        return False
    return True


def main() -> int:
    """Parse the command line, run, print; returns 1 if any damage was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checkpoint.corruption", description=__doc__
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        undetected, tried = find_undetected(options.cases, options.seed, Path(folder))
    counts = ", ".join(f"{count} {name}" for name, count in tried.most_common())
    sys.stdout.write("\n".join([*undetected, f"{counts}; {len(undetected)} not detected\n"]))
    return bool(undetected)


if __name__ == "__main__":
    sys.exit(main())
