"""``shardwise verify``."""

from typing import Annotated

import typer


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="gpt, moe, encoder-decoder, conv, lora (all of them by default), or your own: "
            "package.module:function or file.py:function, which returns (model_fn, batch_fn, "
            "loss_fn, units) for sw.verify.",
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Local ranks; 2 by default.")
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Some strategies, such as fsdp,zero2, and not all."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.")] = 2,
    corrupt: Annotated[
        str | None,
        typer.Option(
            metavar="PARAMETER",
            help="Add an error to its gradient on one rank, to see that it is found.",
        ),
    ] = None,
) -> None:
    """Compare sharded training with that of one process: loss, gradients, updated parameters.

    Exit code 0 means that all are equal, 1 that something differs, 2 that it could not be run.
    Starts its local ranks itself, or joins those of a launcher such as torchrun.
    """
    from shardwise.train.verifying import Request, run  # noqa: PLC0415 (torch takes seconds)

    names = None if strategies is None else tuple(map(str.strip, strategies.split(",")))
    run(Request(model, names, steps, corrupt), nproc)
