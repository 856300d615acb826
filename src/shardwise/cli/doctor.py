"""``shardwise doctor``."""

from typing import Annotated

import typer

from shardwise.errors import CheckpointDamaged


def doctor(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="The directory or URL of a checkpoint.")
    ],
) -> None:
    """Check every byte of a checkpoint against its checksums.

    Exits with 0 if it is intact. Otherwise exits with 1 after a line for each damage.
    """
    from shardwise.checkpoint.offline import examine  # noqa: PLC0415 (torch takes seconds)

    problems = examine(checkpoint)
    if problems:
        raise CheckpointDamaged("\n".join(problems))
    typer.echo(f"{checkpoint}: intact")
