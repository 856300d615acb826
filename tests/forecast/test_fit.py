"""Compares `sw.fit` with an exhaustive search, and with the memory of real steps."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError, PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines import find as machines
from shardwise.forecast.machines.find import local_machine
from shardwise.forecast.machines.hardware import parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.models.model import Model
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.options import bytes_of
from shardwise.forecast.search.fit import MODES, Fit, Search, choose, fit
from shardwise.train.model import GPT, gpt_shape

LLAMA = Shape(arch="llama", layers=4, hidden=64, heads=4, vocab=500, ffn=128)
TIED = Shape(
    arch="gpt", layers=5, hidden=64, heads=4, vocab=300, positions=32, tied_embeddings=True
)
BASE = Configuration(shard_size=2, micro_batch=4, sequence=32, compute_dtype=torch.float32)


def trained() -> nn.Module:
    return GPT(gpt_shape(vocabulary=256, context=32, width=64, layers=3, heads=4))


def search_of(model: Model, *, on_cpu: bool = True) -> Search:
    return Search(model, Machine.of(parse_cluster("2xH100")), on_cpu)


def all_of(search: Search, base: Configuration) -> list[Fit]:
    return [
        search.fit(search.recomputing(one, mode, count))
        for one in search.bases(base)
        for mode in MODES
        for count in range(search.num_blocks + 1)
    ]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Model("llama", LLAMA), marks=pytest.mark.thorough),
        pytest.param(Model("tied", TIED), marks=pytest.mark.thorough),
        pytest.param(Model("trained", factory=trained), marks=pytest.mark.thorough),
    ],
    ids=lambda model: model.name,
)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_chosen_step_is_nearly_the_fastest(model: Model, on_cpu: bool) -> None:
    search = search_of(model, on_cpu=on_cpu)
    everything = all_of(search, BASE)
    sizes = sorted(one.num_bytes for one in everything)
    for share in (0.0, 0.25, 0.5, 1.0):
        budget = int(sizes[0] + share * (sizes[-1] - sizes[0]))
        best = min(one.seconds for one in everything if one.num_bytes <= budget)
        chosen = choose(search, BASE, budget)
        assert chosen.num_bytes <= budget
        assert chosen.seconds <= 1.1 * best
    with pytest.raises(
        PlanError,
        match=r"no configuration fits; the smallest needs [\d,]+ bytes per rank.*would save",
    ):
        choose(search, BASE, int(0.95 * sizes[0]))


def test_a_large_budget_recomputes_nothing() -> None:
    base = replace(BASE, micro_batch=1)
    chosen = choose(search_of(Model("llama", LLAMA)), base, 1 << 40)
    assert chosen.configuration.checkpointing == "none"
    assert chosen.checkpointing == ()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24 GB", 24 * 10**9), ("24GiB", 24 << 30), ("1.5 mb", 1_500_000), (7, 7), ("512", 512)],
)
def test_bytes(text: int | str, num_bytes: int) -> None:
    assert bytes_of(text) == num_bytes


@pytest.mark.parametrize("text", ["lots", "1.2.3 GB", ".", float("nan"), None])
def test_bytes_are_refused(text: Any) -> None:
    with pytest.raises(PlanError, match=rf"budget={text!r}: expected bytes"):
        bytes_of(text)


def test_without_a_gpu_ranks_share_a_typical_cpu() -> None:
    machine = local_machine(2)
    assert (machine.cluster.num_devices, machine.cluster.device_word) == (2, "rank")
    assert machine.constants.interference > 1000, "collectives occupy the cores"


def test_an_unknown_gpu_must_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machines, "name_of", lambda _device: "NVIDIA H100 80GB HBM3")
    assert str(local_machine(8).cluster) == "8xH100-SXM-80GB"
    monkeypatch.setattr(machines, "name_of", lambda _device: "NVIDIA Z900")
    with pytest.raises(ConfigError, match=r"'NVIDIA Z900'.*shardwise doctor --calibrate"):
        local_machine(8)


_FIRST_USE = """
import psutil, torch
from torch import nn
import shardwise as sw

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)

torch.set_num_threads(1)
model = Model()
process = psutil.Process()
before = process.memory_info().rss
fitted = sw.fit(model, budget="1 GB", batch=4, sequence=16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    for tokens in torch.zeros(4, 16, dtype=torch.long).split(fitted.configuration.micro_batch):
        model(tokens).mean().backward()
    optimizer.step()
print(process.memory_info().rss - before, fitted.num_bytes)
"""


def test_a_budget_covers_what_the_first_use_imports() -> None:
    command = [sys.executable, "-c", _FIRST_USE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, predicted = map(int, done.stdout.split())
    assert grown > 80_000_000, "of which imports are 65 MB or more"
    assert abs(predicted / grown - 1) < 0.1


def test_units_are_the_repeated_blocks() -> None:
    with pytest.raises(PlanError, match="repeated blocks as units"):
        fit(build(LLAMA), budget="1 GB", batch=1, sequence=8, units=nn.Linear)
