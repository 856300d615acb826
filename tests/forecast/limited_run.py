"""Trains a model with `sw.fit`: ``python -m tests.forecast.limited_run MODEL [CGROUP]``.

Prints by how many bytes the memory that the process has allocated grows at its peak. Pages of
mapped files do not count, because the kernel can drop them and read them again: how many are
resident depends on its page cache.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.models.transformer import Shape, build

_MB = 10**6
_FLOAT32 = Configuration(compute_dtype=torch.float32)
BATCH, TIME = 4, 64
LLAMA = Shape(arch="llama", layers=6, hidden=384, heads=6, vocab=4000, ffn=1024)
TIED = Shape(
    arch="gpt", layers=4, hidden=512, heads=8, vocab=8000, positions=TIME, tied_embeddings=True
)
DEEP = Shape(arch="gpt", layers=12, hidden=320, heads=5, vocab=2000, has_bias=True)
MODELS = {"llama": (LLAMA, 345 * _MB), "tied": (TIED, 450 * _MB), "deep": (DEEP, 385 * _MB)}


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Train for a few steps."""
    (shape, budget), group = MODELS[sys.argv[1]], sys.argv[2:]
    torch.set_num_threads(1)
    sw.fully_shard  # noqa: B018 - imports the package before memory is measured
    before = resident("RssAnon")
    for folder in group:  # later allocations count towards its limit
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    model = build(shape).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    fitted = sw.fit(model, budget=budget, batch=BATCH, sequence=TIME, configuration=_FLOAT32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(BATCH, TIME, dtype=torch.long)
    for _ in range(3):
        for part in torch.split(tokens, fitted.configuration.micro_batch):
            model(part, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(resident("VmHWM") - resident("RssFile") - before)  # noqa: T201


if __name__ == "__main__":
    main()
