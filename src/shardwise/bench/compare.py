"""`shardwise bench`: starts the ranks of each measurement in turn and shows the results.

Each measurement starts new processes, so that engines do not affect each other's memory. Traffic
and memory take two runs per engine. Steps are timed with all engines in the same processes; if
their models do not fit into memory together, they run in several heats, each with the base.
"""

from collections.abc import Callable, Sequence

import psutil
import torch

from shardwise.bench import report
from shardwise.bench.engines import ALONE, ALONE_BF16, BASE, ENGINES, choose_engines, missing_peers
from shardwise.bench.harness import (
    Round,
    TimeLeft,
    check_place,
    largest,
    medians,
    merge,
    ratio,
    run_ranks,
    show_progress,
)
from shardwise.bench.measure import (
    MMAP_THRESHOLD,
    inspect_engine,
    measure_resident_peak,
    measure_steps,
)
from shardwise.bench.options import BenchOptions, Setting, read_shape
from shardwise.bench.report import Comparison, Row
from shardwise.bench.work import NUM_TINY_UNITS, gpt_work, tiny_work

__all__ = ["run"]

# Bytes per parameter: the parameter, its gradient and AdamW's two states. A sharded engine also
# needs memory for gathered units, and for freed memory that is not returned to the system.
WHOLE, FOR_GATHERED = 16, 4
SHARE_OF_MEMORY = 0.6  # the rest is for activations and other processes


def run(options: BenchOptions) -> None:
    options.check()
    check_place()
    setting = Setting(
        size=options.size,
        shape=read_shape(options.size, options.sequence),
        ranks=options.ranks,
        dtype=options.dtype,
        engines=choose_engines(options),
        rounds=options.rounds,
        batch=options.batch,
    )
    rows = {name: Row() for name in setting.engines}
    with torch.device("meta"):
        num_parameters = sum(one.numel() for one in gpt_work(setting).build().parameters())
    compared = Comparison(setting, num_parameters, missing_peers(options), rows)
    directory = report.make_directory(options.out, options.size)
    # Short runs come first, so that a failing engine fails early.
    measures: dict[str, Callable[[Comparison, TimeLeft], None]] = {
        "traffic": _measure_traffic,
        "memory": _measure_trimmed,
        "units": _measure_units,
        "time": _measure_time,
    }
    chosen = [name for name in measures if name in options.measured]
    eta = TimeLeft(sum(_num_runs(name, setting) for name in chosen))
    try:
        for name in chosen:
            measures[name](compared, eta)
    finally:
        report.write(directory, compared)  # also after an error, with the results so far
    report.show(directory, compared)


def _num_runs(measure: str, setting: Setting) -> int:
    """Return the number of runs of one engine that take about as long as a measurement."""
    num_engines = len(setting.engines)
    return num_engines + 1 if measure in ("traffic", "memory") else max(2, num_engines // 2)


def _measure_time(compared: Comparison, eta: TimeLeft) -> None:
    setting, rounds = compared.setting, compared.rounds
    heats = plan_heats(setting, compared.num_parameters, psutil.virtual_memory().available)
    for number, names in enumerate(heats):
        suffix = f", heat {number + 1} of {len(heats)}" if len(heats) > 1 else ""
        title = f"steps of {len(names)} engines{suffix}{eta}"
        by_rank = run_ranks(setting.ranks, measure_steps, setting, gpt_work, names, title)
        rounds.extend(merge(by_rank))
        eta.advance(_num_runs("time", setting) / len(heats))
    for name, row in compared.rows.items():
        row.ratio = ratio(rounds, name, BASE)
        row.cpu_ratio = ratio(rounds, name, BASE, "cpu_seconds")
        gap = loss_gap(rounds, name)
        row.figures |= medians(rounds, name) | {"loss_gap": gap}
        if ENGINES[name].is_exact and not setting.is_bf16:
            row.figures["same_loss"] = float(gap <= report.LOSS_TOLERANCE)


def loss_gap(rounds: Sequence[Round], name: str) -> float:
    """Return the largest difference from the base's loss in nats, over all rounds."""
    shared = [round_.cases for round_ in rounds if name in round_.cases]
    return max(abs(cases[name]["loss"] - cases[BASE]["loss"]) for cases in shared)


def _measure_units(compared: Comparison, eta: TimeLeft) -> None:
    setting = compared.setting
    title = f"steps of {NUM_TINY_UNITS} tiny units{eta}"
    names = list(setting.engines)
    by_rank = run_ranks(setting.ranks, measure_steps, setting, tiny_work, names, title)
    compared.tiny_rounds.extend(merge(by_rank))
    eta.advance(_num_runs("units", setting))
    for name, row in compared.rows.items():
        seconds = medians(compared.tiny_rounds, name)["seconds"]
        row.figures["unit_microseconds"] = seconds / NUM_TINY_UNITS * 1e6


def _measure_traffic(compared: Comparison, eta: TimeLeft) -> None:
    setting, rows = compared.setting, compared.rows
    alone = {
        name: ALONE_BF16 if setting.is_bf16 and not ENGINES[name].uses_autocast else ALONE
        for name in rows
    }
    copied = {}
    names = dict.fromkeys((*alone.values(), *rows))
    with show_progress("traffic of", len(names)) as begin:
        for name in names:
            begin(f"{name}{eta}")
            found = largest(run_ranks(setting.ranks, inspect_engine, setting, name))
            eta.advance()
            copied[name] = found["copied_bytes"]
            if name in rows:
                found["copied_bytes"] -= copied[alone[name]]
                rows[name].figures |= found


def _measure_trimmed(compared: Comparison, eta: TimeLeft) -> None:
    setting = compared.setting
    with show_progress("memory of", len(compared.rows)) as begin:
        for name, row in compared.rows.items():
            begin(f"{name}{eta}")
            arguments = (setting, name, MMAP_THRESHOLD)
            peaks = run_ranks(setting.ranks, measure_resident_peak, *arguments)
            eta.advance()
            row.figures["trimmed_peak"] = max(peaks)


def plan_heats(setting: Setting, num_parameters: int, available_bytes: int) -> list[list[str]]:
    """Group the engines that share processes; each group starts with the base.

    ``available_bytes`` of the machine are 0 if unknown, which puts all engines into one heat.
    """
    base, *others = setting.engines
    limit = int(SHARE_OF_MEMORY * available_bytes)
    heats: list[list[str]] = [[base]]
    for name in others:
        needed = _heat_bytes([*heats[-1], name], setting.ranks, num_parameters)
        if available_bytes and needed > limit and len(heats[-1]) > 1:
            heats.append([base])
        heats[-1].append(name)
    return heats


def _heat_bytes(names: Sequence[str], ranks: int, num_parameters: int) -> int:
    per_rank = (
        WHOLE if ENGINES[name].is_replicated else WHOLE // ranks + FOR_GATHERED for name in names
    )
    return sum(per_rank) * num_parameters * ranks
