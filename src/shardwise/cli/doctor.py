"""``shardwise doctor``."""

from typing import Annotated

import typer

from shardwise.errors import CheckpointDamaged


def doctor(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="The directory of a checkpoint, or its URL.")
    ],
) -> None:
    """Check every byte of a checkpoint against its checksums.

    Exit code 0 means that it is whole, 1 that it is not; then each line names what is damaged.
    """
    from shardwise.checkpoint.offline import examine  # noqa: PLC0415 (torch takes seconds)

    problems = examine(checkpoint)
    if problems:
        raise CheckpointDamaged("\n".join(problems))
    typer.echo(f"{checkpoint}: whole")
