"""Progress: a bar on a terminal, a line for each part that begins elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

__all__ = ["show_progress"]


@contextmanager
def show_progress(
    title: str, total: int, *, visible: bool = True
) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr.

    Yields a function to call, with a name or "", when the next of ``total`` parts begins.
    """
    console = Console(stderr=True, quiet=not visible)
    if not console.is_terminal:
        yield lambda name: console.print(f"{title} {name}") if name else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task(title, total=total, completed=-1)

        def begin(name: str) -> None:
            progress.update(task, description=f"{title} {name}".rstrip(), advance=1)

        yield begin
