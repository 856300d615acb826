"""``shardwise train``."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Put a value over the file's."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Local ranks, instead of shard.nproc.")
    ] = None,
) -> None:
    """Train a GPT, sharded over ranks.

    Starts its local ranks itself, unless a launcher such as torchrun has started this process as
    one of several (RANK and WORLD_SIZE are set): then it joins them.
    """
    from shardwise.train.run import run  # noqa: PLC0415 (torch takes seconds to import)
    from shardwise.train.settings import read_config  # noqa: PLC0415

    run(read_config(config, settings or []), nproc)
