"""``shardwise doctor``."""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import check_outputs
from shardwise.errors import CheckpointDamaged, ConfigError


def doctor(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CKPT", help="The directory or URL of a checkpoint.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="OUT.json", help="Measure this machine for `shardwise plan`."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Numbers of local ranks to measure (default: 1, and the number of GPUs or cores).",
        ),
    ] = None,
) -> None:
    """Check every byte of a checkpoint against its checksums, or measure this machine.

    Exits with 0 if the checkpoint is intact. Otherwise prints a line for each damage and exits with
    1.
    """
    if (checkpoint is None) == (calibrate is None):
        raise ConfigError("doctor: expected the path of a checkpoint, or --calibrate OUT.json")
    if calibrate is not None:
        _calibrate(calibrate, ranks)
    else:
        assert checkpoint is not None
        _examine(checkpoint)


def _examine(checkpoint: str) -> None:
    from shardwise.checkpoint.offline import examine  # noqa: PLC0415 (torch takes seconds)

    problems = examine(checkpoint)
    if problems:
        raise CheckpointDamaged("\n".join(problems))
    typer.echo(f"{checkpoint}: intact")


def _calibrate(out: Path, ranks: str | None) -> None:
    from shardwise.bench.calibrate import calibrate, default_ranks  # noqa: PLC0415
    from shardwise.launch.local import check_num_ranks  # noqa: PLC0415

    try:
        sizes = default_ranks() if ranks is None else sorted(set(map(int, ranks.split(","))))
    except ValueError as error:
        raise ConfigError(f"--ranks {ranks}: expected numbers separated by commas") from error
    for size in sizes:
        check_num_ranks(size, "--ranks")
    check_outputs(out)
    calibration = calibrate(sizes, lambda part: typer.echo(f"measuring {part}", err=True))
    calibration.write(out)
    for size, measured in calibration.ranks.items():
        typer.echo(f"{size} rank{'s' * (size > 1)}: {measured.summary()}")
    typer.echo(f"written to {out}; use it as shardwise plan MODEL --cluster {out}")
