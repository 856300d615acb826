"""How far the training is: a bar on a terminal, a line now and then elsewhere."""

from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shardwise.train.records import Record

__all__ = ["Bar", "Lines", "Steps", "show_steps"]


class Steps(Protocol):
    """Shows one step after the other."""

    def show(self, record: Record) -> None: ...

    def close(self) -> None: ...


def show_steps(console: Console, steps: int, log_every: int) -> Steps:
    """What fits ``console``: lines end up in files and in the logs of a CI."""
    return Bar(console, steps) if console.is_terminal else Lines(console, steps, log_every)


class Bar:
    """A line of the terminal that is drawn anew."""

    def __init__(self, console: Console, steps: int) -> None:
        self._pace = Pace(steps)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("steps", total=steps, status="starting")
        self._progress.start()

    def show(self, record: Record) -> None:
        self._pace.add(record)
        status = f"{_numbers(record, self._pace)}  {self._pace.time_left} left"
        self._progress.update(self._task, completed=record.step, status=status)
        if record.validation_loss is not None:
            self._progress.print(_validation(record))

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A line for the first step, each ``log_every``-th and the last."""

    def __init__(self, console: Console, steps: int, log_every: int) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._pace = Pace(steps)

    def show(self, record: Record) -> None:
        self._pace.add(record)
        if record.step in (1, self._steps) or record.step % self._log_every == 0:
            numbers = _numbers(record, self._pace)
            self._say(f"step {record.step}/{self._steps}  {numbers}  {self._pace.time_left} left")
        if record.validation_loss is not None:
            self._say(_validation(record))

    def close(self) -> None:
        pass

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


class Pace:
    """How fast the steps are lately; a single one says little on a busy machine."""

    KEPT = 0.9  # of the mean, by each new step

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._steps_left = steps
        self._step_seconds = 0.0
        self.tokens_per_second = 0.0

    @property
    def time_left(self) -> str:
        return str(timedelta(seconds=round(self._steps_left * self._step_seconds)))

    def add(self, record: Record) -> None:
        seconds = record.tokens / record.step / record.tokens_per_second
        kept = self.KEPT if self._step_seconds else 0.0
        self._step_seconds = kept * self._step_seconds + (1 - kept) * seconds
        self.tokens_per_second = record.tokens / record.step / self._step_seconds
        self._steps_left = self._steps - record.step


def _numbers(record: Record, pace: Pace) -> str:
    norm = "" if record.grad_norm is None else f"  grad norm {record.grad_norm:.2f}"
    return f"loss {record.loss:.3f}  {pace.tokens_per_second:,.0f} tokens/s{norm}"


def _validation(record: Record) -> str:
    return f"step {record.step}: validation loss {record.validation_loss:.3f}"
