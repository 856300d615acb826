"""What the first rank shows and keeps of a run."""

import signal as signals

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from shardwise.train.memory import Footprint, foresee, one_process, one_rank
from shardwise.train.picture import draw_losses
from shardwise.train.progress import Steps, show_steps
from shardwise.train.records import Record, Start, Summary
from shardwise.train.run_directory import MetricsFile, RunDirectory
from shardwise.train.tables import in_bytes, memory_table, switches_table, units_table

__all__ = ["Display"]

NO_PICTURE = 'loss.png was not drawn, matplotlib is missing: pip install "shardwise[plot]"'


class Display:
    """Shows a run on a console and writes its files."""

    def __init__(self, console: Console, directory: RunDirectory) -> None:
        self._console = console
        self._directory = directory
        self._metrics = MetricsFile(directory.metrics)
        self._records = directory.history()
        self._start: Start
        self._steps: Steps | None = None

    def begin(self, start: Start) -> None:
        self._start = start
        config, plan = start.config, start.plan
        self._say(f"{config.run.name}: {start.text}")
        self._say(
            f"{self._ranks} on {start.device}, strategy {plan.strategy.name}, "
            f"prefetch {plan.prefetch}"
        )
        self._console.print(units_table(plan))
        rank = one_rank(plan, foresee(plan, config, start.device))
        self._show_memory("memory, foreseen", rank, one_process(plan))
        if start.switches:
            self._console.print(switches_table(start.switches))
        if self._directory.checkpoint is not None:
            self._say(f"goes on after step {self._directory.step}: {self._directory.checkpoint}")
        self._steps = show_steps(self._console, config.train.steps, config.run.log_every)

    def step(self, record: Record) -> None:
        self._records.append(record)
        self._metrics.append(record)
        assert self._steps is not None
        self._steps.show(record)

    def stop(self, signal: int, step: int) -> None:
        self.close()
        name, steps = signals.Signals(signal).name, self._start.config.train.steps
        self._say(
            f"stopped by {name} after step {step} of {steps}, which is saved; to go on: "
            f"shardwise train {self._directory.config}"
        )

    def end(self, summary: Summary) -> None:
        self.close()
        self._show_losses(summary)
        if self._start.config.sample.bytes:
            self._console.print(Panel(Text(summary.sample), title="sample", title_align="left"))
        self._show_memory("memory, at the end", summary.rank, summary.process)
        self._show_pace(summary)
        self._draw()
        self._directory.write_summary(summary)
        files = ", ".join(sorted(file.name for file in self._directory.path.iterdir()))
        self._say(f"run directory: {self._directory.path} ({files})")

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._metrics.close()

    def _show_memory(self, title: str, rank: Footprint, process: Footprint) -> None:
        num_ranks = self._start.config.shard.nproc
        self._console.print(memory_table(title, rank, process, num_ranks))

    def _show_losses(self, summary: Summary) -> None:
        baselines = self._start.baselines
        self._say(
            f"loss {summary.loss:.3f} in training (mean of the last {summary.loss_steps} steps), "
            f"{summary.validation_loss:.3f} in validation, in nats per byte"
        )
        self._say(
            f"to compare: {baselines.uniform:.2f} knows nothing, {baselines.unigram:.2f} knows how "
            f"frequent each byte is, {baselines.bigram:.2f} also the byte before it"
        )

    def _show_pace(self, summary: Summary) -> None:
        least, most = (in_bytes(f(summary.resident_peaks)) for f in (min, max))
        self._say(
            f"resident peak of a rank as measured, libraries and activations included: "
            f"{least if least == most else f'{least} to {most}'}"
        )
        pace = f"{summary.tokens:,} tokens at {summary.tokens_per_second:,.0f} tokens/s"
        hidden = f"; {summary.overlapped_share:.0%} of the gathers' time hidden behind compute"
        self._say(pace + (hidden if len(summary.resident_peaks) > 1 else ""))

    def _draw(self) -> None:
        title = f"{self._start.config.run.name} on {self._ranks}"
        try:
            draw_losses(self._directory.picture, title, self._records, self._start.baselines)
        except ModuleNotFoundError:
            self._say(NO_PICTURE)

    @property
    def _ranks(self) -> str:
        num_ranks = self._start.config.shard.nproc
        return f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
