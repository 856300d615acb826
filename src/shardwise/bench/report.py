"""What a comparison leaves behind: tables, results.json and, with matplotlib, bench.png."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.bench.figures import LOSS_TOLERANCE, Results
from shardwise.bench.machine import Machine
from shardwise.bench.picture import draw_results
from shardwise.bench.tables import memory_table, time_table, traffic_table
from shardwise.bench.work import NUM_TINY_UNITS
from shardwise.errors import ConfigError
from shardwise.train.run_directory import make_new_directory

__all__ = ["Report", "open_report"]

NO_PICTURE = 'bench.png was not drawn, matplotlib is missing: pip install "shardwise[plot]"'
PRECISION = (
    "bf16: ddp and zero-optimizer run under torch.autocast; the others gather, compute and reduce "
    "in bfloat16 and keep float32 shards"
)


@dataclass(frozen=True, slots=True)
class Report:
    """A directory."""

    path: Path

    def write(self, results: Results, machine: Machine) -> None:
        text = json.dumps(_as_json(results, machine), indent=1)
        (self.path / "results.json").write_text(text + "\n", encoding="utf-8")

    def show(self, results: Results, machine: Machine, console: Console) -> None:
        setting, rows = results.setting, list(results.rows.values())
        console.print(
            f"GPT of {results.num_parameters:,} parameters, {setting.ranks} CPU ranks, "
            f"{setting.dtype}, {setting.batch} x {setting.shape.context} tokens of a rank in a "
            f"step, fused AdamW; torch {machine.torch}, {machine.processor}, {machine.cores} cores"
            + (f", {machine.malloc}" if machine.malloc else ""),
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
        tables = (
            (time_table, results.rounds),
            (traffic_table, [row for row in rows if row.inspected]),
            (memory_table, [row for row in rows if row.resident_peak or row.unit_microseconds]),
        )
        for table, has_any in tables:
            if has_any:
                console.print(table(results))
        for line in self._remarks(results):
            console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _remarks(self, results: Results) -> list[str]:
        remarks = [f"{name} is not installed, and so not compared" for name in results.absent]
        if results.setting.is_bf16:
            remarks.append(PRECISION)
        if results.rounds:
            load = max(round_.load for round_ in results.rounds)
            others = max(round_.others for round_ in results.rounds)
            remarks.append(
                f"{results.num_noisy} of {len(results.rounds)} rounds were noisy and are left out; "
                f"load up to {load:.1f}, other processes kept up to {others:.1f} cores busy"
            )
        try:
            draw_results(self.path / "bench.png", results)
        except ModuleNotFoundError:
            remarks.append(NO_PICTURE)
        files = ", ".join(sorted(file.name for file in self.path.iterdir()))
        return [*remarks, f"results: {self.path} ({files})"]


def open_report(out: Path | None, size: str) -> Report:
    """Make the directory ``out``, or one under runs/.

    Raises:
        ConfigError: it cannot be made, or already holds files.
    """
    try:
        if out is None:
            name = f"bench-{Path(size).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            return Report(make_new_directory(Path("runs"), name))
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"--out {out}: already holds files; choose another")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    return Report(out)


def _as_json(results: Results, machine: Machine) -> dict[str, Any]:
    document: dict[str, Any] = {
        "machine": asdict(machine),
        "setting": asdict(results.setting) | {"parameters": results.num_parameters},
        "absent": results.absent,
        "loss_tolerance": None if results.setting.is_bf16 else LOSS_TOLERANCE,
        "tiny_units": NUM_TINY_UNITS,
        "engines": {name: asdict(row) for name, row in results.rows.items()},
        "rounds": [asdict(round_) for round_ in results.rounds],
        "tiny_rounds": [asdict(round_) for round_ in results.tiny_rounds],
    }
    for name, row in results.rows.items():
        document["engines"][name]["resident_peak"] = row.resident_peak
    base = results.setting.engines[0]
    for round_ in (*document["rounds"], *document["tiny_rounds"]):
        of_base = round_["turns"][base]
        for turn in round_["turns"].values():
            turn["ratio"] = turn["seconds"] / of_base["seconds"]
            turn["cpu_ratio"] = turn["cpu_seconds"] / of_base["cpu_seconds"]
    return document
