"""`shardwise bench`: starts the ranks of each measurement in turn, and shows the results.

Each measurement has processes of its own, so that the memory of one engine does not show in
another's: the heats of the rounds, the tiny units, and two runs per engine for traffic and memory.
"""

import os

import torch
from rich.console import Console

from shardwise.bench import report
from shardwise.bench.engines import ALONE, ALONE_BF16, BASE, ENGINES, choose_engines, missing_peers
from shardwise.bench.figures import Inspected, Results, Row, merge, summarise
from shardwise.bench.inspection import MMAP_THRESHOLD, inspect_engine, measure_resident_peak
from shardwise.bench.machine import available_bytes, describe_machine
from shardwise.bench.options import BenchOptions, Setting, read_shape
from shardwise.bench.progress import show_progress
from shardwise.bench.rounds import plan_heats, run_heat, run_tiny_heat
from shardwise.bench.work import NUM_TINY_UNITS, gpt_work
from shardwise.errors import ConfigError
from shardwise.launch.environment import read_rank_env
from shardwise.launch.local import run_on_local_ranks
from shardwise.transport.device import num_local_gpus

__all__ = ["run"]

WIDTH = 150  # of the tables, so that no figure is cut in a file or a narrow window


def run(options: BenchOptions) -> None:
    """Compare the engines that ``options`` name, on local CPU ranks.

    Raises:
        ConfigError: an option is not valid here; nothing has been started.
        RankError: an engine failed.
    """
    options.check()
    _check_place()
    setting = Setting(
        size=options.size,
        shape=read_shape(options.size, options.sequence),
        ranks=options.ranks,
        dtype=options.dtype,
        engines=choose_engines(options),
        rounds=options.rounds,
        batch=options.batch,
    )
    results = Results(
        setting=setting,
        num_parameters=_count_parameters(setting),
        rows={name: Row(name) for name in setting.engines},
        rounds=[],
        tiny_rounds=[],
        absent=missing_peers(options),
    )
    machine = describe_machine(with_deepspeed="deepspeed" in results.rows)
    directory = report.make_directory(options.out, options.size)
    # Short runs of every engine first, so that one that fails does so early.
    measures = {
        "traffic": _inspect,
        "memory": _measure_trimmed,
        "units": _measure_units,
        "time": _measure_time,
    }
    try:
        for name, measure in measures.items():
            if name in options.measures:
                measure(results)
    finally:
        report.write(directory, results, machine)  # what there is, after an error too
    report.show(directory, results, machine, Console(width=max(WIDTH, Console().width)))


def _check_place() -> None:
    if read_rank_env(os.environ) is not None:
        raise ConfigError(
            "bench starts its own ranks, several times over; run it without a launcher"
        )
    if num_local_gpus():
        raise ConfigError("bench compares on CPU ranks; hide the GPUs: CUDA_VISIBLE_DEVICES=''")


def _count_parameters(setting: Setting) -> int:
    with torch.device("meta"):
        model = gpt_work(setting).build()
    return sum(parameter.numel() for parameter in model.parameters())


def _measure_time(results: Results) -> None:
    setting = results.setting
    heats = plan_heats(setting, results.num_parameters, available_bytes())
    for number, names in enumerate(heats):
        suffix = f", heat {number + 1} of {len(heats)}" if len(heats) > 1 else ""
        title = f"rounds of {len(names)} engines{suffix}"
        by_rank = run_on_local_ranks(setting.ranks, run_heat, setting, names, title)
        results.rounds.extend(merge(number, by_rank))
    for name, times in summarise(results.rounds, BASE).items():
        results.rows[name].times = times


def _measure_units(results: Results) -> None:
    setting = results.setting
    names = list(setting.engines)
    title = f"rounds of {NUM_TINY_UNITS} tiny units"
    by_rank = run_on_local_ranks(setting.ranks, run_tiny_heat, setting, names, title)
    results.tiny_rounds.extend(merge(0, by_rank))
    for name, times in summarise(results.tiny_rounds, BASE).items():
        results.rows[name].unit_microseconds = times.seconds / NUM_TINY_UNITS * 1e6


def _inspect(results: Results) -> None:
    setting, rows = results.setting, results.rows
    alone = {name: _without_engine(setting, name) for name in rows}
    copied = {}
    names = dict.fromkeys((*alone.values(), *rows))
    with show_progress("traffic of", len(names)) as begin:
        for name in names:
            begin(name)
            by_rank = run_on_local_ranks(setting.ranks, inspect_engine, setting, name)
            copied[name] = max(one.traffic.copied_bytes for one in by_rank)
            if name in rows:
                rows[name].inspected = Inspected(
                    copied_bytes=copied[name] - copied[alone[name]],
                    sent_bytes=max(one.traffic.sent_bytes for one in by_rank),
                    num_collectives=max(one.traffic.num_collectives for one in by_rank),
                    live_peak=max(one.live_peak for one in by_rank),
                    resident_peak=max(one.resident_peak for one in by_rank),
                )


def _measure_trimmed(results: Results) -> None:
    setting = results.setting
    with show_progress("memory of", len(results.rows)) as begin:
        for name, row in results.rows.items():
            begin(name)
            arguments = (setting, name, MMAP_THRESHOLD)
            peaks = run_on_local_ranks(setting.ranks, measure_resident_peak, *arguments)
            row.trimmed_peak = max(peaks)


def _without_engine(setting: Setting, name: str) -> str:
    """The run whose copies are subtracted from those of engine ``name``."""
    return ALONE_BF16 if setting.is_bf16 and not ENGINES[name].autocasts else ALONE
