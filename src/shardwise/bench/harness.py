"""`shardwise bench`: starts the ranks of each measurement, one after another; tells the results.

Everything is measured in processes of its own, so that one engine's memory is no other's: the heats
of the rounds, the tiny units, and for each engine a run for its traffic and memory, and one for its
memory with another setting of malloc.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from shardwise.bench.engines import ALONE, ALONE_BF16, BASE, ENGINES, choose_engines, missing_peers
from shardwise.bench.figures import Inspected, Results, Row, merge, summarise
from shardwise.bench.fresh import MMAP_THRESHOLD, inspect_engine, measure_resident_peak
from shardwise.bench.heats import plan_heats
from shardwise.bench.machine import available_bytes, describe_machine
from shardwise.bench.progress import show_progress
from shardwise.bench.report import open_report
from shardwise.bench.rounds import run_heat, run_tiny_heat
from shardwise.bench.setting import Request, Setting, read_shape
from shardwise.bench.work import NUM_TINY_UNITS, gpt_work
from shardwise.errors import ConfigError
from shardwise.launch.environment import read_rank_env
from shardwise.launch.local import run_on_local_ranks
from shardwise.transport.device import num_local_gpus

__all__ = ["run"]

WIDTH = 150  # of the tables: in a file or a narrow window, too, every figure is whole


def run(request: Request) -> None:
    """Compare the engines that ``request`` names, on local CPU ranks.

    Raises:
        ConfigError: something that was asked for cannot be done; nothing has been started.
        RankError: an engine failed.
    """
    request.check()
    _check_place()
    setting = Setting(
        size=request.size,
        shape=read_shape(request.size, request.sequence),
        ranks=request.ranks,
        dtype=request.dtype,
        engines=choose_engines(request),
        rounds=request.rounds,
        batch=request.batch,
    )
    results = Results(
        setting=setting,
        num_parameters=_count_parameters(setting),
        rows={name: Row(name) for name in setting.engines},
        rounds=[],
        tiny_rounds=[],
        absent=missing_peers(request),
    )
    machine = describe_machine(with_deepspeed="deepspeed" in results.rows)
    report = open_report(request.out, request.size)
    try:
        Harness(results, request.measures).measure()
    finally:
        report.write(results, machine)  # as far as it came
    report.show(results, machine, Console(width=max(WIDTH, Console().width)))


def _check_place() -> None:
    if read_rank_env(os.environ) is not None:
        raise ConfigError(
            "bench starts ranks of its own, several times over; run it without a launcher"
        )
    if num_local_gpus():
        raise ConfigError("bench compares on CPU ranks; hide the GPUs: CUDA_VISIBLE_DEVICES=''")


def _count_parameters(setting: Setting) -> int:
    with torch.device("meta"):
        model = gpt_work(setting).build()
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True, slots=True)
class Harness:
    """Fills in ``results``."""

    results: Results
    measures: Sequence[str]

    def measure(self) -> None:
        """Short runs of every engine first, so that one that fails does so soon."""
        by_name: dict[str, Callable[[], None]] = {
            "traffic": self._inspect,
            "memory": self._measure_trimmed,
            "units": self._measure_units,
            "time": self._measure_time,
        }
        for name, measure in by_name.items():
            if name in self.measures:
                measure()

    def _measure_time(self) -> None:
        results, setting = self.results, self.results.setting
        heats = plan_heats(setting, results.num_parameters, available_bytes())
        for number, names in enumerate(heats):
            of = f", heat {number + 1} of {len(heats)}" if len(heats) > 1 else ""
            title = f"rounds of {len(names)} engines{of}"
            by_rank = run_on_local_ranks(setting.ranks, run_heat, setting, names, title)
            results.rounds.extend(merge(number, by_rank))
        for name, times in summarise(results.rounds, BASE).items():
            results.rows[name].times = times

    def _measure_units(self) -> None:
        results, setting = self.results, self.results.setting
        names = list(setting.engines)
        title = f"rounds of {NUM_TINY_UNITS} tiny units"
        by_rank = run_on_local_ranks(setting.ranks, run_tiny_heat, setting, names, title)
        results.tiny_rounds.extend(merge(0, by_rank))
        for name, times in summarise(results.tiny_rounds, BASE).items():
            results.rows[name].unit_microseconds = times.seconds / NUM_TINY_UNITS * 1e6

    def _inspect(self) -> None:
        setting, rows = self.results.setting, self.results.rows
        copied = {}
        with show_progress("traffic of", len(self._alone) + len(rows)) as begin:
            for name in (*self._alone, *rows):
                begin(name)
                by_rank = run_on_local_ranks(setting.ranks, inspect_engine, setting, name)
                copied[name] = max(one.traffic.copied_bytes for one in by_rank)
                if name in rows:
                    rows[name].inspected = Inspected(
                        copied_bytes=copied[name] - copied[self._alone_of(name)],
                        sent_bytes=max(one.traffic.sent_bytes for one in by_rank),
                        num_collectives=max(one.traffic.num_collectives for one in by_rank),
                        live_peak=max(one.live_peak for one in by_rank),
                        resident_peak=max(one.resident_peak for one in by_rank),
                    )

    def _measure_trimmed(self) -> None:
        setting, rows = self.results.setting, self.results.rows
        with show_progress("memory of", len(rows)) as begin:
            for name, row in rows.items():
                begin(name)
                told = (setting, name, MMAP_THRESHOLD)
                row.trimmed_peak = max(
                    run_on_local_ranks(setting.ranks, measure_resident_peak, *told)
                )

    @property
    def _alone(self) -> tuple[str, ...]:
        """The runs without an engine that are needed."""
        return tuple(dict.fromkeys(self._alone_of(name) for name in self.results.rows))

    def _alone_of(self, name: str) -> str:
        is_half = self.results.setting.is_bf16 and not ENGINES[name].autocasts
        return ALONE_BF16 if is_half else ALONE
