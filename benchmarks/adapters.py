"""``python -m benchmarks.adapters``: predicted and measured steps of LoRA and QLoRA.

Llamas with 1 and 51 million parameters are trained whole, with LoRA and with QLoRA, on local CPU
ranks with one thread each. In each round, the machine is calibrated in the same processes, as by
``shardwise doctor --calibrate``, and then a few steps of every case are timed. Figures are medians
over the rounds: predicted and measured seconds, and the error of their ratio within a round.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise.bench import harness
from shardwise.bench.calibrate import calibration_of, measure_ranks
from shardwise.bench.work import fused_adamw
from shardwise.forecast.adapters import Adapters
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.calibrated import CalibratedMachine
from shardwise.forecast.models.adapted import adapt
from shardwise.forecast.models.model import Model
from shardwise.forecast.models.transformer import Shape, build
from shardwise.forecast.planned import sharding_of
from shardwise.launch.world import World

MODELS = {
    "1M": Shape(arch="llama", layers=3, hidden=128, heads=4, vocab=1000, ffn=256),
    "51M": Shape(arch="llama", layers=8, hidden=640, heads=10, vocab=8000, ffn=1792),
    "tiny": Shape(arch="llama", layers=2, hidden=16, heads=2, vocab=64, ffn=32),
}
KINDS = {"whole": None, "LoRA": Adapters(rank=8), "QLoRA": Adapters(rank=8, quantized=True)}
WARM_UP, SECONDS, MOST_STEPS = 2, 3.0, 30  # steps that are not timed; time for those that are


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("adapters", __doc__, ranks=2, rounds=3)
    parser.add_argument("--models", default="1M,51M", help="names of models")
    parser.add_argument("--sequence", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    options = parser.parse_args()
    rows = harness.run_ranks(options.ranks, measure, options)[0]
    columns: list[harness.Column] = [
        ("predicted, ms", "predicted", lambda seconds: f"{seconds * 1e3:.1f}"),
        ("measured", "seconds", lambda seconds: f"{seconds * 1e3:.1f}"),
        ("error", "error", "{:+.1%}".format),
        ("least", "least", "{:+.1%}".format),
        ("most", "most", "{:+.1%}".format),
    ]
    print_figures(f"steps on {options.ranks} CPU ranks", columns, rows, options.out)


def measure(world: World, options: Namespace) -> dict[str, harness.Figures]:
    """Calibrate and train in turns; return the figures of each case."""
    base = Configuration(
        shard_size=world.size,
        micro_batch=options.batch,
        sequence=options.sequence,
        compute_dtype=torch.float32,
    )
    cases = {
        f"{model} {kind}": (Model(model, MODELS[model]), replace(base, adapters=adapters))
        for model in options.models.split(",")
        for kind, adapters in KINDS.items()
    }
    steps = {name: _step_of(*case) for name, case in cases.items()}
    forecasters: dict[Model, Forecaster] = {}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with harness.show_progress("rounds", options.rounds, visible=world.is_first) as begin:
        for number in range(options.rounds):
            begin(f"round {number + 1}")
            calibration = calibration_of({world.size: measure_ranks(world)})
            machine = CalibratedMachine.measured_on(calibration, world.size)
            for name, (model, configuration) in cases.items():
                forecaster = forecasters.setdefault(model, Forecaster(model, machine))
                forecaster.machine = machine
                predicted = forecaster.forecast(configuration).step.seconds
                found[name].append((predicted, _seconds(world, steps[name])))
    return {name: _figures(pairs) for name, pairs in found.items()}


def _figures(pairs: list[tuple[float, float]]) -> harness.Figures:
    errors = [predicted / seconds - 1 for predicted, seconds in pairs]
    predicted, seconds = (statistics.median(values) for values in zip(*pairs, strict=True))
    return {
        "predicted": predicted,
        "seconds": seconds,
        "error": statistics.median(errors),
        "least": min(errors),
        "most": max(errors),
    }


def _step_of(model: Model, configuration: Configuration) -> Callable[[], None]:
    """Return a function that takes a step of the sharded model."""
    torch.manual_seed(0)
    assert model.shape is not None
    module = build(model.shape).to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    if configuration.adapters is not None:
        adapt(module, configuration.adapters, base=torch.float32, trained=torch.float32)
    sw.fully_shard(module, **sharding_of(configuration))
    optimizer = fused_adamw([one for one in module.parameters() if one.requires_grad])
    size = configuration.micro_batch, configuration.sequence
    return partial(_step, module, optimizer, torch.zeros(size, dtype=torch.long))


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, tokens: Any) -> None:
    module(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _seconds(world: World, step: Callable[[], None]) -> float:
    """Return the median time of a step, of the slowest rank."""
    for _ in range(WARM_UP):
        step()
    seconds: list[float] = []
    deadline = time.perf_counter() + SECONDS
    while len(seconds) < MOST_STEPS and world.gather(time.perf_counter() < deadline)[0]:
        dist.barrier()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return max(world.gather(statistics.median(seconds)))


if __name__ == "__main__":
    main()
