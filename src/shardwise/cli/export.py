"""``shardwise export``."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="The directory or URL of a checkpoint.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The path to write; it must not exist.")
    ],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="hf|dcp|torch",
            help="hf: a directory with the weights in safetensors; dcp: a directory for "
            "torch.distributed.checkpoint; torch: a file for torch.load.",
        ),
    ] = "hf",
) -> None:
    """Convert a checkpoint to the format of another program, in one process on any machine."""
    from shardwise.checkpoint.offline import export as write  # noqa: PLC0415 (torch takes seconds)

    write(checkpoint, out, format_)
    typer.echo(f"{out}: written")
