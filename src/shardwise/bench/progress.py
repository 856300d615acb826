"""How far the harness is: a bar on a terminal, a line for each thing begun elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

__all__ = ["show_progress"]


@contextmanager
def show_progress(
    title: str, total: int, *, visible: bool = True
) -> Iterator[Callable[[str], None]]:
    """On stderr; call what it yields, with a name or "", when the next of ``total`` parts begins.

    The bars of the harness and those of a rank take turns, for a rank lives within one part.
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
