"""``shardwise train``."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="The configuration of the run.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the file."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Number of local ranks (default: shard.nproc).")
    ] = None,
) -> None:
    """Train a GPT, sharded over ranks.

    Starts local ranks, or joins the ranks of a launcher such as torchrun (RANK and WORLD_SIZE are
    set). SIGINT and SIGTERM save a checkpoint and stop; run the same command to resume.
    """
    from shardwise.train.config import read_config  # noqa: PLC0415
    from shardwise.train.run import run  # noqa: PLC0415 (imports torch)

    run(read_config(config, settings or []), nproc)
